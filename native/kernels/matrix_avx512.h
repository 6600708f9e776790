// AVX-512 with VNNI: 16 outputs a vector, a tile's width.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's own header starts from an undefined vector on purpose
#endif
#include <immintrin.h>

#include "matrix_format.h"

namespace quire::QUIRE_ISA {
namespace {

struct Unit {
    using Float = __m512;
    using Int = __m512i;
    static constexpr int lanes = 16;
    static constexpr int max_rows = 12;
    static constexpr int row_block = max_rows;
    static constexpr int int_vectors(int) { return 1; }
    static constexpr int float_vectors(int) { return 1; }

    QUIRE_INLINE static __m256i load_short(const uint8_t* p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    }
    QUIRE_INLINE static Float zero() { return _mm512_setzero_ps(); }
    QUIRE_INLINE static Float load_floats(const uint8_t* p) { return _mm512_loadu_ps(p); }
    QUIRE_INLINE static Float load_halves(const uint8_t* p) { return _mm512_cvtph_ps(load_short(p)); }
    QUIRE_INLINE static Float load_bfloats(const uint8_t* p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_short(p)), 16));
    }
    QUIRE_INLINE static void store(float* p, Float v) { _mm512_storeu_ps(p, v); }
    QUIRE_INLINE static Float fma_scalar(Float a, const float* b, Float c) {
        return _mm512_fmadd_ps(a, _mm512_set1_ps(*b), c);
    }
    // Dot products start at the bits of 1.5 * 2^23, where floats count by ones: a multiply-add with an addend that all
    // rows share then converts and scales at once. Both are exact: a dot product is below 2^22, and a scale has few
    // bits.
    static constexpr float kCounter = 0x1.8p23f;
    static constexpr int32_t kCounterBits = 0x4b400000;
    QUIRE_INLINE static Float scaled(Int dots, Float scales) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(dots), scales, _mm512_mul_ps(scales, _mm512_set1_ps(-kCounter)));
    }

    // vpdpbusd wants unsigned weights: signed codes are shifted up by 128, nibbles are stored with `zero` added. What
    // that adds to a dot product is taken off its start: code_sum, as two words, times (-shift, 0).
    template <class Format>
    QUIRE_INLINE static Int start(const QuantizedGroup& x, int part) {
        constexpr int kShift = Format::bits == 8 || Format::has_codebook ? 128 : Format::zero;
        const Int counter = _mm512_set1_epi32(kCounterBits);
        if constexpr (kShift == 0) return counter;
        return _mm512_dpwssd_epi32(counter, _mm512_set1_epi32(code_sum_of<Format>(x, part)),
                                   _mm512_set1_epi32(-kShift & 0xffff));
    }

    // The unsigned weights that the low nibbles of all bytes say.
    template <class Format>
    QUIRE_INLINE static Int codes_of(Int nibbles) {
        nibbles = _mm512_and_si512(nibbles, _mm512_set1_epi8(15));
        if constexpr (!Format::has_codebook) return nibbles;
        const __m128i codebook = _mm_loadu_si128(reinterpret_cast<const __m128i*>(Format::codebook));
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_xor_si128(codebook, _mm_set1_epi8(-128))), nibbles);
    }

    // 4 activation codes in every lane.
    QUIRE_INLINE static Int quad(const int8_t* codes) {
        int32_t bits;
        __builtin_memcpy(&bits, codes, 4);
        return _mm512_set1_epi32(bits);
    }

    template <class Format, int Rows>
    QUIRE_INLINE static void dot(const uint8_t* codes, const QuantizedGroup* const (&rows)[Rows], int part,
                                 Int (&dots)[Rows]) {
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) dots[r] = start<Format>(*rows[r], part);
        if constexpr (Format::bits == 8) {
            QUIRE_UNROLL
            for (int q = 0; q < Format::group / 4; ++q) {
                const Int w =
                    _mm512_xor_si512(_mm512_loadu_si512(codes + q * 4 * kTileOutputs), _mm512_set1_epi8(-128));
                QUIRE_UNROLL
                for (int r = 0; r < Rows; ++r)
                    dots[r] = _mm512_dpbusd_epi32(dots[r], w, quad(rows[r]->codes + part * Format::group + 4 * q));
            }
        } else {
            QUIRE_UNROLL
            for (int p = 0; p < 4; ++p) {
                const Int pairs = _mm512_loadu_si512(codes + p * 4 * kTileOutputs);
                const Int low = codes_of<Format>(pairs);
                const Int high = codes_of<Format>(_mm512_srli_epi16(pairs, 4));
                QUIRE_UNROLL
                for (int r = 0; r < Rows; ++r) {
                    dots[r] = _mm512_dpbusd_epi32(dots[r], low, quad(rows[r]->codes + 4 * p));
                    dots[r] = _mm512_dpbusd_epi32(dots[r], high, quad(rows[r]->codes + 16 + 4 * p));
                }
            }
        }
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
