// AVX2 without VNNI: pairs are summed to 16 bits, then to 32.
#pragma once

#include "matrix_avx.h"

namespace quire::QUIRE_ISA {
namespace {

struct Avx2 : Avx {
    QUIRE_INLINE static Int add_words(Int sum, Int a, Int b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
};

struct Simd : X86<Avx2, 0> {
    // Keeps sums in the written order: the order of the compiler would not fit the registers.
    QUIRE_INLINE static void keep(Int& sums) { __asm__("" : "+x"(sums)); }

    QUIRE_INLINE static Int widened(Int dots, Int sums) { return add_words(dots, sums, _mm256_set1_epi16(1)); }

    // Sums of pairs of unsigned weights times activations are at most 2 * q * 127. If the sums of a group fit 16 bits,
    // as 8 of nibbles do, it needs one widening. Values of 5 and 6 bits are widened in twos.
    template <class Format>
    static constexpr bool kNarrow = kUnsigned<Format> && ((1 << Format::bits) - 1) * 254 * Format::group / 4 < 0x8000;
    template <class Format>
    static constexpr int kQuadsAtOnce = kUnsigned<Format> && !kNarrow<Format> ? 2 : 1;

    // dots += w . x for quads q and, if there are two at once, `next`. `other` is the weights of `next`, or |w|:
    // maddubs wants one side unsigned, so it gets |w|, and x with the sign of w. 2 * 128 * 127 does not saturate, twice
    // that would.
    template <class Format>
    QUIRE_INLINE static void add_quads(Int& dots, Int w, Int other, const int8_t* x, int q, int next) {
        const Int quads = quad(x + 4 * q);
        if constexpr (kNarrow<Format>)
            dots = _mm256_add_epi16(dots, _mm256_maddubs_epi16(w, quads));
        else if constexpr (kUnsigned<Format>)
            dots = widened(dots, _mm256_add_epi16(_mm256_maddubs_epi16(w, quads),
                                                  _mm256_maddubs_epi16(other, quad(x + 4 * next))));
        else
            dots = widened(dots, _mm256_maddubs_epi16(other, _mm256_sign_epi8(quads, w)));
        keep(dots);
    }
    template <class Format>
    QUIRE_INLINE static Int start() {
        return kNarrow<Format> ? _mm256_setzero_si256() : magic();
    }
    template <class Format>
    QUIRE_INLINE static Int finished(Int dots, const QuantizedGroup& x, int part) {
        return unshifted<Format>(kNarrow<Format> ? widened(magic(), dots) : dots, x, part);
    }

    // Planes of a panel: unsigned values as they are; signed bytes, and their magnitudes.
    template <class Format>
    static constexpr int kPlanes = kUnsigned<Format> ? 1 : 2;
    template <class Format>
    QUIRE_INLINE static Int plane(Int weights, int plane) {
        return plane == 0 ? weights : _mm256_abs_epi8(weights);
    }

    template <class Format, int Rows>
    QUIRE_INLINE static void dot(const uint8_t* quants, const QuantizedGroup* const (&rows)[Rows], int part,
                                 Int (&dots)[Rows]) {
        for (int r = 0; r < Rows; ++r) dots[r] = start<Format>();
        QUIRE_UNROLL
        for (int i = 0; i < Format::group / 4; i += kQuadsAtOnce<Format>) {
            const int q = quad_at<Format>(part, i), next = quad_at<Format>(part, i + kQuadsAtOnce<Format> - 1);
            const Int w = weights<Format>(quants, q);
            const Int other = kUnsigned<Format> ? weights<Format>(quants, next) : _mm256_abs_epi8(w);
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) add_quads<Format>(dots[r], w, other, rows[r]->quants, q, next);
        }
        for (int r = 0; r < Rows; ++r) dots[r] = finished<Format>(dots[r], *rows[r], part);
    }

    template <class Format, int Rows, int Vecs>
    QUIRE_INLINE static void dot_unpacked(const uint8_t* quants, const QuantizedGroup* x, int part,
                                          Int (&dots)[Rows][Vecs]) {
        constexpr int kVector = 4 * lanes, kNext = (kUnsigned<Format> ? kQuadsAtOnce<Format> - 1 : Format::group / 4);
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < Vecs; ++v) dots[r][v] = start<Format>();
        QUIRE_UNROLL
        for (int q = 0; q < Format::group / 4; q += kQuadsAtOnce<Format>) {
            Int w[Vecs], others[Vecs];  // of the next quad, or of the other plane
            for (int v = 0; v < Vecs; ++v) {
                w[v] = load(quants + kVector * (q * Vecs + v));
                others[v] = load(quants + kVector * ((q + kNext) * Vecs + v));
            }
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r)
                for (int v = 0; v < Vecs; ++v)
                    add_quads<Format>(dots[r][v], w[v], others[v], x[r].quants + part * Format::group, q,
                                      q + kQuadsAtOnce<Format> - 1);
        }
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < Vecs; ++v) dots[r][v] = finished<Format>(dots[r][v], x[r], part);
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
