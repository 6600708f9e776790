// AVX2 with FMA and F16C: 8 outputs a vector.
#pragma once

#include <immintrin.h>

#include "matrix_format.h"

namespace quire::QUIRE_ISA {
namespace {

struct Unit {
    using Float = __m256;
    using Int = __m256i;
    static constexpr int lanes = 8;
    static constexpr int max_rows = 4;
    static constexpr int row_block = max_rows;
    static constexpr int int_vectors(int rows) { return rows == 1 ? 2 : 1; }
    static constexpr int float_vectors(int) { return 2; }

    QUIRE_INLINE static Int load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    QUIRE_INLINE static __m128i load_short(const uint8_t* p) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    }
    QUIRE_INLINE static Float zero() { return _mm256_setzero_ps(); }
    QUIRE_INLINE static Float load_floats(const uint8_t* p) { return _mm256_castsi256_ps(load(p)); }
    QUIRE_INLINE static Float load_halves(const uint8_t* p) { return _mm256_cvtph_ps(load_short(p)); }
    QUIRE_INLINE static Float load_bfloats(const uint8_t* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_short(p)), 16));
    }
    QUIRE_INLINE static void store(float* p, Float v) { _mm256_storeu_ps(p, v); }
    QUIRE_INLINE static Float fma_scalar(Float a, const float* b, Float c) {
        return _mm256_fmadd_ps(a, _mm256_broadcast_ss(b), c);
    }
    QUIRE_INLINE static Float scaled(Int dots, Float scales) { return _mm256_mul_ps(_mm256_cvtepi32_ps(dots), scales); }

    // 4 activation codes in every lane.
    QUIRE_INLINE static Int quad(const int8_t* codes) {
        int32_t bits;
        __builtin_memcpy(&bits, codes, 4);
        return _mm256_set1_epi32(bits);
    }

    template <class Format, int Rows>
    QUIRE_INLINE static void dot(const uint8_t* codes, const QuantizedGroup* const (&rows)[Rows], int part,
                                 Int (&dots)[Rows]) {
        if constexpr (Format::bits == 4)
            dot_nibbles<Format>(codes, rows, dots);
        else
            dot_bytes<Format>(codes, rows, part, dots);
    }

    // Pair sums of unsigned nibbles with codes are at most 2 * 15 * 127, and 8 of them fit 16 bits: a group needs one
    // widening.
    template <class Format, int Rows>
    QUIRE_INLINE static void dot_nibbles(const uint8_t* codes, const QuantizedGroup* const (&rows)[Rows],
                                         Int (&dots)[Rows]) {
        Int sums[Rows];
        for (int r = 0; r < Rows; ++r) sums[r] = _mm256_setzero_si256();
        const Int low_bits = _mm256_set1_epi8(15);
        for (int p = 0; p < 4; ++p) {
            const Int pairs = load(codes + p * 4 * kTileOutputs);
            const Int low = _mm256_and_si256(pairs, low_bits);
            const Int high = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), low_bits);
            for (int r = 0; r < Rows; ++r) {
                const Int low_sums = _mm256_maddubs_epi16(low, quad(rows[r]->codes + 4 * p));
                const Int high_sums = _mm256_maddubs_epi16(high, quad(rows[r]->codes + 16 + 4 * p));
                sums[r] = _mm256_add_epi16(sums[r], _mm256_add_epi16(low_sums, high_sums));
            }
        }
        for (int r = 0; r < Rows; ++r) {
            dots[r] = _mm256_madd_epi16(sums[r], _mm256_set1_epi16(1));
            if constexpr (Format::zero != 0)
                dots[r] = _mm256_sub_epi32(dots[r], _mm256_set1_epi32(Format::zero * code_sum_of<Format>(*rows[r], 0)));
        }
    }

    // maddubs wants one side unsigned: |w| and x with w's sign. 2 * 128 * 127 does not saturate, two of it would.
    template <class Format, int Rows>
    QUIRE_INLINE static void dot_bytes(const uint8_t* codes, const QuantizedGroup* const (&rows)[Rows], int part,
                                       Int (&dots)[Rows]) {
        for (int r = 0; r < Rows; ++r) dots[r] = _mm256_setzero_si256();
        for (int q = 0; q < Format::group / 4; ++q) {
            const Int w = load(codes + q * 4 * kTileOutputs);
            const Int magnitude = _mm256_abs_epi8(w);
            for (int r = 0; r < Rows; ++r) {
                const Int x = _mm256_sign_epi8(quad(rows[r]->codes + part * Format::group + 4 * q), w);
                const Int pair_sums = _mm256_maddubs_epi16(magnitude, x);
                dots[r] = _mm256_add_epi32(dots[r], _mm256_madd_epi16(pair_sums, _mm256_set1_epi16(1)));
            }
        }
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
