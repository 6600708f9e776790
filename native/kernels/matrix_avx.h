// What vectors of 8 outputs have in common: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "matrix_format.h"

namespace quire::QUIRE_ISA {
namespace {

struct Avx {
    using Float = __m256;
    using Int = __m256i;
    static constexpr int lanes = 8;
    static constexpr int float_vectors(int) { return 2; }

    QUIRE_INLINE static Int load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    QUIRE_INLINE static __m128i load_short(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
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

    QUIRE_INLINE static Int look_up(__m128i codebook, Int nibbles) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(codebook), nibbles);
    }

    // 4 activation codes in every lane.
    QUIRE_INLINE static Int quad(const int8_t* codes) {
        int32_t bits;
        __builtin_memcpy(&bits, codes, 4);
        return _mm256_set1_epi32(bits);
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
