// Rows of activations times packed matrices: how the work is cut, and which tile product does a cut.

#include "half.h"
#include "kernels.h"
#include "matrix_format.h"

// QUIRE_ISA is a name; this makes a number of it that #if can compare.
#define QUIRE_UNIT_isa_plain 0
#define QUIRE_UNIT_isa_dotprod 1
#define QUIRE_UNIT_isa_avx2 2
#define QUIRE_UNIT_isa_avx512 3
#define QUIRE_UNIT_isa_avxvnni 4
#define QUIRE_UNIT_isa_i8mm 5
#define QUIRE_JOIN_(a, b) a##b
#define QUIRE_JOIN(a, b) QUIRE_JOIN_(a, b)
#define QUIRE_UNIT QUIRE_JOIN(QUIRE_UNIT_, QUIRE_ISA)
#define QUIRE_NEON (QUIRE_UNIT == 1 || QUIRE_UNIT == 5)

// clang-format off: what a file says of its unit, the next one uses
#if QUIRE_UNIT == 0
#include "matrix_plain.h"
#elif QUIRE_NEON
#include "matrix_neon.h"
#include "matrix_vector.h"
#include "matrix_neon_few.h"
#elif QUIRE_UNIT == 2
#include "matrix_avx2.h"
#include "matrix_vector.h"
#elif QUIRE_UNIT == 3
#include "matrix_avx512.h"
#include "matrix_vector.h"
#elif QUIRE_UNIT == 4
#include "matrix_avxvnni.h"
#include "matrix_vector.h"
#endif
#include "matrix_tiles.h"
#if QUIRE_UNIT == 1
#include "matrix_neon_panel.h"
#elif QUIRE_UNIT == 5
#include "matrix_neon_i8mm.h"
#endif
#if QUIRE_NEON
#include "matrix_neon_floats.h"
#include "matrix_neon_half.h"
#elif QUIRE_UNIT == 3
#include "matrix_avx512_panel.h"
#endif
// clang-format on

namespace quire::QUIRE_ISA {

extern const MatrixKernels matrix_kernels;

namespace {

// The tiles for many rows, and how many that is.
#if QUIRE_UNIT == 1
template <class Format>
constexpr int64_t kPanelRows = InPlace<Format>::max_rows + 1;
#elif QUIRE_UNIT == 5
template <class Format>
constexpr int64_t kPanelRows = 9;  // by the number of instructions that unpacking takes; not measured
#elif QUIRE_UNIT == 3
template <class Format>
using Unpacked = Avx512Panel<Format>;
template <class Format>
constexpr int64_t kPanelRows = 48;
#else
template <class Format>
using Unpacked = InPlace<Format>;
template <class Format>
constexpr int64_t kPanelRows = 1;
#endif

#if !QUIRE_NEON
constexpr decltype(MatrixKernels::to_halves) to_halves = nullptr;
#endif

// Bytes of a panel of several tiles: they stay in the second level cache.
constexpr int64_t kPanelGoal = 256 * 1024;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

inline int64_t parts_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

// How a product is cut: into bundles of tiles and blocks of rows, each pair of which is one step, and these among
// threads, row_parts of which have the same bundles and different blocks.
template <class Tiles>
struct Cut {
    static constexpr int64_t bundle = kTilesAtOnce<Tiles>;
    int64_t num_bundles, block_rows, num_blocks;
    int row_parts = 1;

    // The cut whose largest share is least work. To take a tile costs about as much as to multiply it with 8 rows.
    Cut(const PackedMatrix& w, int64_t rows, int num_threads)
        : num_bundles(parts_of(w.num_tiles(), bundle)),
          block_rows(w.is_integer() && rows > Tiles::max_rows ? kQuantizedRows : int64_t(Tiles::max_rows)),
          num_blocks(parts_of(rows, block_rows)) {
        int64_t least = -1;
        for (int parts = 1; parts <= num_blocks && num_threads % parts == 0; parts *= 2) {
            const int64_t bundles = parts_of(num_bundles, num_threads / parts), blocks = parts_of(num_blocks, parts);
            const int64_t work = bundles * (blocks * block_rows + 8);
            if (least < 0 || work < least) least = work, row_parts = parts;
        }
    }

    // At once, of many quantized rows: kRowBlock of them lie together.
    static constexpr int64_t kQuantizedRows =
        kRowBlock % Tiles::max_rows == 0 ? int64_t(Tiles::max_rows) : kRowBlock / 2;
    static_assert(kQuantizedRows <= Tiles::max_rows && kRowBlock % kQuantizedRows == 0,
                  "a block is within one of theirs");
};

// A thread's rectangle of the product.
struct Share {
    int64_t first_bundle, last_bundle, first_block, last_block;

