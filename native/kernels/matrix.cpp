// Matmul of rows of activations with packed matrices: how the work is divided, and which tile kernel does it.

#include <algorithm>

#include "fp16.h"
#include "kernels.h"
#include "matrix_format.h"

// QUIRE_ISA is a name. This maps it to a number that #if can compare.
#define QUIRE_ISA_ID_isa_plain 0
#define QUIRE_ISA_ID_isa_dotprod 1
#define QUIRE_ISA_ID_isa_avx2 2
#define QUIRE_ISA_ID_isa_avx512 3
#define QUIRE_ISA_ID_isa_avxvnni 4
#define QUIRE_ISA_ID_isa_i8mm 5
#define QUIRE_JOIN_(a, b) a##b
#define QUIRE_JOIN(a, b) QUIRE_JOIN_(a, b)
#define QUIRE_ISA_ID QUIRE_JOIN(QUIRE_ISA_ID_, QUIRE_ISA)
#define QUIRE_NEON (QUIRE_ISA_ID == 1 || QUIRE_ISA_ID == 5)

// clang-format off: the order matters
#if QUIRE_ISA_ID == 0
#include "matrix_plain.h"
#elif QUIRE_NEON
#include "matrix_neon.h"
#include "matrix_vector.h"
#include "matrix_neon_int4.h"
#elif QUIRE_ISA_ID == 2
#include "matrix_avx2.h"
#include "matrix_vector.h"
#elif QUIRE_ISA_ID == 3
#include "matrix_avx512.h"
#include "matrix_vector.h"
#elif QUIRE_ISA_ID == 4
#include "matrix_avxvnni.h"
#include "matrix_vector.h"
#endif
#include "matrix_tiles.h"
#include "matrix_outliers.h"
#if QUIRE_ISA_ID == 1
#include "matrix_neon_panel.h"
#elif QUIRE_ISA_ID == 5
#include "matrix_neon_i8mm.h"
#endif
#if QUIRE_NEON
#include "matrix_neon_float_panel.h"
#include "matrix_neon_fp16.h"
#include "quantize_neon.h"
#elif QUIRE_ISA_ID >= 2
#include "matrix_x86_panel.h"
#include "quantize_x86.h"
#endif
// clang-format on

namespace quire::QUIRE_ISA {

extern const MatrixKernels matrix_kernels;

namespace {

// The tiles for many rows, and from how many rows on they are used.
#if QUIRE_ISA_ID == 0
template <class Format>
using Unpacked = InPlace<Format>;
template <class Format>
constexpr int64_t kPanelRows = 1;
#elif QUIRE_ISA_ID == 1
template <class Format>
constexpr int64_t kPanelRows = InPlace<Format>::max_rows + 1;
#elif QUIRE_ISA_ID == 5
template <class Format>
constexpr int64_t kPanelRows = 9;  // estimated from the number of unpacking instructions; not measured
#else
template <class Format>
constexpr int64_t kPanelRows = Simd::min_panel_rows;
#endif

#if !QUIRE_NEON
constexpr decltype(MatrixKernels::to_fp16) to_fp16 = nullptr;
#endif

// Target size of a panel of several tiles: it stays in the L2 cache.
constexpr int64_t kPanelTargetBytes = 256 * 1024;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

inline int64_t ceil_div(int64_t n, int64_t size) { return (n + size - 1) / size; }

// How a matmul is divided: into bundles of tiles and blocks of rows. Threads share the items, bundles times parts of
// the rows: part after part, bundle after bundle.
template <class Tiles>
struct Partition {
    static constexpr int64_t bundle = kTilesAtOnce<Tiles>;
    int64_t num_bundles, block_rows, num_blocks, row_parts = 1;

