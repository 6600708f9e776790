// Matmul of rows of activations with packed matrices: how the work is divided. And the quantization of activations.

#include <algorithm>

#include "fp16.h"
#include "kernels.h"
#include "matrix_isa.h"
#include "matrix_outliers.h"
#if QUIRE_NEON
#include "quantize_neon.h"
#elif QUIRE_ISA_ID != 0
#include "quantize_x86.h"
#endif

namespace quire::QUIRE_ISA {

extern const MatrixKernels matrix_kernels;

namespace {

// Target size of a panel of several tiles: it stays in the L2 cache.
constexpr int64_t kPanelTargetBytes = 256 * 1024;

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

inline int64_t ceil_div(int64_t n, int64_t size) { return (n + size - 1) / size; }

// How a matmul is divided: into bundles of tiles and blocks of rows. Threads share the items, bundles times parts of
// the rows: part after part, bundle after bundle.
struct Partition {
    int64_t num_bundles, block_rows, num_blocks, row_parts = 1;

    // Chooses the division whose largest share is the least work. Parts have min_part rows or more. Loading a tile
    // costs about as much as multiplying it with 8 rows.
    Partition(const PackedMatrix& w, const TileKernels& kernels, int64_t rows, int64_t min_part, int num_threads)
        : num_bundles(ceil_div(w.num_tiles(), kernels.bundle)),
          block_rows(w.is_integer() && rows > kernels.max_rows ? quantized_rows(kernels) : kernels.max_rows),
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
    static int64_t quantized_rows(const TileKernels& kernels) {
        int64_t rows = kernels.max_rows;
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

// Bytes at the end of the panel memory for arranged rows.
int64_t arranged_bytes(const TileKernels& kernels, int64_t num_inputs) {
    return kernels.arranged_bytes ? (kernels.arranged_bytes(num_inputs) + 63) / 64 * 64 : 0;
}

struct Matmul {
    const PackedMatrix& w;
    const Activations& a;
    int64_t rows;
    float* out;
    int64_t out_stride;
    const Worker& worker;
    const TileKernels& kernels;
    const int64_t tile_bytes = kernels.tile_bytes(w);

    // All threads have even shares. With many rows, a thread takes its share piece by piece and then steals pieces of
    // others: otherwise cores that also run something else would keep all waiting. With few rows, the time goes into
    // reading weights, and counters cost more than they save.
    void multiply(int64_t min_part) const {
        const int num_threads = worker.num_threads;
        const Partition partition(w, kernels, rows, min_part, num_threads);
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

    void multiply(const Partition& partition, Items items) const {
        while (!items.empty()) {
            const int64_t row_part = items.first / partition.num_bundles, part_start = row_part * partition.num_bundles;
            const int64_t last = min(items.last, part_start + partition.num_bundles);
            multiply_part(partition, {items.first - part_start, last - part_start}, row_part);
            items.first = last;
        }
    }

    // Multiplies panel after panel of tiles, each small enough for the L2 cache, with all blocks of a part of the rows.
    void multiply_part(const Partition& partition, Items bundles, int64_t row_part) const {
        const GroupOrder order(rows, kRowBlock, w.num_inputs);
        const int64_t bundle_bytes = kernels.bundle * tile_bytes,
                      max_bundles = bundle_bytes < kPanelTargetBytes ? kPanelTargetBytes / bundle_bytes : 1,
                      num_panels = ceil_div(bundles.last - bundles.first, max_bundles);
        for (int64_t p = 0; p < num_panels; ++p) {
            const Items mine = share_of(bundles, p, num_panels);
            const int64_t first = kernels.bundle * mine.first, last = min(w.num_tiles(), kernels.bundle * mine.last);
            const int64_t first_block = partition.first_block(row_part);
            const bool unpacks_now =
                kernels.unpack_and_multiply && rows - first_block * partition.block_rows >= kernels.max_rows;
            const uint8_t* tiles = unpacks_now ? worker.panel : kernels.load_tiles(w, first, last, worker.panel);
            for (int64_t b = first_block; b < partition.first_block(row_part + 1); ++b) {
                const int64_t row = b * partition.block_rows;
                const Block block{a.x ? a.x + row * a.stride : nullptr, a.stride,
                                  a.groups ? a.groups + order.start(row) : nullptr, order.block_rows,
                                  a.fp16 ? a.fp16 + order.start(row) : nullptr};
                if (unpacks_now && b == first_block)
                    unpack_and_multiply(first, last, block, out + row * out_stride);
                else
                    multiply_rows(tiles, first, last, block, min(partition.block_rows, rows - row),
                                  out + row * out_stride);
            }
        }
    }

    void multiply_rows(const uint8_t* tile, int64_t first_tile, int64_t last_tile, Block block, int64_t count,
                       float* to) const {
        if (kernels.arranged_bytes) {
            uint8_t* arranged = worker.panel + kPanelBytes - arranged_bytes(kernels, w.num_inputs);
            kernels.arrange[count - 1](block, w.num_inputs, arranged);
            block.arranged = arranged;
        }
        each_bundle(first_tile, last_tile, count, to, [&](int64_t, float* outputs, int64_t stride) {
            kernels.multiply[count - 1](tile, block, w.num_inputs, outputs, stride);
            tile += kernels.bundle * tile_bytes;
        });
    }

    // The first block of rows, which unpacks the panel.
    void unpack_and_multiply(int64_t first_tile, int64_t last_tile, const Block& block, float* to) const {
        uint8_t* tile = worker.panel;
        each_bundle(first_tile, last_tile, kernels.max_rows, to, [&](int64_t t, float* outputs, int64_t stride) {
            kernels.unpack_and_multiply(w.data + t * w.tile_bytes(), tile, block, w.num_inputs, outputs, stride);
            tile += tile_bytes;
        });
    }

    // multiply(tile, out, out_stride) for every bundle. The last one may have padded outputs.
    template <class Multiply>
    void each_bundle(int64_t first_tile, int64_t last_tile, int64_t count, float* to, const Multiply& multiply) const {
        const int64_t bundle_outputs = kernels.bundle * kTileOutputs;
        for (int64_t t = first_tile; t < last_tile; t += kernels.bundle) {
            const int64_t first = t * kTileOutputs, num_outputs = min(bundle_outputs, w.num_outputs - first);
            if (num_outputs == bundle_outputs) {
                multiply(t, to + first, out_stride);
            } else {
                float padded[kMaxBlockRows * kMaxBundle * kTileOutputs];
                multiply(t, padded, bundle_outputs);
                for (int64_t r = 0; r < count; ++r)
                    __builtin_memcpy(to + r * out_stride + first, padded + r * bundle_outputs,
                                     size_t(num_outputs) * sizeof(float));
            }
        }
    }
};

FormatKernels kernels_of(const PackedMatrix& w) {
    if (!w.is_integer()) return float_kernels(w);
    return w.layout == Layout::Int4 || w.layout == Layout::Codebook4 ? int4_kernels(w) : integer_kernels(w);
}

// Unpacks panels if there are enough rows, and if the memory of a panel holds a bundle.
void multiply(const PackedMatrix& w, const Activations& a, int64_t rows, float* out, int64_t out_stride,
              const Worker& worker) {
    if (rows == 0) return;
    const auto [in_place, panel, panel_rows] = kernels_of(w);
    const bool unpacks = rows >= panel_rows &&
                         panel->bundle * panel->tile_bytes(w) + arranged_bytes(*panel, w.num_inputs) <= kPanelBytes;
    Matmul{w, a, rows, out, out_stride, worker, unpacks ? *panel : *in_place}.multiply(unpacks ? panel_rows : 1);
}

#if QUIRE_ISA_ID == 0
struct Inputs {
    const float* x;
    explicit Inputs(const float* from) : x(from) {}
    // The bits of the largest magnitude: as integers, Inf and NaN are above all numbers.
    uint32_t largest() const {
        uint32_t maximum = 0;
        for (int i = 0; i < kGroupInputs; ++i) maximum = std::max(maximum, bits_of_float(x[i]) & 0x7fffffff);
        return maximum;
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

#if QUIRE_NEON
const MatrixKernels matrix_kernels = {kRowBlock, quantize, to_fp16, multiply, add_columns};
#else
const MatrixKernels matrix_kernels = {kRowBlock, quantize, nullptr, multiply, add_columns};
#endif

}  // namespace quire::QUIRE_ISA
