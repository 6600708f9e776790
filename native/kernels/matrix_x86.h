// The part of `Simd` that all x86 ISAs share, over the vectors of one width.
//
// `Vectors` (matrix_avx.h, matrix_avx512.h) has the interface of matrix_vector.h except dot products, and
//   load(p), store_bytes(p, v)                  integers
//   splat(int32), splat(float), quad(p)         one number in every lane; 4 bytes in every lane
//   codebook(p), look_up(codebook, v)           16 bytes; those selected by the bytes of v, 0 .. 15
//   flip_signs(v), masked(v, bits)              of bytes
//   shifted_words(v, n)                         words, n bits to the left, or to the right if n is negative
//   as_floats(v), fma(a, b, c)
//   add_words(sum, a, b)                        sum + a . b: lanes are pairs of int16
#pragma once

#include "matrix_format.h"

namespace quire::QUIRE_ISA {
namespace {

template <class Vectors, int ByteShift>
struct X86 : Vectors {
    using Float = typename Vectors::Float;
    using Int = typename Vectors::Int;

    // Software prefetch: the hardware prefetcher stops at the end of a page. With many rows of floats, the arithmetic
    // hides the latency.
    static constexpr bool prefetches_quants = true;
    static constexpr bool prefetches_floats(int rows) { return rows <= 4; }
    static constexpr int prefetch_bytes = 4096;

    // Dot products start at the bits of 1.5 * 2^23, where the spacing of floats is 1. A multiply-add with an addend
    // that all rows share then converts and scales at once. Both are exact: a dot product is below 2^22, and a scale
    // has few significant bits (fp16 11; fp16 times 6 or 8 bits 19; 22 would do).
    static constexpr float kMagic = 0x1.8p23f;
    static constexpr int32_t kMagicBits = 0x4b400000;
    QUIRE_INLINE static Float magics(Float scales) { return Vectors::mul(scales, Vectors::splat(-kMagic)); }
    QUIRE_INLINE static Float scaled(Int dots, Float scales) {
        return Vectors::fma(Vectors::as_floats(dots), scales, magics(scales));
    }

    // Weights are the stored values or, if these have 8 bits or are looked up, bytes. They are kShift above the
    // quantized values: x86 multiplies unsigned with signed bytes. An ISA that makes bytes unsigned by adding 128 sets
    // ByteShift = 128, others 0.
    static_assert(ByteShift == 0 || ByteShift == 128);
    template <class Format>
    static constexpr bool kUnsigned = Format::bits < 8 && !Format::has_codebook;
    template <class Format>
    static constexpr int kShift = kUnsigned<Format> ? Format::zero : ByteShift;
    QUIRE_INLINE static Int shifted(Int bytes) { return ByteShift ? Vectors::flip_signs(bytes) : bytes; }

    QUIRE_INLINE static Int magic() { return Vectors::splat(kMagicBits); }
    // Subtracts what the shift adds to dot products: quant_sum, as two words, times (-kShift, 0).
    template <class Format>
    QUIRE_INLINE static Int unshifted(Int dots, const QuantizedGroup& x, int part) {
        if constexpr (kShift<Format> == 0) return dots;
        return Vectors::add_words(dots, Vectors::splat(quant_sum_of<Format>(x, part)),
                                  Vectors::splat(-kShift<Format> & 0xffff));
    }

    // The bits of quad q in a plane, moved to bit `to`.
    template <class Format, int Bits>
    QUIRE_INLINE static Int bits_of(const uint8_t* plane, int q, int to) {
        const Int row = Vectors::load(plane + q % Bits * Format::plane_row);
        return Vectors::masked(Vectors::shifted_words(row, to - q / Bits * Bits), ((1 << Bits) - 1) << to);
    }

    // Quad q of a run.
    template <class Format>
    QUIRE_INLINE static Int weights(const uint8_t* quants, int q) {
        if constexpr (Format::bits == 8) return shifted(Vectors::load(quants + q * Format::plane_row));
        Int stored = bits_of<Format, Format::low_bits>(quants, q, 0);
        if constexpr (Format::high_bits > 0)
            stored |= bits_of<Format, Format::high_bits>(quants + Format::high_plane_at, q, Format::low_bits);
        if constexpr (Format::has_codebook)
            return Vectors::look_up(shifted(Vectors::codebook(Format::codebook)), stored);
        return stored;
    }

    // The i-th quad of a part to be read: two quads that share their bytes are consecutive.
    template <class Format>
    static constexpr int quad_at(int part, int i) {
        return Format::low_bits == 4 && Format::parts == 1 ? i / 2 + i % 2 * 4 : part * Format::group / 4 + i;
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
