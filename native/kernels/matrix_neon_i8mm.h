// Many rows with FEAT_I8MM: smmla multiplies 2 rows x 8 inputs with 8 inputs x 2 outputs.
//
// As in matrix_neon_panel.h, tiles are unpacked once, sums start from a loaded constant, and a multiply-add with a
// loaded addend converts and scales them. In addition, the activations of a block of rows are arranged once for all
// tiles, in pairs of rows. 6 rows x 8 outputs are 12 sums of 2 x 2. For each group of 32 inputs they need
//   48 smmla (32 multiply-adds each), 24 fmla, 36 with offsets: 21 or 18 multiply-adds per instruction of a vector
//   pipe, where dot products (96 sdot and 24 or 36 fmla for 12 rows x 4 outputs) have 13 or 12; 28 loads of quantized
//   values, 24 of constants, 7 of factors (14 with offsets).
// 12 accumulators, 12 smmla sums, 4 vectors of weights and a few of activations fill the registers.
//
// An unpacked tile is 2 strips of 8 outputs. A strip is a sequence of groups:
//   quants   [group / 8][4][2][8]  int8: 8 consecutive inputs for each output of 4 pairs
//   scales   [4][4]                fp32: of a pair (a, b) as a, b, a, b
//   magics   [4][4]                fp32: -kMagic * scale, in the same order
//   offsets  [4][4]                fp32: in the same order, if there are any
#pragma once

#include "matrix_neon.h"
#include "matrix_tiles.h"
#include "matrix_vector.h"

namespace quire::QUIRE_ISA {
namespace {

// A group of activations of two rows, a and b. Their factors are stored as a, a, b, b.
struct alignas(16) RowPair {
    int8_t quants[kGroupInputs / 8][2][8];
    float scales[4];
    float sums[2][4];  // of the group, or of its two halves if the format has groups of 16
};

template <int Group, bool Offset>
struct PairStrip {
    static constexpr int width = 8;               // outputs
    static constexpr int pairs = width / 2;       // of outputs
    static constexpr int steps = Group / 8;       // of 8 inputs
    static constexpr int step_bytes = 8 * width;  // of quantized values
    static constexpr int factor_bytes = 16 * pairs;
    static constexpr int scales_at = steps * step_bytes, magics_at = scales_at + factor_bytes,
                         offsets_at = magics_at + factor_bytes;
    static constexpr int group_bytes = Offset ? offsets_at + factor_bytes : offsets_at;
    static constexpr int parts = kGroupInputs / Group;  // groups of weights in a group of activations

    QUIRE_INLINE static float32x4_t factors(const uint8_t* group, int at, int pair) {
        return vld1q_f32((const float*)(group + at) + 4 * pair);
    }

    // acc[r][o] += group . x[r] for pairs of rows r and pairs of outputs o.
    template <int RowPairs>
    QUIRE_INLINE static void add_group(const uint8_t* group, const RowPair* x, int part,
                                       float32x4_t (&acc)[RowPairs][pairs]) {
        int32x4_t dots[RowPairs][pairs];
        QUIRE_UNROLL
        for (int r = 0; r < RowPairs; ++r) {
            QUIRE_UNROLL
            for (int o = 0; o < pairs; ++o) dots[r][o] = Simd::start();
        }
        QUIRE_UNROLL
        for (int s = 0; s < steps; ++s) {
            int8x16_t weights[pairs];
            QUIRE_UNROLL
            for (int o = 0; o < pairs; ++o) weights[o] = load_here<int8x16_t>(group + s * step_bytes + 16 * o);
            QUIRE_UNROLL
            for (int r = 0; r < RowPairs; ++r) {
                const int8x16_t quants = load_here<int8x16_t>(x[r].quants[part * steps + s]);
                QUIRE_UNROLL
                for (int o = 0; o < pairs; ++o) dots[r][o] = vmmlaq_s32(dots[r][o], quants, weights[o]);
            }
        }
        QUIRE_UNROLL
        for (int o = 0; o < pairs; ++o) {
            const float32x4_t scales = factors(group, scales_at, o);
            QUIRE_UNROLL
            for (int r = 0; r < RowPairs; ++r) {
                float32x4_t& sum = acc[r][o];
                if constexpr (Offset) sum = vfmaq_f32(sum, factors(group, offsets_at, o), vld1q_f32(x[r].sums[part]));
                const float32x4_t magic = load_here<float32x4_t>(group + magics_at + 16 * o);
                sum =
                    vfmaq_f32(sum, vfmaq_f32(magic, vreinterpretq_f32_s32(dots[r][o]), scales), vld1q_f32(x[r].scales));
            }
        }
    }

    // out[r, o] for Rows rows and the 8 outputs of a strip.
    template <int Rows>
    QUIRE_INLINE static void multiply(const uint8_t* group, const RowPair* x, int64_t num_groups, float* out,
                                      int64_t out_stride) {
        constexpr int kRowPairs = (Rows + 1) / 2;
        float32x4_t acc[kRowPairs][pairs];
        QUIRE_UNROLL
        for (int r = 0; r < kRowPairs; ++r)
            for (int o = 0; o < pairs; ++o) acc[r][o] = vdupq_n_f32(0);
        for (const RowPair* end = x + num_groups * kRowPairs; x != end; x += kRowPairs)
            for (int part = 0; part < parts; ++part, group += group_bytes) add_group(group, x, part, acc);
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) {
            QUIRE_UNROLL
            for (int o = 0; o < pairs; o += 2) {
                const float64x2_t left = vreinterpretq_f64_f32(acc[r / 2][o]),
                                  right = vreinterpretq_f64_f32(acc[r / 2][o + 1]);
                const float64x2_t both = r % 2 ? vzip2q_f64(left, right) : vzip1q_f64(left, right);
                vst1q_f32(out + r * out_stride + 2 * o, vreinterpretq_f32_f64(both));
            }
        }
    }
};

// Tiles that are unpacked into strips. All formats of a group size share these kernels.
template <int Group, bool Offset>
struct StripTiles {
    using Strips = PairStrip<Group, Offset>;
    static constexpr int max_rows = 6;

