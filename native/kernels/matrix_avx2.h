// AVX2 without dot products: pairs are summed to 16 bits, then to 32.
#pragma once

#include "matrix_avx.h"

namespace quire::QUIRE_ISA {
namespace {

struct Avx2 : Avx {
    QUIRE_INLINE static Int add_words(Int sum, Int a, Int b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
};

struct Unit : X86<Avx2> {
    // Sums are taken as written: in the compiler's own order they would not fit the registers.
    QUIRE_INLINE static void keep(Int& sums) { __asm__("" : "+x"(sums)); }

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
    QUIRE_INLINE static void add_pairs(Int& sums, Int nibbles, Int quad) {
        sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(nibbles, quad));
        keep(sums);
    }

    template <class Format, int Rows>
    QUIRE_INLINE static void dot_nibbles(const uint8_t* codes, const QuantizedGroup* const (&rows)[Rows],
                                         Int (&dots)[Rows]) {
        Int sums[Rows];
        for (int r = 0; r < Rows; ++r) sums[r] = _mm256_setzero_si256();
        QUIRE_UNROLL
        for (int i = 0; i < Format::group / 4; ++i) {
            const int q = quad_at<Format>(i);
            const Int w = weights<Format>(codes, q);
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) add_pairs(sums[r], w, quad(rows[r]->codes + 4 * q));
        }
        for (int r = 0; r < Rows; ++r) dots[r] = add_words(start<Format>(*rows[r], 0), sums[r], _mm256_set1_epi16(1));
    }

    // maddubs wants one side unsigned: |w| and x with w's sign. 2 * 128 * 127 does not saturate, two of it would.
    template <class Format, int Rows>
    QUIRE_INLINE static void dot_bytes(const uint8_t* codes, const QuantizedGroup* const (&rows)[Rows], int part,
                                       Int (&dots)[Rows]) {
        for (int r = 0; r < Rows; ++r) dots[r] = start<Format, 0>(*rows[r], part);
        QUIRE_UNROLL
        for (int q = 0; q < Format::group / 4; ++q) {
            const Int w = load(codes + q * 4 * kTileOutputs);
            const Int magnitude = _mm256_abs_epi8(w);
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) {
                const Int x = _mm256_sign_epi8(quad(rows[r]->codes + part * Format::group + 4 * q), w);
                dots[r] = add_words(dots[r], _mm256_maddubs_epi16(magnitude, x), _mm256_set1_epi16(1));
                keep(dots[r]);
            }
        }
    }

    // Panels: bytes as two planes of nibbles, so that pair sums add up in 16 bits here too. A quad is then 2
    // multiplications and 2 additions, and not 3 and 1 of which only the addition finds a free pipe.
    template <class Format>
    static constexpr int kPlanes = Format::bits == 8 ? 2 : 1;
    QUIRE_INLINE static Int plane(Int weights, int plane, int num_planes) {
        return num_planes == 1 ? weights : plane == 0 ? low_nibbles(weights) : high_nibbles(weights);
    }

    template <class Format, int Rows, int Vecs>
    QUIRE_INLINE static void add_unpacked(const uint8_t* codes, const QuantizedGroup* x, int part,
                                          Int (&dots)[Rows][Vecs]) {
        QUIRE_UNROLL
        for (int plane = 0; plane < kPlanes<Format>; ++plane) {
            Int sums[Rows][Vecs];
            for (int r = 0; r < Rows; ++r)
                for (int v = 0; v < Vecs; ++v) sums[r][v] = _mm256_setzero_si256();
            QUIRE_UNROLL
            for (int q = 0; q < Format::group / 4; ++q, codes += 4 * lanes * Vecs) {
                Int w[Vecs];
                for (int v = 0; v < Vecs; ++v) w[v] = load(codes + 4 * lanes * v);
                QUIRE_UNROLL
                for (int r = 0; r < Rows; ++r) {
                    const Int x_quad = quad(x[r].codes + part * Format::group + 4 * q);
                    for (int v = 0; v < Vecs; ++v) add_pairs(sums[r][v], w[v], x_quad);
                }
            }
            const Int weight = _mm256_set1_epi16(plane == 0 ? 1 : 16);
            for (int r = 0; r < Rows; ++r)
                for (int v = 0; v < Vecs; ++v) dots[r][v] = add_words(dots[r][v], sums[r][v], weight);
        }
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
