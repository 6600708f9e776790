// AVX2 without dot products: pairs are summed to 16 bits, then to 32.
#pragma once

#include "matrix_avx.h"

namespace quire::QUIRE_ISA {
namespace {

struct Unit : Avx {
    static constexpr int max_rows = 5;
    static constexpr int row_block = max_rows;
    static constexpr int int_vectors(int rows) { return rows == 1 ? 2 : 1; }

    QUIRE_INLINE static Float scaled(Int dots, Float scales) { return _mm256_mul_ps(_mm256_cvtepi32_ps(dots), scales); }

    // Sums are taken as written: in the compiler's own order they would not fit the registers.
    QUIRE_INLINE static void keep(Int& sums) { __asm__("" : "+x"(sums)); }

    template <class Format, int Rows>
    QUIRE_INLINE static void dot(const uint8_t* codes, const QuantizedGroup* const (&rows)[Rows], int part,
                                 Int (&dots)[Rows]) {
        if constexpr (Format::has_codebook)
            dot_codebook<Format>(codes, rows, dots);
        else if constexpr (Format::bits == 4)
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
        QUIRE_UNROLL
        for (int p = 0; p < 4; ++p) {
            const Int pairs = load(codes + p * 4 * kTileOutputs);
            const Int low = _mm256_and_si256(pairs, low_bits);
            const Int high = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), low_bits);
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) {
                const Int low_sums = _mm256_maddubs_epi16(low, quad(rows[r]->codes + 4 * p));
                const Int high_sums = _mm256_maddubs_epi16(high, quad(rows[r]->codes + 16 + 4 * p));
                sums[r] = _mm256_add_epi16(sums[r], _mm256_add_epi16(low_sums, high_sums));
                keep(sums[r]);
            }
        }
        for (int r = 0; r < Rows; ++r) {
            dots[r] = _mm256_madd_epi16(sums[r], _mm256_set1_epi16(1));
            if constexpr (Format::zero != 0)
                dots[r] = _mm256_sub_epi32(dots[r], _mm256_set1_epi32(Format::zero * code_sum_of<Format>(*rows[r], 0)));
        }
    }

    template <class Format, int Rows>
    QUIRE_INLINE static void dot_codebook(const uint8_t* codes, const QuantizedGroup* const (&rows)[Rows],
                                          Int (&dots)[Rows]) {
        for (int r = 0; r < Rows; ++r) dots[r] = _mm256_setzero_si256();
        const __m128i codebook = load_short(Format::codebook);
        const Int low_bits = _mm256_set1_epi8(15);
        QUIRE_UNROLL
        for (int q = 0; q < Format::group / 4; ++q) {
            Int pairs = load(codes + q % 4 * 4 * kTileOutputs);
            if (q >= 4) pairs = _mm256_srli_epi16(pairs, 4);
            add_quad(look_up(codebook, _mm256_and_si256(pairs, low_bits)), rows, 4 * q, dots);
        }
    }

    template <class Format, int Rows>
    QUIRE_INLINE static void dot_bytes(const uint8_t* codes, const QuantizedGroup* const (&rows)[Rows], int part,
                                       Int (&dots)[Rows]) {
        for (int r = 0; r < Rows; ++r) dots[r] = _mm256_setzero_si256();
        QUIRE_UNROLL
        for (int q = 0; q < Format::group / 4; ++q)
            add_quad(load(codes + q * 4 * kTileOutputs), rows, part * Format::group + 4 * q, dots);
    }

    // dots[r] += w . x[r], for the 4 inputs from `first` on. maddubs wants one side unsigned: |w| and x with w's sign.
    // 2 * 128 * 127 does not saturate, two of it would.
    template <int Rows>
    QUIRE_INLINE static void add_quad(Int w, const QuantizedGroup* const (&rows)[Rows], int first, Int (&dots)[Rows]) {
        const Int magnitude = _mm256_abs_epi8(w);
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) {
            const Int x = _mm256_sign_epi8(quad(rows[r]->codes + first), w);
            const Int pair_sums = _mm256_maddubs_epi16(magnitude, x);
            dots[r] = _mm256_add_epi32(dots[r], _mm256_madd_epi16(pair_sums, _mm256_set1_epi16(1)));
            keep(dots[r]);
        }
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