    template <class Tiles>
    Share(const Cut<Tiles>& cut, int thread, int num_threads) {
        const int tile_parts = num_threads / cut.row_parts, tile_part = thread / cut.row_parts,
                  row_part = thread % cut.row_parts;
        first_bundle = cut.num_bundles * tile_part / tile_parts;
        last_bundle = cut.num_bundles * (tile_part + 1) / tile_parts;
        first_block = cut.num_blocks * row_part / cut.row_parts;
        last_block = cut.num_blocks * (row_part + 1) / cut.row_parts;
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

    // Of the panel's memory: where rows are arranged, they are so at its end.
    template <class Tiles>
    int64_t arranged_bytes() const {
        if constexpr (kArrangesRows<Tiles>) return (Tiles::arranged_bytes(w.num_inputs) + 63) / 64 * 64;
        return 0;
    }

    // A panel pays where a thread has many rows for it.
    template <class Format>
    void visit() const {
        using Panel = Unpacked<Format>;
        const Cut<Panel> cut(w, rows, num_threads);
        if (rows >= kPanelRows<Format> * cut.row_parts &&
            kTilesAtOnce<Panel> * Panel::tile_bytes(w) + arranged_bytes<Panel>() <= kPanelBytes)
            multiply(cut);
        else
            multiply(Cut<InPlace<Format>>(w, rows, num_threads));
    }

    // Panel after panel of tiles, each small enough for the second level cache, meets all blocks of rows.
    template <class Tiles>
    void multiply(const Cut<Tiles>& cut) const {
        constexpr int64_t kBundle = Cut<Tiles>::bundle;
        const Share share(cut, thread, num_threads);
        const GroupOrder order(rows, kRowBlock, w.num_inputs);
        const int64_t bundle_bytes = kBundle * Tiles::tile_bytes(w),
                      max_bundles = bundle_bytes < kPanelGoal ? kPanelGoal / bundle_bytes : 1,
                      num_bundles = share.last_bundle - share.first_bundle,
                      num_panels = parts_of(num_bundles, max_bundles);
        for (int64_t p = 0; p < num_panels; ++p) {
            const int64_t first = kBundle * (share.first_bundle + num_bundles * p / num_panels);
            const int64_t last =
                min(w.num_tiles(), kBundle * (share.first_bundle + num_bundles * (p + 1) / num_panels));
            const uint8_t* tiles = Tiles::take(w, first, last, panel);
            for (int64_t block = share.first_block; block < share.last_block; ++block) {
                const int64_t row = block * cut.block_rows;
                const Block mine{a.x ? a.x + row * a.stride : nullptr, a.stride,
                                 a.groups ? a.groups + order.start(row) : nullptr, order.block_rows,
                                 a.halves ? a.halves + order.start(row) : nullptr};
                multiply_rows<Tiles>(tiles, first, last, mine, min(cut.block_rows, rows - row), out + row * out_stride);
            }
        }
    }

    template <class Tiles, int Rows = Tiles::max_rows>
    void multiply_rows(const uint8_t* tile, int64_t first_tile, int64_t last_tile, Block mine, int64_t count,
                       float* to) const {
        if constexpr (Rows > 1)
            if (count < Rows) return multiply_rows<Tiles, Rows - 1>(tile, first_tile, last_tile, mine, count, to);
        if constexpr (kArrangesRows<Tiles>) {
            uint8_t* arranged = panel + kPanelBytes - arranged_bytes<Tiles>();
            Tiles::template arrange<Rows>(mine, w.num_inputs, arranged);
            mine.arranged = arranged;
        }
        constexpr int64_t kBundle = Cut<Tiles>::bundle, kOutputs = kBundle * kTileOutputs;
        const int64_t bundle_bytes = kBundle * Tiles::tile_bytes(w);
        for (int64_t t = first_tile; t < last_tile; t += kBundle, tile += bundle_bytes) {
            const int64_t first = t * kTileOutputs, num_outputs = min(kOutputs, w.num_outputs - first);
            if (num_outputs == kOutputs) {
                Tiles::template multiply<Rows>(tile, mine, w.num_inputs, to + first, out_stride);
            } else {
                float padded[Rows * kOutputs];
                Tiles::template multiply<Rows>(tile, mine, w.num_inputs, padded, kOutputs);
                for (int r = 0; r < Rows; ++r)
                    __builtin_memcpy(to + r * out_stride + first, padded + r * kOutputs,
                                     size_t(num_outputs) * sizeof(float));
            }
        }
    }
};

void multiply(const PackedMatrix& w, const Activations& a, int64_t rows, float* out, int64_t out_stride, uint8_t* panel,
              int thread, int num_threads) {
    if (rows == 0) return;
    const Product product{w, a, rows, out, out_stride, panel, thread, num_threads};
#if QUIRE_NEON
    if (matrix_kernels.reads_halves(w)) return product.multiply(Cut<HalfTiles>(w, rows, num_threads));
#endif
    visit_format(w, product);
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

const MatrixKernels matrix_kernels = {kRowBlock, quantize, to_halves, multiply};

}  // namespace quire::QUIRE_ISA
