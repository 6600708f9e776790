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

#if QUIRE_UNIT == 0
#include "matrix_plain.h"
#elif QUIRE_UNIT == 1
#include "matrix_neon.h"
#include "matrix_vector.h"
#elif QUIRE_UNIT == 2
#include "matrix_avx2.h"
#include "matrix_vector.h"
#elif QUIRE_UNIT == 3
#include "matrix_avx512.h"
#include "matrix_vector.h"
#endif

namespace quire::QUIRE_ISA {

extern const MatrixKernels matrix_kernels;

namespace {

// Weights that stay in the second level cache while blocks of rows stream past them.
constexpr int64_t kPanelBytes = 192 * 1024;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// The product is cut into panels of tiles and blocks of kMaxRows rows. Threads take equal runs of (panel, block), the
// blocks of a panel in turn: with few rows a panel is one tile, and each thread streams its part of the weights once.
struct Cuts {
    int64_t num_tiles, panel_tiles, num_panels, num_blocks;

    Cuts(const PackedMatrix& w, int64_t rows, int num_threads) {
        num_tiles = w.num_tiles();
        num_blocks = (rows + kMaxRows - 1) / kMaxRows;
        panel_tiles = num_blocks == 1 ? 1 : kPanelBytes / w.tile_bytes();
        if (panel_tiles < 1) panel_tiles = 1;
        while (panel_tiles > 1 && num_tiles * num_blocks < 8 * num_threads * panel_tiles) panel_tiles /= 2;
        num_panels = (num_tiles + panel_tiles - 1) / panel_tiles;
        panel_tiles = (num_tiles + num_panels - 1) / num_panels;  // all alike: a thread may get just one of them
        num_panels = (num_tiles + panel_tiles - 1) / panel_tiles;
    }
};

template <class Format, int Rows>
void multiply_block(const PackedMatrix& w, const Activations& a, int64_t first_tile, int64_t last_tile, float* out,
                    int64_t out_stride) {
    const int64_t tile_bytes = w.tile_bytes();
    for (int64_t t = first_tile; t < last_tile; ++t) {
        const uint8_t* tile = w.data + t * tile_bytes;
        const int64_t first = t * kTileOutputs, count = min(kTileOutputs, w.num_outputs - first);
        if (count == kTileOutputs) {
            TileProduct<Format, Rows>::run(tile, a, w.num_inputs, out + first, out_stride);
        } else {
            float padded[Rows * kTileOutputs];
            TileProduct<Format, Rows>::run(tile, a, w.num_inputs, padded, kTileOutputs);
            for (int r = 0; r < Rows; ++r)
                __builtin_memcpy(out + r * out_stride + first, padded + r * kTileOutputs,
                                 size_t(count) * sizeof(float));
        }
    }
}

// As multiply_block, of a number of rows known only now.
template <class Format, int Rows = kMaxRows>
void multiply_rows(const PackedMatrix& w, const Activations& a, int64_t rows, int64_t first_tile, int64_t last_tile,
                   float* out, int64_t out_stride) {
    if constexpr (Rows > 1)
        if (rows < Rows) return multiply_rows<Format, Rows - 1>(w, a, rows, first_tile, last_tile, out, out_stride);
    multiply_block<Format, Rows>(w, a, first_tile, last_tile, out, out_stride);
}

struct Product {
    const PackedMatrix& w;
    const Activations& a;
    int64_t rows;
    float* out;
    int64_t out_stride;
    int thread, num_threads;

    template <class Format>
    void visit() const {
        const Cuts cuts(w, rows, num_threads);
        const int64_t num_items = cuts.num_panels * cuts.num_blocks;
        const int64_t first = num_items * thread / num_threads, last = num_items * (thread + 1) / num_threads;
        const int64_t groups_per_row = w.num_inputs / kGroupInputs;
        for (int64_t item = first; item < last; ++item) {
            const int64_t tile = item / cuts.num_blocks * cuts.panel_tiles, row = item % cuts.num_blocks * kMaxRows;
            Activations block = a;
            block.x = a.x ? a.x + row * a.stride : nullptr;
            block.groups = a.groups ? a.groups + row * groups_per_row : nullptr;
            multiply_rows<Format>(w, block, min(kMaxRows, rows - row), tile,
                                  min(cuts.num_tiles, tile + cuts.panel_tiles), out + row * out_stride, out_stride);
        }
    }
};

void multiply(const PackedMatrix& w, const Activations& a, int64_t rows, float* out, int64_t out_stride, int thread,
              int num_threads) {
    if (rows > 0) visit_format(w, Product{w, a, rows, out, out_stride, thread, num_threads});
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

void quantize(const float* x, int64_t num_inputs, QuantizedGroup* groups) {
    for (int64_t g = 0; g < num_inputs / kGroupInputs; ++g) quantize_group(x + g * kGroupInputs, groups[g]);
}

}  // namespace

const MatrixKernels matrix_kernels = {quantize, multiply};

}  // namespace quire::QUIRE_ISA
