// NEON with dot products (Armv8.2): 4 outputs per vector.
#pragma once

#include <arm_neon.h>

#include "matrix_format.h"

namespace quire::QUIRE_ISA {
namespace {

// A load that stays where it is written. Compilers would keep a constant in a register, and a copy of it takes a vector
// pipe; a load does not.
template <class Vector>
QUIRE_INLINE Vector load_here(const void* p) {
    Vector v;
    __asm__ volatile("ldr %q0, %1" : "=w"(v) : "m"(*(const Vector*)p));
    return v;
}

// dot += 16 inputs: w[q] has input quad q of 4 outputs, x has 4 quads, selected by lane. Inline assembly, because the
// speed of a loop depends on the order of these instructions.
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
QUIRE_INLINE void fmla(float32x4_t& sum, float32x4_t w, float32x4_t x) {  // += w * x[Lane]
    __asm__ volatile("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(w), "w"(x), "i"(Lane));
}
QUIRE_INLINE void fmla(float32x4_t& sum, float32x4_t x, float32x4_t y) {  // += x * y
    __asm__ volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(x), "w"(y));
}

struct Simd {
    using Float = float32x4_t;
    using Int = int32x4_t;
    static constexpr int lanes = 4;
    static constexpr int max_rows = 8;
    static constexpr int row_block = 12;
    static constexpr int int_vectors(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }
    static constexpr int float_vectors(int rows) { return rows <= 4 ? 4 : 2; }
    static constexpr bool prefetches_quants = false;
    static constexpr bool prefetches_floats(int) { return false; }
    static constexpr int prefetch_bytes = 0;

    QUIRE_INLINE static Float zero() { return vdupq_n_f32(0); }
    QUIRE_INLINE static Float load_floats(const uint8_t* p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }
    QUIRE_INLINE static Float load_fp16(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
    QUIRE_INLINE static Float load_bf16(const uint8_t* p) {
        return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
    }
    QUIRE_INLINE static Float load_int8(const uint8_t* p) {
        int8x8_t counts;  // 4 values
        __asm__("ldr %s0, %1" : "=w"(counts) : "m"(*(const uint8_t (*)[4])p));
        return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(counts))));
    }
    QUIRE_INLINE static void store(float* p, Float v) { vst1q_f32(p, v); }
    QUIRE_INLINE static Float fma_scalar(Float a, const float* b, Float c) { return vfmaq_n_f32(c, a, *b); }

    // Dot products start at the bits of 1.5 * 2^23, where the spacing of floats is 1. A subtraction, which both vector
    // pipes can do, then replaces the conversion to float, which only one can do. A dot product is below 2^22, so this
    // is exact.
    static constexpr float kMagic = 0x1.8p23f;
    static constexpr int32_t kMagicBits = 0x4b400000;
    QUIRE_INLINE static Int start() {
        alignas(16) static constexpr int32_t kStart[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
        return load_here<Int>(kStart);
    }
    QUIRE_INLINE static Float scaled(Int dots, Float scales) {
        return vmulq_f32(vsubq_f32(vreinterpretq_f32_s32(dots), vdupq_n_f32(kMagic)), scales);
    }

    // dot + w . x over 16 inputs: w[q] has input quad q of 4 outputs, x has 4 quads, selected by lane.
    QUIRE_INLINE static Int add_dots(Int dot, const int8x16_t (&w)[4], int8x16_t x) {
        dot = vdotq_laneq_s32(dot, w[0], x, 0);
        dot = vdotq_laneq_s32(dot, w[1], x, 1);
        dot = vdotq_laneq_s32(dot, w[2], x, 2);
        return vdotq_laneq_s32(dot, w[3], x, 3);
    }

    // The quantized values of stored bytes (zero not yet subtracted).
    template <class Format>
    QUIRE_INLINE static int8x16_t quants_of(uint8x16_t stored) {
        if constexpr (Format::has_codebook) return vqtbl1q_s8(vld1q_s8(Format::codebook), stored);
        return vreinterpretq_s8_u8(stored);
    }
    template <class Format>
    QUIRE_INLINE static int8x16_t low_quants(uint8x16_t pairs) {
        return quants_of<Format>(vandq_u8(pairs, vdupq_n_u8(15)));
    }
    template <class Format>
    QUIRE_INLINE static int8x16_t high_quants(uint8x16_t pairs) {
        return quants_of<Format>(vshrq_n_u8(pairs, 4));
    }

    // The bits of quad q in a plane, for 4 outputs, moved to bit `to`.
    template <class Format, int Bits>
    QUIRE_INLINE static uint8x16_t bits_of(const uint8_t* plane, int q, int to) {
        const uint8x16_t row = vld1q_u8(plane + q % Bits * Format::plane_row);
        const int from = q / Bits * Bits;
        const uint8x16_t moved = from > to ? row >> (from - to) : row << (to - from);
        return vandq_u8(moved, vdupq_n_u8(uint8_t(((1 << Bits) - 1) << to)));
    }

    // Quad q of a run, for 4 outputs (zero not yet subtracted).
    template <class Format>
    QUIRE_INLINE static int8x16_t weights(const uint8_t* quants, int q) {
        if constexpr (Format::bits == 8) return vreinterpretq_s8_u8(vld1q_u8(quants + q * Format::plane_row));
        uint8x16_t stored = bits_of<Format, Format::low_bits>(quants, q, 0);
        if constexpr (Format::high_bits > 0)
            stored |= bits_of<Format, Format::high_bits>(quants + Format::high_plane_at, q, Format::low_bits);
        return quants_of<Format>(stored);
    }

    template <class Format, int Rows>
    QUIRE_INLINE static void dot(const uint8_t* quants, const QuantizedGroup* const (&rows)[Rows], int part,
                                 Int (&dots)[Rows]) {
        static_assert(Format::bits != 4 || Format::group == 16, "matrix_neon_int4.h has 4 bits in groups of 32");
        constexpr int kSixteens = Format::group / 16;
        int8x16_t w[kSixteens][4];
        QUIRE_UNROLL
        for (int half = 0; half < kSixteens; ++half) {
            QUIRE_UNROLL
            for (int q = 0; q < 4; ++q) w[half][q] = weights<Format>(quants, (part + half) * 4 + q);
        }
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) {
            dots[r] = vdupq_n_s32(kMagicBits - Format::zero * quant_sum_of<Format>(*rows[r], part));
            QUIRE_UNROLL
            for (int half = 0; half < kSixteens; ++half)
                dots[r] = add_dots(dots[r], w[half], vld1q_s8(rows[r]->quants + (part + half) * 16));
        }
    }
};

// The quantized values of quad q of a group, for the 4 outputs from `output` on.
template <class Format>
QUIRE_INLINE int8x16_t unpack_quad(GroupCursor<Format> from, int q, int output) {
    const uint8_t* quants = Format::quants(from.block, from.group / Format::parts) + 4 * output;
    const bool second = from.group % Format::parts;  // a branch, so that shifts are by constants
    const int8x16_t quad = second ? Simd::weights<Format>(quants, q + 4) : Simd::weights<Format>(quants, q);
    return Format::zero != 0 ? vsubq_s8(quad, vdupq_n_s8(Format::zero)) : quad;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
