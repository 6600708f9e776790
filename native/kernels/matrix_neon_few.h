// Few rows of activations and 4-bit weights with NEON: every byte of weights is unpacked between the dot products that
// use it, so that both vector pipes are busy all the time.
#pragma once

#include "matrix_neon.h"
#include "matrix_vector.h"

namespace quire::QUIRE_ISA {
namespace {

template <class Format, int Rows>
struct FewRows {
    static constexpr int kVectors = Unit::int_vectors(Rows);
    static constexpr int kOutputs = kVectors * Unit::lanes;

    __attribute__((noinline)) static void run(const uint8_t* tile, const Block& block, int64_t num_inputs, float* out,
                                              int64_t out_stride) {
        for (int first = 0; first < kTileOutputs; first += kOutputs)
            run_outputs(tile, first, block, num_inputs / kGroupInputs, out + first, out_stride);
    }

    QUIRE_INLINE static void run_outputs(const uint8_t* group, int first, const Block& block, int64_t num_groups,
                                         float* out, int64_t out_stride) {
        float32x4_t acc[Rows][kVectors];
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Unit::zero();
        const QuantizedGroup* x = block.groups;
        for (int64_t g = 0; g < num_groups; ++g, x += block.group_stride, group += Format::group_bytes) {
            int8x16_t low[Rows], high[Rows];  // codes of quads 0 .. 3 and 4 .. 7
            int32x4_t dots[Rows][kVectors];
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) {
                low[r] = vld1q_s8(x[r].codes);
                high[r] = vld1q_s8(x[r].codes + 16);
                for (int v = 0; v < kVectors; ++v) {
                    dots[r][v] = Unit::start();
                    if constexpr (Format::zero != 0)
                        dots[r][v] = vaddq_s32(dots[r][v], vdupq_n_s32(-Format::zero * x[r].code_sum));
                }
            }
            const uint8_t* codes = group + Format::codes_at + 4 * first;
            add_quads<0>(codes, low, high, dots);
            add_quads<1>(codes, low, high, dots);
            add_quads<2>(codes, low, high, dots);
            add_quads<3>(codes, low, high, dots);
            QUIRE_UNROLL
            for (int v = 0; v < kVectors; ++v) {
                const int output = first + v * Unit::lanes;
                if constexpr (Format::has_offset) {
                    const float32x4_t offsets = load_scales<Format::wide>(group + Format::offsets_at, output);
                    for (int r = 0; r < Rows; ++r) acc[r][v] = Unit::fma_scalar(offsets, &x[r].sum, acc[r][v]);
                }
                const float32x4_t scales = load_scales<Format::wide>(group, output);
                for (int r = 0; r < Rows; ++r)
                    acc[r][v] = Unit::fma_scalar(Unit::scaled(dots[r][v], scales), &x[r].scale, acc[r][v]);
            }
        }
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) vst1q_f32(out + r * out_stride + v * Unit::lanes, acc[r][v]);
    }

    // dots += quads Quad and Quad + 4.
    template <int Quad>
    QUIRE_INLINE static void add_quads(const uint8_t* codes, const int8x16_t (&low)[Rows],
                                       const int8x16_t (&high)[Rows], int32x4_t (&dots)[Rows][kVectors]) {
        QUIRE_UNROLL
        for (int v = 0; v < kVectors; ++v) {
            const uint8x16_t pairs = vld1q_u8(codes + Quad * 4 * kTileOutputs + v * 16);
            const int8x16_t first = vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15)));
            const int8x16_t second = vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4));
            for (int r = 0; r < Rows; ++r) {
                dots[r][v] = vdotq_laneq_s32(dots[r][v], first, low[r], Quad);
                dots[r][v] = vdotq_laneq_s32(dots[r][v], second, high[r], Quad);
            }
        }
    }
};

template <bool Wide, bool Offset, int Zero>
struct TileProduct<IntFormat<4, 32, Wide, Offset, Zero>, 1> : FewRows<IntFormat<4, 32, Wide, Offset, Zero>, 1> {};
template <bool Wide, bool Offset, int Zero>
struct TileProduct<IntFormat<4, 32, Wide, Offset, Zero>, 2> : FewRows<IntFormat<4, 32, Wide, Offset, Zero>, 2> {};
template <bool Wide, bool Offset, int Zero>
struct TileProduct<IntFormat<4, 32, Wide, Offset, Zero>, 3> : FewRows<IntFormat<4, 32, Wide, Offset, Zero>, 3> {};
template <bool Wide, bool Offset, int Zero>
struct TileProduct<IntFormat<4, 32, Wide, Offset, Zero>, 4> : FewRows<IntFormat<4, 32, Wide, Offset, Zero>, 4> {};

}  // namespace
}  // namespace quire::QUIRE_ISA
