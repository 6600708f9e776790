// Vectors of 8 outputs: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "matrix_x86.h"

namespace quire::QUIRE_ISA {
namespace {

struct Avx {
    using Float = __m256;
    using Int = __m256i;
    static constexpr int lanes = 8;
    static constexpr int max_rows = 5;
    static constexpr int int_vectors(int rows) { return rows == 1 ? 2 : 1; }
    static constexpr int float_vectors(int) { return 2; }
    // Panels: 3 rows x 2 vectors are 6 accumulators and 6 dot products, for 16 registers.
    static constexpr int panel_rows = 3, panel_float_rows = 6, panel_vectors = 2;
    static constexpr int row_block = 15;
    static constexpr int min_panel_rows = 32;  // from which on unpacking pays

    QUIRE_INLINE static Int load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    QUIRE_INLINE static __m128i load_short(const uint8_t* p) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    }
    QUIRE_INLINE static void store_bytes(uint8_t* p, Int v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
    QUIRE_INLINE static Float load_floats(const uint8_t* p) { return _mm256_castsi256_ps(load(p)); }
    QUIRE_INLINE static Float load_fp16(const uint8_t* p) { return _mm256_cvtph_ps(load_short(p)); }
    QUIRE_INLINE static Float load_bf16(const uint8_t* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_short(p)), 16));
    }
    QUIRE_INLINE static Float load_int8(const uint8_t* p) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
    }
    QUIRE_INLINE static void store(float* p, Float v) { _mm256_storeu_ps(p, v); }

    QUIRE_INLINE static Float zero() { return _mm256_setzero_ps(); }
    QUIRE_INLINE static Float splat(float x) { return _mm256_set1_ps(x); }
    QUIRE_INLINE static Int splat(int32_t x) { return _mm256_set1_epi32(x); }
    QUIRE_INLINE static Int quad(const int8_t* quants) {
        int32_t bits;
        __builtin_memcpy(&bits, quants, 4);
        return splat(bits);
    }
    QUIRE_INLINE static Int codebook(const int8_t* quants) {
        return _mm256_broadcastsi128_si256(load_short(reinterpret_cast<const uint8_t*>(quants)));
    }
    QUIRE_INLINE static Int look_up(Int codebook, Int nibbles) { return _mm256_shuffle_epi8(codebook, nibbles); }

    QUIRE_INLINE static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
    QUIRE_INLINE static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
    QUIRE_INLINE static Float fma_scalar(Float a, const float* b, Float c) { return fma(a, _mm256_broadcast_ss(b), c); }
    QUIRE_INLINE static Float as_floats(Int v) { return _mm256_castsi256_ps(v); }

    QUIRE_INLINE static Int flip_signs(Int bytes) { return _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)); }
    QUIRE_INLINE static Int masked(Int bytes, int bits) {
        return _mm256_and_si256(bytes, _mm256_set1_epi8(char(bits)));
    }
    QUIRE_INLINE static Int shifted_words(Int v, int n) {
        using Words = uint16_t __attribute__((vector_size(32)));
        return n < 0 ? Int(Words(v) >> -n) : Int(Words(v) << n);
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
