// AVX2 without dot products: pairs are summed to 16 bits, then to 32.
#pragma once

#include "matrix_avx.h"

namespace quire::QUIRE_ISA {
namespace {

struct Avx2 : Avx {
    QUIRE_INLINE static Int add_words(Int sum, Int a, Int b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
};

struct Unit : X86<Avx2, 0> {
    // Sums are taken as written: in the compiler's own order they would not fit the registers.
    QUIRE_INLINE static void keep(Int& sums) { __asm__("" : "+x"(sums)); }

    // Pair sums of unsigned nibbles with codes are at most 2 * 15 * 127, and 8 of them fit 16 bits: a group needs one
    // widening.
    QUIRE_INLINE static void add_nibbles(Int& sums, Int w, Int x) {
        sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(w, x));
        keep(sums);
    }
    template <class Format>
    QUIRE_INLINE static Int widened(Int sums, const QuantizedGroup& x) {
        return unshifted<Format>(add_words(counter(), sums, _mm256_set1_epi16(1)), x, 0);
    }

    // maddubs wants one side unsigned: |w| and x with w's sign. 2 * 128 * 127 does not saturate, two of it would.
    QUIRE_INLINE static void add_bytes(Int& dots, Int w, Int magnitude, Int x) {
        dots = add_words(dots, _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w)), _mm256_set1_epi16(1));
        keep(dots);
    }

    // Nibbles as they are; bytes with their signs, and without. Both lie in a panel.
    template <class Format>
    static constexpr int kPlanes = kNibbles<Format> ? 1 : 2;
    template <class Format>
    QUIRE_INLINE static Int plane(Int weights, int plane) {
        return kNibbles<Format> || plane == 0 ? weights : _mm256_abs_epi8(weights);
    }

    template <class Format, int Rows>
    QUIRE_INLINE static void dot(const uint8_t* codes, const QuantizedGroup* const (&rows)[Rows], int part,
                                 Int (&dots)[Rows]) {
        for (int r = 0; r < Rows; ++r) dots[r] = kNibbles<Format> ? _mm256_setzero_si256() : counter();
        QUIRE_UNROLL
        for (int i = 0; i < Format::group / 4; ++i) {
            const int q = quad_at<Format>(i);
            const Int w = weights<Format>(codes, q), magnitude = plane<Format>(w, 1);
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) {
                const Int x = quad(rows[r]->codes + part * Format::group + 4 * q);
                kNibbles<Format> ? add_nibbles(dots[r], w, x) : add_bytes(dots[r], w, magnitude, x);
            }
        }
        if constexpr (kNibbles<Format>)
            for (int r = 0; r < Rows; ++r) dots[r] = widened<Format>(dots[r], *rows[r]);
    }

    template <class Format, int Rows, int Vecs>
    QUIRE_INLINE static void dot_unpacked(const uint8_t* codes, const QuantizedGroup* x, int part,
                                          Int (&dots)[Rows][Vecs]) {
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < Vecs; ++v) dots[r][v] = kNibbles<Format> ? _mm256_setzero_si256() : counter();
        QUIRE_UNROLL
        for (int q = 0; q < Format::group / 4; ++q, codes += 4 * lanes * Vecs) {
            Int w[Vecs], magnitudes[Vecs];  // the two planes
            for (int v = 0; v < Vecs; ++v) {
                w[v] = load(codes + 4 * lanes * v);
                magnitudes[v] = kNibbles<Format> ? w[v] : load(codes + Format::group * lanes * Vecs + 4 * lanes * v);
            }
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) {
                const Int x_quad = quad(x[r].codes + part * Format::group + 4 * q);
                for (int v = 0; v < Vecs; ++v)
                    kNibbles<Format> ? add_nibbles(dots[r][v], w[v], x_quad)
                                     : add_bytes(dots[r][v], w[v], magnitudes[v], x_quad);
            }
        }
        if constexpr (kNibbles<Format>)
            for (int r = 0; r < Rows; ++r)
                for (int v = 0; v < Vecs; ++v) dots[r][v] = widened<Format>(dots[r][v], x[r]);
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
