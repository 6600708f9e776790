// What the x86 units have in common, over the vectors of one width.
//
// `Vectors` (matrix_avx.h, matrix_avx512.h) has what matrix_vector.h wants of a unit but for dot products, and
//   load(p), store_bytes(p, v)                  integers
//   splat(int32), splat(float), quad(p)         one number in every lane; 4 codes in every lane
//   codebook(p), look_up(codebook, v)           16 bytes, and those of them that the bytes of v, 0 .. 15, name
//   flip_signs(v), masked(v, bits)              of bytes
//   shifted_words(v, n)                         words, n bits to the left, or to the right where n is negative
//   as_floats(v), fma(a, b, c)
//   add_words(sum, a, b)                        sum + a . b: lanes as pairs of int16
#pragma once

#include "matrix_format.h"

namespace quire::QUIRE_ISA {
namespace {

template <class Vectors, int ByteShift>
struct X86 : Vectors {
    using Float = typename Vectors::Float;
    using Int = typename Vectors::Int;

    // The hardware does so to the end of a page, and no further. Many rows of floats are worked on for longer than
    // their weights take to come.
    static constexpr bool fetches_codes = true;
    static constexpr bool fetches_floats(int rows) { return rows <= 4; }
    static constexpr int fetch_ahead = 4096;

    // Dot products start at the bits of 1.5 * 2^23, where floats count by ones: a multiply-add with an addend that all
    // rows share then converts and scales at once. Both are exact: a dot product is below 2^22, and a scale has few
    // bits (fp16 11, a product of fp16 and 6 or 8 bits 19, where 22 would do).
    static constexpr float kCounter = 0x1.8p23f;
    static constexpr int32_t kCounterBits = 0x4b400000;
    QUIRE_INLINE static Float counters(Float scales) { return Vectors::mul(scales, Vectors::splat(-kCounter)); }
    QUIRE_INLINE static Float scaled(Int dots, Float scales) {
        return Vectors::fma(Vectors::as_floats(dots), scales, counters(scales));
    }

    // Weights are the codes that are stored, or bytes, where codes have 8 bits or are looked up. They are kShift
    // above what they mean: x86 multiplies unsigned with signed bytes, and a unit that makes its bytes unsigned by
    // adding to them says ByteShift = 128, another one 0.
    static_assert(ByteShift == 0 || ByteShift == 128);
    template <class Format>
    static constexpr bool kUnsigned = Format::bits < 8 && !Format::has_codebook;
    template <class Format>
    static constexpr int kShift = kUnsigned<Format> ? Format::zero : ByteShift;
    QUIRE_INLINE static Int shifted(Int bytes) { return ByteShift ? Vectors::flip_signs(bytes) : bytes; }

    QUIRE_INLINE static Int counter() { return Vectors::splat(kCounterBits); }
    // Takes off what the shift adds to dot products, before or after: code_sum, as two words, times (-kShift, 0).
    template <class Format>
    QUIRE_INLINE static Int unshifted(Int dots, const QuantizedGroup& x, int part) {
        if constexpr (kShift<Format> == 0) return dots;
        return Vectors::add_words(dots, Vectors::splat(code_sum_of<Format>(x, part)),
                                  Vectors::splat(-kShift<Format> & 0xffff));
    }

    // What a plane has of quad q, moved to bit `to`.
    template <class Format, int Bits>
    QUIRE_INLINE static Int bits_of(const uint8_t* plane, int q, int to) {
        const Int row = Vectors::load(plane + q % Bits * Format::plane_row);
        return Vectors::masked(Vectors::shifted_words(row, to - q / Bits * Bits), ((1 << Bits) - 1) << to);
    }

    // Quad q of a run.
    template <class Format>
    QUIRE_INLINE static Int weights(const uint8_t* codes, int q) {
        if constexpr (Format::bits == 8) return shifted(Vectors::load(codes + q * Format::plane_row));
        Int stored = bits_of<Format, Format::low_bits>(codes, q, 0);
        if constexpr (Format::high_bits > 0)
            stored |= bits_of<Format, Format::high_bits>(codes + Format::high_plane_at, q, Format::low_bits);
        if constexpr (Format::has_codebook)
            return Vectors::look_up(shifted(Vectors::codebook(Format::codebook)), stored);
        return stored;
    }

    // The i-th quad of a part to be read: two that share their bytes are neighbours.
    template <class Format>
    static constexpr int quad_at(int part, int i) {
        return Format::low_bits == 4 && Format::parts == 1 ? i / 2 + i % 2 * 4 : part * Format::group / 4 + i;
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