    // Chooses the division whose largest share is the least work. Parts have min_part rows or more. Loading a tile
    // costs about as much as multiplying it with 8 rows.
    Partition(const PackedMatrix& w, int64_t rows, int64_t min_part, int num_threads)
        : num_bundles(ceil_div(w.num_tiles(), bundle)),
          block_rows(w.is_integer() && rows > Tiles::max_rows ? quantized_rows() : int64_t(Tiles::max_rows)),
          num_blocks(ceil_div(rows, block_rows)) {
        int64_t least = -1;
        for (int64_t parts = 1; parts == 1 || (parts <= num_blocks && min_part * parts <= rows); parts *= 2) {
            const int64_t item = ceil_div(num_blocks, parts) * block_rows + 8;
            const int64_t work = ceil_div(num_bundles * parts, num_threads) * item;
            if (least < 0 || work < least) least = work, row_parts = parts;
        }
    }

    int64_t first_block(int64_t row_part) const { return num_blocks * row_part / row_parts; }

    // Rows at once if there are many quantized rows: kRowBlock of them are interleaved, and a block must lie within
    // these.
    static constexpr int64_t quantized_rows() {
        int64_t rows = Tiles::max_rows;
        while (kRowBlock % rows) --rows;
        return rows;
    }
};

struct Items {
    int64_t first, last;  // half-open
    bool empty() const { return first == last; }
};

inline Items share_of(Items items, int64_t thread, int64_t num_threads) {
    const int64_t count = items.last - items.first;
    return {items.first + count * thread / num_threads, items.first + count * (thread + 1) / num_threads};
}

// Piece `index` of a share: half of the rest. Empty behind the last one.
inline Items piece_of(Items share, int64_t index) {
    const int64_t count = share.last - share.first, i = min(index, 62);
    return {share.last - (count >> i), share.last - (count >> (i + 1))};
}

struct Matmul {
    const PackedMatrix& w;
    const Activations& a;
    int64_t rows;
    float* out;
    int64_t out_stride;
    const Worker& worker;

    // Bytes at the end of the panel memory for arranged rows.
    template <class Tiles>
    int64_t arranged_bytes() const {
        if constexpr (kArrangesRows<Tiles>) return (Tiles::arranged_bytes(w.num_inputs) + 63) / 64 * 64;
        return 0;
    }

    // Unpacks panels if there are enough rows.
    template <class Format>
    void visit() const {
        using Panel = Unpacked<Format>;
        if (rows >= kPanelRows<Format> &&
            kTilesAtOnce<Panel> * Panel::tile_bytes(w) + arranged_bytes<Panel>() <= kPanelBytes)
            multiply<Panel>(kPanelRows<Format>);
        else
            multiply<InPlace<Format>>(1);
    }

    // All threads have even shares. With many rows, a thread takes its share piece by piece and then steals pieces of
    // others: otherwise cores that also run something else would keep all waiting. With few rows, the time goes into
    // reading weights, and counters cost more than they save.
    template <class Tiles>
    void multiply(int64_t min_part) const {
        const int num_threads = worker.num_threads;
        const Partition<Tiles> partition(w, rows, min_part, num_threads);
        const Items all{0, partition.num_bundles * partition.row_parts};
        if (partition.num_blocks == 1 || num_threads == 1)
            return multiply(partition, share_of(all, worker.thread, num_threads));
        for (int i = 0; i < num_threads; ++i) {
            const int owner = (worker.thread + i) % num_threads;
            const Items share = share_of(all, owner, num_threads);
            std::atomic<int64_t>& taken = worker.taken[owner];
            while (!piece_of(share, taken.load(std::memory_order_relaxed)).empty())
                multiply(partition, piece_of(share, taken.fetch_add(1, std::memory_order_relaxed)));
        }
    }

    template <class Tiles>
    void multiply(const Partition<Tiles>& partition, Items items) const {
        while (!items.empty()) {
            const int64_t row_part = items.first / partition.num_bundles, part_start = row_part * partition.num_bundles;
            const int64_t last = min(items.last, part_start + partition.num_bundles);
            multiply_part(partition, {items.first - part_start, last - part_start}, row_part);
            items.first = last;
        }
    }

