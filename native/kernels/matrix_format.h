// What the bytes of a packed matrix mean, as types that kernels are instantiated over. Layouts: native/src/matrix.h.
#pragma once

#include "inline.h"
#include "matrix.h"

namespace quire::QUIRE_ISA {
namespace {

// One integer layout: w = scale * (stored - Zero) + offset, or with a codebook, w = scale * codebook[stored].
template <int Bits, int Group, ScaleType Scale, bool Offset, int Zero = 0, Codebook Book = Codebook::None>
struct IntFormat {
    static constexpr int bits = Bits;    // 4 or 8
    static constexpr int group = Group;  // 16 or 32
    static constexpr ScaleType scale_type = Scale;
    static constexpr bool has_offset = Offset;
    static constexpr int zero = Zero;
    static constexpr bool has_codebook = Book != Codebook::None;
    static constexpr const int8_t (&codebook)[16] = kCodebooks[int(Book)];

    static constexpr int scale_bytes = Scale == ScaleType::Float32 ? 4 : 2;
    static constexpr int offsets_at = kTileOutputs * scale_bytes;
    static constexpr int codes_at = Offset ? 2 * offsets_at : offsets_at;
    static constexpr int group_bytes = codes_at + kTileOutputs * Group * Bits / 8;
    static constexpr int parts = kGroupInputs / Group;  // groups of weights in a group of activations
    static_assert(Bits == 8 || Group == kGroupInputs, "nibbles pair the two halves of a group of 32");
};

template <ScaleType Scale, Codebook Book>
using CodebookFormat = IntFormat<4, 32, Scale, false, 0, Book>;

template <Layout Element>
struct FloatFormat {
    static constexpr Layout element = Element;
    static constexpr int element_bytes = Element == Layout::Float32 ? 4 : 2;
};

// Call visitor.visit<Format>() for the format of this matrix.
template <class Visitor>
void visit_format(const PackedMatrix& w, const Visitor& visitor) {
    const bool wide = w.scale_type == ScaleType::Float32;
    switch (w.layout) {
        case Layout::Float32: return visitor.template visit<FloatFormat<Layout::Float32>>();
        case Layout::Float16: return visitor.template visit<FloatFormat<Layout::Float16>>();
        case Layout::BFloat16: return visitor.template visit<FloatFormat<Layout::BFloat16>>();
        case Layout::Int4:
            if (!w.has_offset) return visitor.template visit<IntFormat<4, 32, ScaleType::Float16, false, 8>>();
            if (wide) return visitor.template visit<IntFormat<4, 32, ScaleType::Float32, true>>();
            if (w.scale_type == ScaleType::ZeroPoint)
                return visitor.template visit<IntFormat<4, 32, ScaleType::ZeroPoint, true>>();
            return visitor.template visit<IntFormat<4, 32, ScaleType::Float16, true>>();
        case Layout::Int8:
            if (w.group == 16 && w.has_offset)
                return visitor.template visit<IntFormat<8, 16, ScaleType::Float32, true>>();
            if (w.group == 16) return visitor.template visit<IntFormat<8, 16, ScaleType::Float32, false>>();
            if (wide && w.has_offset) return visitor.template visit<IntFormat<8, 32, ScaleType::Float32, true>>();
            if (wide) return visitor.template visit<IntFormat<8, 32, ScaleType::Float32, false>>();
            if (w.has_offset) return visitor.template visit<IntFormat<8, 32, ScaleType::Float16, true>>();
            return visitor.template visit<IntFormat<8, 32, ScaleType::Float16, false>>();
        case Layout::Codebook4:
            switch (w.codebook) {
                case Codebook::E2M1:
                    return visitor.template visit<CodebookFormat<ScaleType::BFloat16, Codebook::E2M1>>();
                case Codebook::IQ12:
                    return visitor.template visit<CodebookFormat<ScaleType::Float32, Codebook::IQ12>>();
                case Codebook::IQ3_XXS:
                    return visitor.template visit<CodebookFormat<ScaleType::Float32, Codebook::IQ3_XXS>>();
                case Codebook::IQ3_S:
                    return visitor.template visit<CodebookFormat<ScaleType::Float32, Codebook::IQ3_S>>();
                case Codebook::NF4: return visitor.template visit<CodebookFormat<ScaleType::Float32, Codebook::NF4>>();
                case Codebook::FP4: return visitor.template visit<CodebookFormat<ScaleType::Float32, Codebook::FP4>>();
                case Codebook::IQ4:
                case Codebook::None: break;
            }
            if (wide) return visitor.template visit<CodebookFormat<ScaleType::Float32, Codebook::IQ4>>();
            return visitor.template visit<CodebookFormat<ScaleType::Float16, Codebook::IQ4>>();
    }
}

// The rows that one call of a tile product takes.
struct Block {
    const float* x;  // [rows, num_inputs], rows `stride` floats apart
    int64_t stride;
    const QuantizedGroup* groups;  // those of group 0, row after row; the next group's are group_stride further on
    int64_t group_stride;
    const HalfGroup* halves;         // laid out likewise
    const void* arranged = nullptr;  // the same rows, in the order that some tiles want (matrix_tiles.h)
};

// The factor of a group's offsets: the sum of its activations.
template <class Format>
QUIRE_INLINE const float* sum_of(const QuantizedGroup& x, int part) {
    return Format::parts == 1 ? &x.sum : &x.half_sums[part];
}

template <class Format>
QUIRE_INLINE int32_t code_sum_of(const QuantizedGroup& x, int part) {
    return Format::parts == 1 ? x.code_sum : x.half_code_sums[part];
}

}  // namespace
}  // namespace quire::QUIRE_ISA
