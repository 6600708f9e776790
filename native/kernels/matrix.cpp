// Rows of activations times packed matrices: how the work is cut, and which tile product does a cut.

#include "half.h"
#include "kernels.h"
#include "matrix_format.h"

// QUIRE_ISA is a name; this makes a number of it that #if can compare.
#define QUIRE_UNIT_isa_plain 0
#define QUIRE_UNIT_isa_dotprod 1
#define QUIRE_UNIT_isa_avx2 2
#define QUIRE_UNIT_isa_avx512 3
#define QUIRE_JOIN_(a, b) a##b
#define QUIRE_JOIN(a, b) QUIRE_JOIN_(a, b)
#define QUIRE_UNIT QUIRE_JOIN(QUIRE_UNIT_, QUIRE_ISA)

// clang-format off: what a file says of its unit, the next one uses
#if QUIRE_UNIT == 0
#include "matrix_plain.h"
#elif QUIRE_UNIT == 1
#include "matrix_neon.h"
#include "matrix_vector.h"
#include "matrix_neon_few.h"
#elif QUIRE_UNIT == 2
#include "matrix_avx2.h"
#include "matrix_vector.h"
#elif QUIRE_UNIT == 3
#include "matrix_avx512.h"
#include "matrix_vector.h"
#endif
#include "matrix_tiles.h"
#if QUIRE_UNIT == 1
#include "matrix_neon_panel.h"
#endif
// clang-format on

namespace quire::QUIRE_ISA {

extern const MatrixKernels matrix_kernels;

namespace {

#if QUIRE_UNIT != 1
template <class Format>
using Unpacked = InPlace<Format>;
#endif

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// A thread's rectangle of the product: its share of the tiles, for its share of the blocks of rows. Where tiles are few
// for so many threads, some threads have the same tiles and different rows.
struct Share {
    int64_t first_tile, last_tile, first_block, last_block;

    Share(int64_t num_tiles, int64_t num_blocks, int thread, int num_threads) {
        int row_parts = 1;
        while (num_threads % (2 * row_parts) == 0 && 2 * row_parts <= num_blocks &&
               num_tiles * row_parts < 8 * num_threads)
            row_parts *= 2;
        const int tile_parts = num_threads / row_parts, tile_part = thread / row_parts, row_part = thread % row_parts;
        first_tile = num_tiles * tile_part / tile_parts;
        last_tile = num_tiles * (tile_part + 1) / tile_parts;
        first_block = num_blocks * row_part / row_parts;
        last_block = num_blocks * (row_part + 1) / row_parts;
    }
};

struct Product {
    const PackedMatrix& w;
    const Activations& a;
    int64_t rows;
    float* out;
    int64_t out_stride;
    uint8_t* panel;
    int thread, num_threads;

    template <class Format>
    void visit() const {
        if (rows > InPlace<Format>::max_rows)
            multiply<Unpacked<Format>>();
        else
            multiply<InPlace<Format>>();
    }

    // Panel after panel of tiles, each small enough for the second level cache, meets all blocks of rows.
    template <class Tiles>
    void multiply() const {
        const int64_t tile_bytes = Tiles::tile_bytes(w),
                      max_tiles = tile_bytes < kPanelBytes ? kPanelBytes / tile_bytes : 1;
        const Share share(w.num_tiles(), (rows + Tiles::max_rows - 1) / Tiles::max_rows, thread, num_threads);
        const GroupOrder order(rows, kRowBlock, w.num_inputs);
        const int64_t num_panels = (share.last_tile - share.first_tile + max_tiles - 1) / max_tiles;
        for (int64_t p = 0; p < num_panels; ++p) {
            const int64_t first = share.first_tile + (share.last_tile - share.first_tile) * p / num_panels;
            const int64_t last = share.first_tile + (share.last_tile - share.first_tile) * (p + 1) / num_panels;
            const uint8_t* tiles = Tiles::take(w, first, last, panel);
            for (int64_t block = share.first_block; block < share.last_block; ++block) {
                const int64_t row = block * Tiles::max_rows;
                const Block mine{a.x ? a.x + row * a.stride : nullptr, a.stride,
                                 a.groups ? a.groups + order.start(row) : nullptr, order.block_rows};
                multiply_rows<Tiles>(tiles, first, last, mine, min(Tiles::max_rows, rows - row),
                                     out + row * out_stride);
            }
        }
    }