    static int64_t strip_bytes(int64_t num_inputs) { return num_inputs / Group * Strips::group_bytes; }
    static int64_t tile_bytes(const PackedMatrix& w) {
        return kTileOutputs / Strips::width * strip_bytes(w.num_inputs);
    }

    static int64_t arranged_bytes(int64_t num_inputs) {
        return num_inputs / kGroupInputs * (max_rows / 2) * int64_t(sizeof(RowPair));
    }

    // [group][pair of rows]. An odd last row is paired with zeros.
    template <int Rows>
    static void arrange(const Block& block, int64_t num_inputs, void* arranged) {
        static constexpr QuantizedGroup kNoRow = {};
        const QuantizedGroup* x = block.groups;
        RowPair* to = static_cast<RowPair*>(arranged);
        for (int64_t g = 0; g < num_inputs / kGroupInputs; ++g, x += block.group_stride)
            for (int r = 0; r < Rows; r += 2) arrange_pair(x[r], r + 1 < Rows ? x[r + 1] : kNoRow, *to++);
    }

    QUIRE_INLINE static void arrange_pair(const QuantizedGroup& a, const QuantizedGroup& b, RowPair& to) {
        for (int half = 0; half < 2; ++half) {
            const int64x2_t first = vreinterpretq_s64_s8(vld1q_s8(a.quants + 16 * half)),
                            second = vreinterpretq_s64_s8(vld1q_s8(b.quants + 16 * half));
            vst1q_s8(to.quants[2 * half][0], vreinterpretq_s8_s64(vzip1q_s64(first, second)));
            vst1q_s8(to.quants[2 * half + 1][0], vreinterpretq_s8_s64(vzip2q_s64(first, second)));
        }
        const auto store_both = [](float* at, float first, float second) {
            vst1q_f32(at, vcombine_f32(vdup_n_f32(first), vdup_n_f32(second)));
        };
        store_both(to.scales, a.scale, b.scale);
        for (int part = 0; part < Strips::parts; ++part)
            store_both(to.sums[part], *sum_of<Strips>(a, part), *sum_of<Strips>(b, part));
    }

    template <int Rows>
    __attribute__((noinline)) static void multiply(const uint8_t* tile, const Block& a, int64_t num_inputs, float* out,
                                                   int64_t out_stride) {
        for (int s = 0; s < kTileOutputs / Strips::width; ++s)
            Strips::template multiply<Rows>(tile + s * strip_bytes(num_inputs), static_cast<const RowPair*>(a.arranged),
                                            num_inputs / kGroupInputs, out + s * Strips::width, out_stride);
    }
};

// Tiles of an integer layout.
template <class Format>
struct Unpacked : StripTiles<Format::group, Format::has_offset> {
    using Tiles = StripTiles<Format::group, Format::has_offset>;
    using Strips = typename Tiles::Strips;
    using Tiles::strip_bytes, Tiles::tile_bytes;

    static const uint8_t* load_tiles(const PackedMatrix& w, int64_t first_tile, int64_t last_tile, uint8_t* panel) {
        uint8_t* to = panel;
        for (int64_t t = first_tile; t < last_tile; ++t, to += tile_bytes(w)) {
            GroupCursor<Format> from{w.data + t * w.tile_bytes()};
            for (int64_t g = 0; g < w.num_inputs / Format::group; ++g, from.advance())
                for (int s = 0; s < kTileOutputs / Strips::width; ++s)
                    unpack(from, s * Strips::width, to + s * strip_bytes(w.num_inputs) + g * Strips::group_bytes);
        }
        return panel;
    }

    QUIRE_INLINE static void unpack(GroupCursor<Format> from, int output, uint8_t* to) {
        for (int fours = 0; fours < 2; ++fours, output += 4, to += 32) {
            for (int s = 0; s < Strips::steps; ++s) {
                const int32x4_t first = vreinterpretq_s32_s8(unpack_quad(from, 2 * s, output)),
                                second = vreinterpretq_s32_s8(unpack_quad(from, 2 * s + 1, output));
                int32_t* quants = (int32_t*)(to + s * Strips::step_bytes);
                vst1q_s32(quants, vzip1q_s32(first, second));
                vst1q_s32(quants + 4, vzip2q_s32(first, second));
            }
            const float32x4_t scales = load_scales<Format>(from.block, from.group, output);
            store_factors(to + Strips::scales_at, scales);
            store_factors(to + Strips::magics_at, vmulq_n_f32(scales, -Simd::kMagic));
            if constexpr (Format::has_offset)
                store_factors(to + Strips::offsets_at, load_offsets<Format>(from.block, from.group, output));
        }
    }

    // Stores the factors of 4 outputs, for two pairs.
    QUIRE_INLINE static void store_factors(uint8_t* to, float32x4_t factors) {
        const float64x2_t both = vreinterpretq_f64_f32(factors);
        vst1q_f64((double*)to, vzip1q_f64(both, both));
        vst1q_f64((double*)to + 2, vzip2q_f64(both, both));
    }
};

template <int Bits, int Group, ScaleType Scale, bool Offset, int Zero, Codebook Book>
constexpr bool kArrangesRows<Unpacked<IntFormat<Bits, Group, Scale, Offset, Zero, Book>>> = true;

}  // namespace
}  // namespace quire::QUIRE_ISA
