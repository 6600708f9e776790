// NEON with dot products (Armv8.2): 4 outputs a vector.
#pragma once

#include <arm_neon.h>

#include "matrix_format.h"

namespace quire::QUIRE_ISA {
namespace {

struct Unit {
    using Float = float32x4_t;
    using Int = int32x4_t;
    static constexpr int lanes = 4;
    static constexpr int max_rows = 4;
    static constexpr int int_vectors(int rows) { return rows <= 2 ? 4 : 2; }
    static constexpr int float_vectors(int) { return 4; }

    QUIRE_INLINE static Float zero() { return vdupq_n_f32(0); }
    QUIRE_INLINE static Float load_floats(const uint8_t* p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }
    QUIRE_INLINE static Float load_halves(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
    QUIRE_INLINE static Float load_bfloats(const uint8_t* p) {
        return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
    }
    QUIRE_INLINE static void store(float* p, Float v) { vst1q_f32(p, v); }
    QUIRE_INLINE static Float fma_scalar(Float a, const float* b, Float c) { return vfmaq_n_f32(c, a, *b); }

    // Dot products start at the bits of 1.5 * 2^23, where floats count by ones: a subtraction, which both pipelines of a core
    // do, then stands for the conversion, which only one does. A dot product is below 2^22, so this is exact.
    static constexpr float kCounter = 0x1.8p23f;
    static constexpr int32_t kCounterBits = 0x4b400000;
    QUIRE_INLINE static Float scaled(Int dots, Float scales) {
        return vmulq_f32(vsubq_f32(vreinterpretq_f32_s32(dots), vdupq_n_f32(kCounter)), scales);
    }

    // dots += w[quad Lane of 16 inputs] . x. One row's 16 activation codes are one register, picked from by lane.
    template <int Rows, int Vectors, int Lane>
    QUIRE_INLINE static void dot_quad(const int8x16_t (&w)[Vectors], const int8x16_t (&x)[Rows], Int (&dots)[Rows][Vectors]) {
        for (int v = 0; v < Vectors; ++v)
            for (int r = 0; r < Rows; ++r) dots[r][v] = vdotq_laneq_s32(dots[r][v], w[v], x[r], Lane);
    }

    template <int Rows, int Vectors, int Lane>
    QUIRE_INLINE static void dot_bytes(const uint8_t* codes, const int8x16_t (&x)[Rows], Int (&dots)[Rows][Vectors]) {
        int8x16_t w[Vectors];
        for (int v = 0; v < Vectors; ++v) w[v] = vreinterpretq_s8_u8(vld1q_u8(codes + Lane * 4 * kTileOutputs + 16 * v));
        dot_quad<Rows, Vectors, Lane>(w, x, dots);
    }

    template <int Rows, int Vectors, int Lane>
    QUIRE_INLINE static void dot_nibbles(const uint8_t* codes, const int8x16_t (&low_x)[Rows], const int8x16_t (&high_x)[Rows],
                                   Int (&dots)[Rows][Vectors]) {
        int8x16_t low[Vectors], high[Vectors];
        for (int v = 0; v < Vectors; ++v) {
            const uint8x16_t pairs = vld1q_u8(codes + Lane * 4 * kTileOutputs + 16 * v);
            low[v] = vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15)));
            high[v] = vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4));
        }
        dot_quad<Rows, Vectors, Lane>(low, low_x, dots);
        dot_quad<Rows, Vectors, Lane>(high, high_x, dots);
    }

    template <class Format, int Rows, int Vectors>
    QUIRE_INLINE static void dot(const uint8_t* codes, const QuantizedGroup* const (&rows)[Rows], int part, Int (&dots)[Rows][Vectors]) {
        int8x16_t x[Rows], high_x[Rows];
        for (int r = 0; r < Rows; ++r) {
            x[r] = vld1q_s8(rows[r]->codes + part * Format::group);
            if (Format::group == 32) high_x[r] = vld1q_s8(rows[r]->codes + 16);
            const Int start = vdupq_n_s32(Format::zero ? kCounterBits - Format::zero * code_sum_of<Format>(*rows[r], part) : kCounterBits);
            for (int v = 0; v < Vectors; ++v) dots[r][v] = start;
        }
        if constexpr (Format::bits == 4) {
            dot_nibbles<Rows, Vectors, 0>(codes, x, high_x, dots);
            dot_nibbles<Rows, Vectors, 1>(codes, x, high_x, dots);
            dot_nibbles<Rows, Vectors, 2>(codes, x, high_x, dots);
            dot_nibbles<Rows, Vectors, 3>(codes, x, high_x, dots);
        } else {
            dot_sixteen(codes, x, dots);
            if constexpr (Format::group == 32) dot_sixteen(codes + 16 * kTileOutputs, high_x, dots);
        }
    }

    template <int Rows, int Vectors>
    QUIRE_INLINE static void dot_sixteen(const uint8_t* codes, const int8x16_t (&x)[Rows], Int (&dots)[Rows][Vectors]) {
        dot_bytes<Rows, Vectors, 0>(codes, x, dots);
        dot_bytes<Rows, Vectors, 1>(codes, x, dots);
        dot_bytes<Rows, Vectors, 2>(codes, x, dots);
        dot_bytes<Rows, Vectors, 3>(codes, x, dots);
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
