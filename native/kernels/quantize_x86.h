// Quantization of activations with AVX2: see quantize_group in matrix.cpp.
#pragma once

#include <immintrin.h>

#include "matrix.h"

namespace quire::QUIRE_ISA {
namespace {

// The inputs of a group.
struct Inputs {
    __m256 x[kGroupInputs / 8];

    explicit Inputs(const float* from) {
        for (int i = 0; i < kGroupInputs / 8; ++i) x[i] = _mm256_loadu_ps(from + 8 * i);
    }
    uint32_t largest() const {
        __m256i bits[kGroupInputs / 8];
        for (int i = 0; i < kGroupInputs / 8; ++i)
            bits[i] = _mm256_and_si256(_mm256_castps_si256(x[i]), _mm256_set1_epi32(0x7fffffff));
        const __m256i maximum =
            _mm256_max_epi32(_mm256_max_epi32(bits[0], bits[1]), _mm256_max_epi32(bits[2], bits[3]));
        __m128i four = _mm_max_epi32(_mm256_castsi256_si128(maximum), _mm256_extracti128_si256(maximum, 1));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
        return uint32_t(_mm_cvtsi128_si32(four));
    }
    void store_quants(float inverse_scale, QuantizedGroup& out) const {
        __m256i rounded[kGroupInputs / 8];
        for (int i = 0; i < kGroupInputs / 8; ++i)
            rounded[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], _mm256_set1_ps(inverse_scale)));
        // Packs work on 128-bit lanes: fours of values come out as 0 2 4 6 1 3 5 7.
        const __m256i packed =
            _mm256_packs_epi16(_mm256_packs_epi32(rounded[0], rounded[1]), _mm256_packs_epi32(rounded[2], rounded[3]));
        const __m256i quants = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.quants), quants);
        // Sums of eight unsigned bytes: each is 128 above the quantized value.
        const __m256i eights =
            _mm256_sad_epu8(_mm256_xor_si256(quants, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
        const __m256i sixteens = _mm256_add_epi64(eights, _mm256_shuffle_epi32(eights, 0x4e));
        out.half_quant_sums[0] = _mm256_extract_epi32(sixteens, 0) - 16 * 128;
        out.half_quant_sums[1] = _mm256_extract_epi32(sixteens, 4) - 16 * 128;
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
