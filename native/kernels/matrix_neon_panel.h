// Many rows with NEON dot products: a panel of tiles is unpacked once, then multiplied with block after block of rows.
//
// The two vector pipes of a core are what limits this product, so the inner loop leaves them nothing but dot products
// and, for every sum of a group, three multiply-adds. All else is done by the load units: dot products start from a
// loaded constant, and the addend that stands for their conversion to floats is loaded as well.
//
// An unpacked tile is 4 strips of 4 outputs. A strip is a sequence of groups:
//   codes     [group / 4][4][4]  int8: codes of 4 neighbouring inputs, for each of 4 outputs
//   scales    [4]                fp32
//   counters  [4]                fp32, -kCounter * scale
//   offsets   [4]                fp32, where there are any
#pragma once

#include "matrix_neon.h"
#include "matrix_tiles.h"
#include "matrix_vector.h"

namespace quire::QUIRE_ISA {
namespace {

template <int Group, bool Offset>
struct Strip {
    static constexpr int width = 4;  // outputs
    static constexpr int scales_at = 4 * Group, counters_at = scales_at + 16, offsets_at = counters_at + 16;
    static constexpr int group_bytes = Offset ? offsets_at + 16 : offsets_at;
    static constexpr int parts = kGroupInputs / Group;  // groups of weights in a group of activations

    // acc[r] += group . x[r] for rows [First, First + Count).
    template <int First, int Count, int Rows>
    QUIRE_INLINE static void add_group(const uint8_t* group, const QuantizedGroup* x, int part,
                                       float32x4_t (&acc)[Rows]) {
        int32x4_t dots[Count];
        int8x16_t codes[Count];
        QUIRE_UNROLL
        for (int i = 0; i < Count; ++i) {
            dots[i] = Unit::start();
            codes[i] = vld1q_s8(x[First + i].codes + part * Group);
        }
        add_quads(group, codes, dots);
        if constexpr (Group == 32) {
            QUIRE_UNROLL
            for (int i = 0; i < Count; ++i) codes[i] = vld1q_s8(x[First + i].codes + 16);
            add_quads(group + 64, codes, dots);
        }
        float32x4_t factors[Count], terms[Count];  // factors: scale, sum and the two half sums of a row
        QUIRE_UNROLL
        for (int i = 0; i < Count; ++i) {
            terms[i] = load_here<float32x4_t>(group + counters_at);
            factors[i] = vld1q_f32(&x[First + i].scale);
            if constexpr (Offset) {
                const float32x4_t offsets = vld1q_f32((const float*)(group + offsets_at));
                if constexpr (parts == 1)
                    acc[First + i] = vfmaq_laneq_f32(acc[First + i], offsets, factors[i], 1);
                else
                    acc[First + i] = part == 0 ? vfmaq_laneq_f32(acc[First + i], offsets, factors[i], 2)
                                               : vfmaq_laneq_f32(acc[First + i], offsets, factors[i], 3);
            }
        }
        const float32x4_t scales = vld1q_f32((const float*)(group + scales_at));
        QUIRE_UNROLL
        for (int i = 0; i < Count; ++i) terms[i] = vfmaq_f32(terms[i], vreinterpretq_f32_s32(dots[i]), scales);
        QUIRE_UNROLL
        for (int i = 0; i < Count; ++i) acc[First + i] = vfmaq_laneq_f32(acc[First + i], terms[i], factors[i], 0);
    }

    // dots[i] += the next 16 inputs.
    template <int Count>
    QUIRE_INLINE static void add_quads(const uint8_t* group, const int8x16_t (&codes)[Count],
                                       int32x4_t (&dots)[Count]) {
        add_quad<0>(group, codes, dots);
        add_quad<1>(group, codes, dots);
        add_quad<2>(group, codes, dots);
        add_quad<3>(group, codes, dots);
    }
    template <int Quad, int Count>
    QUIRE_INLINE static void add_quad(const uint8_t* group, const int8x16_t (&codes)[Count], int32x4_t (&dots)[Count]) {
        const int8x16_t weights = load_here<int8x16_t>(group + 16 * Quad);
        QUIRE_UNROLL
        for (int i = 0; i < Count; ++i) dots[i] = vdotq_laneq_s32(dots[i], weights, codes[i], Quad);
    }

    // out[r, o] for Rows rows and the 4 outputs of a strip. More than 6 rows take two turns at each group: 12 sums, 6
    // dot products and 6 vectors of codes are what the registers hold.
    template <int Rows>
    QUIRE_INLINE static void multiply(const uint8_t* group, const Block& block, int64_t num_groups, float* out,
                                      int64_t out_stride) {
        const QuantizedGroup* x = block.groups;
        constexpr int kFirst = Rows <= 6 ? Rows : (Rows + 1) / 2, kSecond = Rows - kFirst;
        float32x4_t acc[Rows];
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) acc[r] = vdupq_n_f32(0);
        for (const QuantizedGroup* end = x + num_groups * block.group_stride; x != end; x += block.group_stride) {
            for (int part = 0; part < parts; ++part, group += group_bytes) {
                add_group<0, kFirst>(group, x, part, acc);
                if constexpr (kSecond > 0) add_group<kFirst, kSecond>(group, x, part, acc);
            }
        }
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) vst1q_f32(out + r * out_stride, acc[r]);
    }
};

// Tiles of an integer layout, unpacked into strips.
template <class Format>
struct Unpacked {
    using Strips = Strip<Format::group, Format::has_offset>;
    static constexpr int max_rows = kRowBlock;

    static int64_t strip_bytes(int64_t num_inputs) { return num_inputs / Format::group * Strips::group_bytes; }
    static int64_t tile_bytes(const PackedMatrix& w) {
        return kTileOutputs / Strips::width * strip_bytes(w.num_inputs);
    }

    static const uint8_t* take(const PackedMatrix& w, int64_t first_tile, int64_t last_tile, uint8_t* panel) {
        uint8_t* to = panel;
        for (int64_t t = first_tile; t < last_tile; ++t, to += tile_bytes(w)) {
            const uint8_t* group = w.data + t * w.tile_bytes();
            for (int64_t g = 0; g < w.num_inputs / Format::group; ++g, group += Format::group_bytes)
                for (int s = 0; s < kTileOutputs / Strips::width; ++s)
                    unpack(group, s * Strips::width, to + s * strip_bytes(w.num_inputs) + g * Strips::group_bytes);
        }
        return panel;
    }

    QUIRE_INLINE static void unpack(const uint8_t* group, int output, uint8_t* to) {
        for (int q = 0; q < Format::group / 4; ++q)
            vst1q_s8((int8_t*)to + 16 * q, unpack_quad<Format>(group, q, output));
        const float32x4_t scales = load_scales<Format::scale_type>(group, output);
        vst1q_f32((float*)(to + Strips::scales_at), scales);
        vst1q_f32((float*)(to + Strips::counters_at), vmulq_n_f32(scales, -Unit::kCounter));
        if constexpr (Format::has_offset)
            vst1q_f32((float*)(to + Strips::offsets_at), load_offsets<Format>(group, output));
    }

    template <int Rows>
    __attribute__((noinline)) static void multiply(const uint8_t* tile, const Block& a, int64_t num_inputs, float* out,
                                                   int64_t out_stride) {
        for (int s = 0; s < kTileOutputs / Strips::width; ++s)
            Strips::template multiply<Rows>(tile + s * strip_bytes(num_inputs), a, num_inputs / kGroupInputs,
                                            out + s * Strips::width, out_stride);
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
