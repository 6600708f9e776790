// Up to 12 rows of activations and 4-bit weights with NEON, where unpacking a panel would not pay.
#pragma once

#include "matrix_neon.h"
#include "matrix_vector.h"

namespace quire::QUIRE_ISA {
namespace {

// 1 to 4 rows: every byte of weights is unpacked between the dot products that use it, so that both vector pipes are
// busy all the time.
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
                    const float32x4_t offsets = load_offsets<Format>(group, output);
                    for (int r = 0; r < Rows; ++r) acc[r][v] = Unit::fma_scalar(offsets, &x[r].sum, acc[r][v]);
                }
                const float32x4_t scales = load_scales<Format::scale_type>(group, output);
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
            const uint8x16_t pairs = load_here<uint8x16_t>(codes + Quad * 4 * kTileOutputs + v * 16);
            const int8x16_t first = Unit::low_codes<Format>(pairs), second = Unit::high_codes<Format>(pairs);
            for (int r = 0; r < Rows; ++r) {
                dots[r][v] = vdotq_laneq_s32(dots[r][v], first, low[r], Quad);
                dots[r][v] = vdotq_laneq_s32(dots[r][v], second, high[r], Quad);
            }
        }
    }
};

// 5 to 12 rows: a group of 4 outputs is unpacked, then meets the rows, 3 or 4 at a time. Sums are converted and scaled
// as in matrix_neon_panel.h.
template <class Format, int Rows>
struct SeveralRows {
    static constexpr int kTurns = (Rows + 3) / 4;

    __attribute__((noinline)) static void run(const uint8_t* tile, const Block& block, int64_t num_inputs, float* out,
                                              int64_t out_stride) {
        for (int first = 0; first < kTileOutputs; first += Unit::lanes)
            run_outputs(tile, first, block, num_inputs / kGroupInputs, out + first, out_stride);
    }

    QUIRE_INLINE static void run_outputs(const uint8_t* group, int first, const Block& block, int64_t num_groups,
                                         float* out, int64_t out_stride) {
        float32x4_t acc[Rows];
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) acc[r] = Unit::zero();
        const QuantizedGroup* x = block.groups;
        for (int64_t g = 0; g < num_groups; ++g, x += block.group_stride, group += Format::group_bytes) {
            int8x16_t weights[8];
            const uint8_t* codes = group + Format::codes_at + 4 * first;
            QUIRE_UNROLL
            for (int q = 0; q < 4; ++q) {
                const uint8x16_t pairs = vld1q_u8(codes + q * 4 * kTileOutputs);
                weights[q] = Unit::low_codes<Format>(pairs);
                weights[q + 4] = Unit::high_codes<Format>(pairs);
            }
            if constexpr (Format::zero != 0) {
                QUIRE_UNROLL
                for (int q = 0; q < 8; ++q) weights[q] = vsubq_s8(weights[q], vdupq_n_s8(Format::zero));
            }
            const float32x4_t scales = load_scales<Format::scale_type>(group, first);
            alignas(16) float counters[4];
            const float32x4_t counter = vmulq_n_f32(scales, -Unit::kCounter);
            __asm__ volatile("str %q1, %0" : "=m"(counters) : "w"(counter));
            float32x4_t offsets = Unit::zero();
            if constexpr (Format::has_offset) offsets = load_offsets<Format>(group, first);
            add_rows<0, Rows / kTurns + (Rows % kTurns > 0)>(weights, scales, offsets, counters, x, acc);
            constexpr int kFirst = Rows / kTurns + (Rows % kTurns > 0), kSecond = Rows / kTurns + (Rows % kTurns > 1);
            add_rows<kFirst, kSecond>(weights, scales, offsets, counters, x, acc);
            if constexpr (kTurns > 2)
                add_rows<kFirst + kSecond, Rows - kFirst - kSecond>(weights, scales, offsets, counters, x, acc);
        }
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) vst1q_f32(out + r * out_stride, acc[r]);
    }

    template <int First, int Count>
    QUIRE_INLINE static void add_rows(const int8x16_t (&weights)[8], float32x4_t scales, float32x4_t offsets,
                                      const float (&counters)[4], const QuantizedGroup* x, float32x4_t (&acc)[Rows]) {
        int32x4_t dots[Count];
        int8x16_t codes[Count];
        QUIRE_UNROLL
        for (int i = 0; i < Count; ++i) {
            dots[i] = Unit::start();
            codes[i] = vld1q_s8(x[First + i].codes);
        }
        add_quads(weights, codes, dots);
        QUIRE_UNROLL
        for (int i = 0; i < Count; ++i) codes[i] = vld1q_s8(x[First + i].codes + 16);
        add_quads(weights + 4, codes, dots);
        QUIRE_UNROLL
        for (int i = 0; i < Count; ++i) {
            const float32x4_t factors = vld1q_f32(&x[First + i].scale);  // scale, then sum
            float32x4_t& sum = acc[First + i];
            const float32x4_t counter = load_here<float32x4_t>(counters);
            if constexpr (Format::has_offset) sum = vfmaq_laneq_f32(sum, offsets, factors, 1);
            sum = vfmaq_laneq_f32(sum, vfmaq_f32(counter, vreinterpretq_f32_s32(dots[i]), scales), factors, 0);
        }
    }

    template <int Count>
    QUIRE_INLINE static void add_quads(const int8x16_t* weights, const int8x16_t (&codes)[Count],
                                       int32x4_t (&dots)[Count]) {
        QUIRE_UNROLL
        for (int i = 0; i < Count; ++i) dots[i] = vdotq_laneq_s32(dots[i], weights[0], codes[i], 0);
        QUIRE_UNROLL
        for (int i = 0; i < Count; ++i) dots[i] = vdotq_laneq_s32(dots[i], weights[1], codes[i], 1);
        QUIRE_UNROLL
        for (int i = 0; i < Count; ++i) dots[i] = vdotq_laneq_s32(dots[i], weights[2], codes[i], 2);
        QUIRE_UNROLL
        for (int i = 0; i < Count; ++i) dots[i] = vdotq_laneq_s32(dots[i], weights[3], codes[i], 3);
    }
};

template <class Format, int Rows>
struct FewOrSeveral : SeveralRows<Format, Rows> {};
template <class Format>
struct FewOrSeveral<Format, 1> : FewRows<Format, 1> {};
template <class Format>
struct FewOrSeveral<Format, 2> : FewRows<Format, 2> {};
template <class Format>
struct FewOrSeveral<Format, 3> : FewRows<Format, 3> {};
template <class Format>
struct FewOrSeveral<Format, 4> : FewRows<Format, 4> {};

template <ScaleType Scale, bool Offset, int Zero, Codebook Book, int Rows>
struct TileProduct<IntFormat<4, 32, Scale, Offset, Zero, Book>, Rows>
    : FewOrSeveral<IntFormat<4, 32, Scale, Offset, Zero, Book>, Rows> {};

template <ScaleType Scale, bool Offset, int Zero, Codebook Book>
constexpr int kMaxTileRows<IntFormat<4, 32, Scale, Offset, Zero, Book>> = 12;

}  // namespace
}  // namespace quire::QUIRE_ISA