    // Multiplies panel after panel of tiles, each small enough for the L2 cache, with all blocks of a part of the rows.
    template <class Tiles>
    void multiply_part(const Partition<Tiles>& partition, Items bundles, int64_t row_part) const {
        constexpr int64_t kBundle = Partition<Tiles>::bundle;
        const GroupOrder order(rows, kRowBlock, w.num_inputs);
        const int64_t bundle_bytes = kBundle * Tiles::tile_bytes(w),
                      max_bundles = bundle_bytes < kPanelTargetBytes ? kPanelTargetBytes / bundle_bytes : 1,
                      num_panels = ceil_div(bundles.last - bundles.first, max_bundles);
        for (int64_t p = 0; p < num_panels; ++p) {
            const Items mine = share_of(bundles, p, num_panels);
            const int64_t first = kBundle * mine.first, last = min(w.num_tiles(), kBundle * mine.last);
            const int64_t first_block = partition.first_block(row_part);
            const bool unpacks_now =
                kUnpacksWhileMultiplying<Tiles> && rows - first_block * partition.block_rows >= Tiles::max_rows;
            const uint8_t* tiles = unpacks_now ? worker.panel : Tiles::load_tiles(w, first, last, worker.panel);
            for (int64_t b = first_block; b < partition.first_block(row_part + 1); ++b) {
                const int64_t row = b * partition.block_rows;
                const Block block{a.x ? a.x + row * a.stride : nullptr, a.stride,
                                  a.groups ? a.groups + order.start(row) : nullptr, order.block_rows,
                                  a.fp16 ? a.fp16 + order.start(row) : nullptr};
                if constexpr (kUnpacksWhileMultiplying<Tiles>) {
                    if (unpacks_now && b == first_block) {
                        unpack_and_multiply<Tiles>(first, last, block, out + row * out_stride);
                        continue;
                    }
                }
                multiply_rows<Tiles>(tiles, first, last, block, min(partition.block_rows, rows - row),
                                     out + row * out_stride);
            }
        }
    }

    template <class Tiles, int Rows = Tiles::max_rows>
    void multiply_rows(const uint8_t* tile, int64_t first_tile, int64_t last_tile, Block mine, int64_t count,
                       float* to) const {
        if constexpr (Rows > 1)
            if (count < Rows) return multiply_rows<Tiles, Rows - 1>(tile, first_tile, last_tile, mine, count, to);
        if constexpr (kArrangesRows<Tiles>) {
            uint8_t* arranged = worker.panel + kPanelBytes - arranged_bytes<Tiles>();
            Tiles::template arrange<Rows>(mine, w.num_inputs, arranged);
            mine.arranged = arranged;
        }
        const int64_t bundle_bytes = Partition<Tiles>::bundle * Tiles::tile_bytes(w);
        each_bundle<Tiles, Rows>(first_tile, last_tile, to, [&](int64_t, float* outputs, int64_t stride) {
            Tiles::template multiply<Rows>(tile, mine, w.num_inputs, outputs, stride);
            tile += bundle_bytes;
        });
    }

    // The first block of rows, which unpacks the panel.
    template <class Tiles>
    void unpack_and_multiply(int64_t first_tile, int64_t last_tile, const Block& mine, float* to) const {
        uint8_t* tile = worker.panel;
        each_bundle<Tiles, Tiles::max_rows>(first_tile, last_tile, to, [&](int64_t t, float* outputs, int64_t stride) {
            Tiles::template unpack_and_multiply<Tiles::max_rows>(w.data + t * w.tile_bytes(), tile, mine, w.num_inputs,
                                                                 outputs, stride);
            tile += Tiles::tile_bytes(w);
        });
    }

