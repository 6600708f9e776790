// AVX-VNNI, the dot products of CPUs without AVX-512: 8 outputs a vector.
#pragma once

#include "matrix_avx.h"

namespace quire::QUIRE_ISA {
namespace {

struct Unit : Avx {
    static constexpr int max_rows = 5;
    static constexpr int row_block = max_rows;
    static constexpr int int_vectors(int rows) { return rows == 1 ? 2 : 1; }

    // Dot products start at the bits of 1.5 * 2^23, where floats count by ones: a multiply-add with an addend that all
    // rows share then converts and scales at once. Both are exact: a dot product is below 2^22, and a scale has few
    // bits.
    static constexpr float kCounter = 0x1.8p23f;
    static constexpr int32_t kCounterBits = 0x4b400000;
    QUIRE_INLINE static Float scaled(Int dots, Float scales) {
        return _mm256_fmadd_ps(_mm256_castsi256_ps(dots), scales, _mm256_mul_ps(scales, _mm256_set1_ps(-kCounter)));
    }

    // As in matrix_avx512.h: unsigned weights, and what that adds is taken off the start.
    template <class Format>
    QUIRE_INLINE static Int start(const QuantizedGroup& x, int part) {
        constexpr int kShift = Format::bits == 8 || Format::has_codebook ? 128 : Format::zero;
        return _mm256_set1_epi32(kCounterBits - kShift * code_sum_of<Format>(x, part));
    }

    // The unsigned weights that the low nibbles of all bytes say.
    template <class Format>
    QUIRE_INLINE static Int codes_of(Int nibbles) {
        nibbles = _mm256_and_si256(nibbles, _mm256_set1_epi8(15));
        if constexpr (!Format::has_codebook) return nibbles;
        return look_up(_mm_xor_si128(load_short(Format::codebook), _mm_set1_epi8(-128)), nibbles);
    }

    template <class Format, int Rows>
    QUIRE_INLINE static void dot(const uint8_t* codes, const QuantizedGroup* const (&rows)[Rows], int part,
                                 Int (&dots)[Rows]) {
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) dots[r] = start<Format>(*rows[r], part);
        if constexpr (Format::bits == 8) {
            QUIRE_UNROLL
            for (int q = 0; q < Format::group / 4; ++q) {
                const Int w = _mm256_xor_si256(load(codes + q * 4 * kTileOutputs), _mm256_set1_epi8(-128));
                QUIRE_UNROLL
                for (int r = 0; r < Rows; ++r)
                    dots[r] = _mm256_dpbusd_avx_epi32(dots[r], w, quad(rows[r]->codes + part * Format::group + 4 * q));
            }
        } else {
            QUIRE_UNROLL
            for (int p = 0; p < 4; ++p) {
                const Int pairs = load(codes + p * 4 * kTileOutputs);
                const Int low = codes_of<Format>(pairs);
                const Int high = codes_of<Format>(_mm256_srli_epi16(pairs, 4));
                QUIRE_UNROLL
                for (int r = 0; r < Rows; ++r) {
                    dots[r] = _mm256_dpbusd_avx_epi32(dots[r], low, quad(rows[r]->codes + 4 * p));
                    dots[r] = _mm256_dpbusd_avx_epi32(dots[r], high, quad(rows[r]->codes + 16 + 4 * p));
                }
            }
        }
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
