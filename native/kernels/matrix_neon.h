// NEON with dot products (Armv8.2): 4 outputs a vector.
#pragma once

#include <arm_neon.h>

#include "matrix_format.h"

namespace quire::QUIRE_ISA {
namespace {

// A load that stays where it is written: the compiler would keep a constant in a register, and copying it takes a turn
// of a vector pipe. Loads are free here.
template <class Vector>
QUIRE_INLINE Vector load_here(const void* p) {
    Vector v;
    __asm__ volatile("ldr %q0, %1" : "=w"(v) : "m"(*(const Vector*)p));
    return v;
}

// The order of these instructions is what makes a loop fast, so they stay where they are written.
// dot += 16 inputs: w[q] has input quad q of 4 outputs, x the codes of 4 quads, picked from by lane.
QUIRE_INLINE void add_quads(int32x4_t& dot, const int8x16_t* w, int8x16_t x) {
    __asm__ volatile(
        "sdot %0.4s, %1.16b, %5.4b[0]\n\t"
        "sdot %0.4s, %2.16b, %5.4b[1]\n\t"
        "sdot %0.4s, %3.16b, %5.4b[2]\n\t"
        "sdot %0.4s, %4.16b, %5.4b[3]"
        : "+&w"(dot)
        : "w"(w[0]), "w"(w[1]), "w"(w[2]), "w"(w[3]), "w"(x));
}
template <int Lane>
QUIRE_INLINE void add_product(float32x4_t& sum, float32x4_t w, float32x4_t x) {  // += w * x[Lane]
    __asm__ volatile("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(w), "w"(x), "i"(Lane));
}
QUIRE_INLINE void add_product(float32x4_t& sum, float32x4_t x, float32x4_t y) {  // += x * y
    __asm__ volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(x), "w"(y));
}

struct Unit {
    using Float = float32x4_t;
    using Int = int32x4_t;
    static constexpr int lanes = 4;
    static constexpr int max_rows = 8;
    static constexpr int row_block = 12;
    static constexpr int int_vectors(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }
    static constexpr int float_vectors(int rows) { return rows <= 4 ? 4 : 2; }

    QUIRE_INLINE static Float zero() { return vdupq_n_f32(0); }
    QUIRE_INLINE static Float load_floats(const uint8_t* p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }
    QUIRE_INLINE static Float load_halves(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
    QUIRE_INLINE static Float load_bfloats(const uint8_t* p) {
        return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
    }
    QUIRE_INLINE static void store(float* p, Float v) { vst1q_f32(p, v); }
    QUIRE_INLINE static Float fma_scalar(Float a, const float* b, Float c) { return vfmaq_n_f32(c, a, *b); }

    // Dot products start at the bits of 1.5 * 2^23, where floats count by ones: a subtraction, which both pipelines of
    // a core do, then stands for the conversion, which only one does. A dot product is below 2^22, so this is exact.
    static constexpr float kCounter = 0x1.8p23f;
    static constexpr int32_t kCounterBits = 0x4b400000;
    QUIRE_INLINE static Int start() {
        alignas(16) static constexpr int32_t kStart[4] = {kCounterBits, kCounterBits, kCounterBits, kCounterBits};
        return load_here<Int>(kStart);
    }
    QUIRE_INLINE static Float scaled(Int dots, Float scales) {
        return vmulq_f32(vsubq_f32(vreinterpretq_f32_s32(dots), vdupq_n_f32(kCounter)), scales);
    }

    // dot + w . x over 16 inputs: w[q] has input quad q of 4 outputs, x the codes of 4 quads, picked from by lane.
    QUIRE_INLINE static Int add_dots(Int dot, const int8x16_t (&w)[4], int8x16_t x) {
        dot = vdotq_laneq_s32(dot, w[0], x, 0);
        dot = vdotq_laneq_s32(dot, w[1], x, 1);
        dot = vdotq_laneq_s32(dot, w[2], x, 2);
        return vdotq_laneq_s32(dot, w[3], x, 3);
    }

    // What nibbles, one in each byte, say (zero not yet taken off).
    template <class Format>
    QUIRE_INLINE static int8x16_t codes_of(uint8x16_t nibbles) {
        if constexpr (Format::has_codebook) return vqtbl1q_s8(vld1q_s8(Format::codebook), nibbles);
        return vreinterpretq_s8_u8(nibbles);
    }
    template <class Format>
    QUIRE_INLINE static int8x16_t low_codes(uint8x16_t pairs) {
        return codes_of<Format>(vandq_u8(pairs, vdupq_n_u8(15)));
    }
    template <class Format>
    QUIRE_INLINE static int8x16_t high_codes(uint8x16_t pairs) {
        return codes_of<Format>(vshrq_n_u8(pairs, 4));
    }

    template <class Format, int Rows>
    QUIRE_INLINE static void dot(const uint8_t* codes, const QuantizedGroup* const (&rows)[Rows], int part,
                                 Int (&dots)[Rows]) {
        static_assert(Format::bits == 8, "matrix_neon_few.h has 4 bits");
        int8x16_t first[4], second[4];  // quads 0 .. 3 and 4 .. 7 of the group
        for (int q = 0; q < 4; ++q) {
            first[q] = vreinterpretq_s8_u8(vld1q_u8(codes + q * 4 * kTileOutputs));
            if constexpr (Format::group == 32)
                second[q] = vreinterpretq_s8_u8(vld1q_u8(codes + (q + 4) * 4 * kTileOutputs));
        }
        for (int r = 0; r < Rows; ++r) {
            dots[r] = add_dots(vdupq_n_s32(kCounterBits), first, vld1q_s8(rows[r]->codes + part * Format::group));
            if constexpr (Format::group == 32) dots[r] = add_dots(dots[r], second, vld1q_s8(rows[r]->codes + 16));
        }
    }
};

// Codes of inputs 4 * q .. 4 * q + 3 of a group, for the 4 outputs from `output` on.
template <class Format>
QUIRE_INLINE int8x16_t unpack_quad(const uint8_t* group, int q, int output) {
    const uint8_t* codes = group + Format::codes_at + 4 * output;
    const uint8x16_t stored = vld1q_u8(codes + (Format::bits == 4 ? q % 4 : q) * 4 * kTileOutputs);
    int8x16_t quad = vreinterpretq_s8_u8(stored);
    if constexpr (Format::bits == 4) quad = q < 4 ? Unit::low_codes<Format>(stored) : Unit::high_codes<Format>(stored);
    if constexpr (Format::zero != 0) quad = vsubq_s8(quad, vdupq_n_s8(Format::zero));
    return quad;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