    // multiply(tile, out, out_stride) for every bundle. The last one may have padded outputs.
    template <class Tiles, int Rows, class Multiply>
    void each_bundle(int64_t first_tile, int64_t last_tile, float* to, const Multiply& multiply) const {
        constexpr int64_t kBundle = Partition<Tiles>::bundle, kOutputs = kBundle * kTileOutputs;
        for (int64_t t = first_tile; t < last_tile; t += kBundle) {
            const int64_t first = t * kTileOutputs, num_outputs = min(kOutputs, w.num_outputs - first);
            if (num_outputs == kOutputs) {
                multiply(t, to + first, out_stride);
            } else {
                float padded[Rows * kOutputs];
                multiply(t, padded, kOutputs);
                for (int r = 0; r < Rows; ++r)
                    __builtin_memcpy(to + r * out_stride + first, padded + r * kOutputs,
                                     size_t(num_outputs) * sizeof(float));
            }
        }
    }
};

void multiply(const PackedMatrix& w, const Activations& a, int64_t rows, float* out, int64_t out_stride,
              const Worker& worker) {
    if (rows == 0) return;
    const Matmul matmul{w, a, rows, out, out_stride, worker};
#if QUIRE_NEON
    if (matrix_kernels.reads_fp16(w)) return matmul.multiply<Fp16Tiles>(1);
#endif
    visit_format(w, matmul);
}

#if QUIRE_ISA_ID == 0
struct Inputs {
    const float* x;
    explicit Inputs(const float* from) : x(from) {}
    // The bits of the largest magnitude: as integers, Inf and NaN are above all numbers.
    uint32_t largest() const {
        uint32_t most = 0;
        for (int i = 0; i < kGroupInputs; ++i) most = std::max(most, bits_of_float(x[i]) & 0x7fffffff);
        return most;
    }
    // The spacing of floats at `magic` is 1: adding it rounds, and leaves the integer in the low bits.
    void store_quants(float inverse_scale, QuantizedGroup& out) const {
        const float magic = 0x1.8p23f;
        for (int half = 0; half < 2; ++half) {
            int32_t sum = 0;
            for (int i = 16 * half; i < 16 * half + 16; ++i) {
                const int32_t quant = int32_t(bits_of_float(x[i] * inverse_scale + magic) - bits_of_float(magic));
                out.quants[i] = int8_t(quant);
                sum += quant;
            }
            out.half_quant_sums[half] = sum;
        }
    }
};
#endif

// Quantized values are rounded to nearest, ties to even. A group below 2^-100 becomes zeros (127 / max would overflow).
// A group with an Inf or NaN gets a NaN scale, so that every result that depends on it is NaN.
void quantize_group(const float* __restrict from, QuantizedGroup& __restrict out) {
    const Inputs inputs(from);
    const uint32_t max_bits = inputs.largest();
    const float max = float_of_bits(max_bits);
    if (max_bits >= 0x7f800000 || max < 0x1p-100f) {
        out = QuantizedGroup{};
        if (max_bits >= 0x7f800000)
            out.scale = out.sum = out.half_sums[0] = out.half_sums[1] = float_of_bits(0x7fc00000);
        return;
    }
    inputs.store_quants(127.0f / max, out);
    out.scale = max / 127.0f;
    out.quant_sum = out.half_quant_sums[0] + out.half_quant_sums[1];
    out.sum = out.scale * float(out.quant_sum);
    for (int half = 0; half < 2; ++half) out.half_sums[half] = out.scale * float(out.half_quant_sums[half]);
    out.unused = 0;
}

#if !QUIRE_NEON
inline bool quantize_four(const float*, QuantizedGroup*, int64_t) { return false; }
#endif

void quantize(const float* x, int64_t num_inputs, QuantizedGroup* groups, int64_t stride) {
    const int64_t num_groups = num_inputs / kGroupInputs;
    for (int64_t g = 0, end; g < num_groups; g = end) {
        end = min(g + 4, num_groups);
        if (end >= 4 && quantize_four(x + (end - 4) * kGroupInputs, groups + (end - 4) * stride, stride)) continue;
        for (; g < end; ++g) quantize_group(x + g * kGroupInputs, groups[g * stride]);
    }
}

}  // namespace

const MatrixKernels matrix_kernels = {kRowBlock, quantize, to_fp16, multiply, add_columns};

}  // namespace quire::QUIRE_ISA