    template <class Tiles, int Rows = Tiles::max_rows>
    void multiply_rows(const uint8_t* tile, int64_t first_tile, int64_t last_tile, const Block& mine, int64_t count,
                       float* to) const {
        if constexpr (Rows > 1)
            if (count < Rows) return multiply_rows<Tiles, Rows - 1>(tile, first_tile, last_tile, mine, count, to);
        const int64_t tile_bytes = Tiles::tile_bytes(w);
        for (int64_t t = first_tile; t < last_tile; ++t, tile += tile_bytes) {
            const int64_t first = t * kTileOutputs, num_outputs = min(kTileOutputs, w.num_outputs - first);
            if (num_outputs == kTileOutputs) {
                Tiles::template multiply<Rows>(tile, mine, w.num_inputs, to + first, out_stride);
            } else {
                float padded[Rows * kTileOutputs];
                Tiles::template multiply<Rows>(tile, mine, w.num_inputs, padded, kTileOutputs);
                for (int r = 0; r < Rows; ++r)
                    __builtin_memcpy(to + r * out_stride + first, padded + r * kTileOutputs,
                                     size_t(num_outputs) * sizeof(float));
            }
        }
    }
};

void multiply(const PackedMatrix& w, const Activations& a, int64_t rows, float* out, int64_t out_stride, uint8_t* panel,
              int thread, int num_threads) {
    if (rows > 0) visit_format(w, Product{w, a, rows, out, out_stride, panel, thread, num_threads});
}

// Codes are rounded to nearest, ties to even. A group below 2^-100 counts as zeros (127 / max would overflow); one with
// an Inf or NaN in it gets a NaN for a scale, so that every result that depends on it is NaN.
void quantize_group(const float* __restrict x, QuantizedGroup& __restrict out) {
    uint32_t max_bits = 0;  // of |x|: as integers, Inf and NaN are above all numbers
    for (int i = 0; i < kGroupInputs; ++i) {
        const uint32_t bits = bits_of_float(x[i]) & 0x7fffffff;
        max_bits = bits > max_bits ? bits : max_bits;
    }
    const float max = float_of_bits(max_bits);
    if (max_bits >= 0x7f800000 || max < 0x1p-100f) {
        out = QuantizedGroup{};
        if (max_bits >= 0x7f800000)
            out.scale = out.sum = out.half_sums[0] = out.half_sums[1] = float_of_bits(0x7fc00000);
        return;
    }
    const float to_code = 127.0f / max;
    const float counter =
        0x1.8p23f;  // floats count by ones there: adding it rounds, and leaves the code in the low bits
    for (int half = 0; half < 2; ++half) {
        int32_t sum = 0;
        for (int i = 16 * half; i < 16 * half + 16; ++i) {
            const int32_t code = int32_t(bits_of_float(x[i] * to_code + counter) - bits_of_float(counter));
            out.codes[i] = int8_t(code);
            sum += code;
        }
        out.half_code_sums[half] = sum;
    }
    out.scale = max / 127.0f;
    out.code_sum = out.half_code_sums[0] + out.half_code_sums[1];
    out.sum = out.scale * float(out.code_sum);
    for (int half = 0; half < 2; ++half) out.half_sums[half] = out.scale * float(out.half_code_sums[half]);
    out.unused = 0;
}

void quantize(const float* x, int64_t num_inputs, QuantizedGroup* groups, int64_t stride) {
    for (int64_t g = 0; g < num_inputs / kGroupInputs; ++g) quantize_group(x + g * kGroupInputs, groups[g * stride]);
}

}  // namespace

const MatrixKernels matrix_kernels = {kRowBlock, quantize, multiply};

}  // namespace quire::QUIRE_ISA
