// Dot products with vpdpbusd (AVX-VNNI and AVX-512).
#pragma once

#include "matrix_x86.h"

namespace quire::QUIRE_ISA {
namespace {

// `Vectors` also has
//   add_dot(sum, w, x)   sum + w . x: lanes are 4 bytes, unsigned in w
template <class Vectors>
struct Vnni : X86<Vectors, 128> {
    using Base = X86<Vectors, 128>;
    using Int = typename Base::Int;

    template <class Format, int Rows>
    QUIRE_INLINE static void dot(const uint8_t* quants, const QuantizedGroup* const (&rows)[Rows], int part,
                                 Int (&dots)[Rows]) {
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) dots[r] = Base::template unshifted<Format>(Base::magic(), *rows[r], part);
        QUIRE_UNROLL
        for (int i = 0; i < Format::group / 4; ++i) {
            const int q = Base::template quad_at<Format>(part, i);
            const Int w = Base::template weights<Format>(quants, q);
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) dots[r] = Base::add_dot(dots[r], w, Base::quad(rows[r]->quants + 4 * q));
        }
    }

    // Panels have one plane, the bytes of weights.
    template <class Format>
    static constexpr int kPlanes = 1;
    template <class Format>
    QUIRE_INLINE static Int plane(Int weights, int) {
        return weights;
    }

    template <class Format, int Rows, int Vecs>
    QUIRE_INLINE static void dot_unpacked(const uint8_t* quants, const QuantizedGroup* x, int part,
                                          Int (&dots)[Rows][Vecs]) {
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < Vecs; ++v) dots[r][v] = Base::template unshifted<Format>(Base::magic(), x[r], part);
        QUIRE_UNROLL
        for (int q = 0; q < Format::group / 4; ++q) {
            Int w[Vecs];
            for (int v = 0; v < Vecs; ++v) w[v] = Base::load(quants + 4 * Base::lanes * (q * Vecs + v));
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) {
                const Int quad = Base::quad(x[r].quants + part * Format::group + 4 * q);
                for (int v = 0; v < Vecs; ++v) dots[r][v] = Base::add_dot(dots[r][v], w[v], quad);
            }
        }
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
