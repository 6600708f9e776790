// AVX-512 with VNNI: 16 outputs per vector, the width of a tile.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's header starts from an undefined vector on purpose
#endif
#include <immintrin.h>

#include "matrix_vnni.h"

namespace quire::QUIRE_ISA {
namespace {

struct Avx512 {
    using Float = __m512;
    using Int = __m512i;
    static constexpr int lanes = 16;
    static constexpr int max_rows = 12;
    static constexpr int int_vectors(int) { return 1; }
    static constexpr int float_vectors(int) { return 1; }
    // Panels: two vector pipes do all arithmetic, and there are two 64-byte loads per cycle. A register tile of 6 rows
    // and 2 vectors needs 8 loads for 12 dot products.
    static constexpr int panel_rows = 6, panel_float_rows = 12, panel_vectors = 2;
    static constexpr int row_block = 12;
    static constexpr int min_panel_rows = 48;  // from which on unpacking pays

    QUIRE_INLINE static Int load(const uint8_t* p) { return _mm512_loadu_si512(p); }
    QUIRE_INLINE static __m256i load_short(const uint8_t* p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    }
    QUIRE_INLINE static void store_bytes(uint8_t* p, Int v) { _mm512_storeu_si512(p, v); }
    QUIRE_INLINE static Float load_floats(const uint8_t* p) { return _mm512_loadu_ps(p); }
    QUIRE_INLINE static Float load_fp16(const uint8_t* p) { return _mm512_cvtph_ps(load_short(p)); }
    QUIRE_INLINE static Float load_bf16(const uint8_t* p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_short(p)), 16));
    }
    QUIRE_INLINE static Float load_int8(const uint8_t* p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    }
    QUIRE_INLINE static void store(float* p, Float v) { _mm512_storeu_ps(p, v); }

    QUIRE_INLINE static Float zero() { return _mm512_setzero_ps(); }
    QUIRE_INLINE static Float splat(float x) { return _mm512_set1_ps(x); }
    QUIRE_INLINE static Int splat(int32_t x) { return _mm512_set1_epi32(x); }
    QUIRE_INLINE static Int quad(const int8_t* quants) {
        int32_t bits;
        __builtin_memcpy(&bits, quants, 4);
        return splat(bits);
    }
    QUIRE_INLINE static Int codebook(const int8_t* quants) {
        return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(quants)));
    }
    QUIRE_INLINE static Int look_up(Int codebook, Int nibbles) { return _mm512_shuffle_epi8(codebook, nibbles); }

    QUIRE_INLINE static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
    QUIRE_INLINE static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    QUIRE_INLINE static Float fma_scalar(Float a, const float* b, Float c) { return fma(a, splat(*b), c); }
    QUIRE_INLINE static Float as_floats(Int v) { return _mm512_castsi512_ps(v); }

    QUIRE_INLINE static Int flip_signs(Int bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)); }
    QUIRE_INLINE static Int masked(Int bytes, int bits) {
        return _mm512_and_si512(bytes, _mm512_set1_epi8(char(bits)));
    }
    QUIRE_INLINE static Int shifted_words(Int v, int n) {
        using Words = uint16_t __attribute__((vector_size(64)));
        return n < 0 ? Int(Words(v) >> -n) : Int(Words(v) << n);
    }

    QUIRE_INLINE static Int add_words(Int sum, Int a, Int b) { return _mm512_dpwssd_epi32(sum, a, b); }
    QUIRE_INLINE static Int add_dot(Int sum, Int w, Int x) { return _mm512_dpbusd_epi32(sum, w, x); }
};

using Simd = Vnni<Avx512>;

}  // namespace
}  // namespace quire::QUIRE_ISA
