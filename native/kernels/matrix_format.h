// The formats of packed matrices, as types that kernels are instantiated with. Layouts: native/src/matrix.h.
#pragma once

#include "inline.h"
#include "matrix.h"

namespace quire::QUIRE_ISA {
namespace {

// One integer layout: w = scale * (stored - Zero) + offset, or with a codebook, w = scale * codebook[stored].
template <int Bits, int Group, ScaleType Scale, bool Offset, int Zero = 0, Codebook Book = Codebook::None>
struct IntFormat {
    static constexpr int bits = Bits;    // 2 .. 6 or 8; with a codebook 3 or 4
    static constexpr int group = Group;  // 16 or 32
    static constexpr ScaleType scale_type = Scale;
    static constexpr bool two_level = has_two_levels(Scale);
    static constexpr bool has_offset = Offset;
    static constexpr int zero = Zero;
    static constexpr bool has_codebook = Book != Codebook::None;
    static constexpr const int8_t (&codebook)[16] = kCodebooks[int(Book)];

    static constexpr int parts = kGroupInputs / Group;  // groups of weights in a group of activations
    static constexpr int block_runs = two_level ? kBlockInputs / kGroupInputs : 1;  // of kGroupInputs inputs
    static constexpr int block_groups = block_runs * parts;
    static constexpr int scale_bytes = two_level ? 1 : Scale == ScaleType::Float32 ? 4 : 2;
    static constexpr int super_scale_bytes = !two_level ? 0 : Scale == ScaleType::WideTwoLevel ? 4 : 2;
    static constexpr int scales_at = (Offset ? 2 : 1) * super_scale_bytes * kTileOutputs;
    static constexpr int offsets_at = scales_at + block_groups * kTileOutputs * scale_bytes;
    static constexpr int quants_at = Offset ? 2 * offsets_at - scales_at : offsets_at;

    static constexpr int low_bits = Bits == 8 ? 8 : Bits >= 4 ? 4 : 2, high_bits = Bits - low_bits;
    static constexpr int plane_row = 4 * kTileOutputs;          // bytes
    static constexpr int high_plane_at = low_bits * plane_row;  // in a run
    static constexpr int run_bytes = Bits * plane_row;
    static constexpr int block_bytes = quants_at + block_runs * run_bytes;

    static const uint8_t* super_scales(const uint8_t* block, int output) { return block + output * super_scale_bytes; }
    static const uint8_t* super_offsets(const uint8_t* block, int output) {
        return super_scales(block, kTileOutputs + output);
    }
    static const uint8_t* scales(const uint8_t* block, int group, int output) {
        return block + scales_at + (group * kTileOutputs + output) * scale_bytes;
    }
    static const uint8_t* offsets(const uint8_t* block, int group, int output) {
        return block + offsets_at + (group * kTileOutputs + output) * scale_bytes;
    }
    // The quantized values of a run. The quads of an output are 4 * output bytes further on.
    static const uint8_t* quants(const uint8_t* block, int run) { return block + quants_at + run * run_bytes; }
};

// A position in the groups of a tile: the block, and the group in it, a constant if a block is one group.
template <class Format, bool Several = (Format::block_groups > 1)>
struct GroupCursor {
    const uint8_t* block;
    int group = 0;

    QUIRE_INLINE void advance() {
        if (++group < Format::block_groups) return;
        group = 0;
        block += Format::block_bytes;
    }
};

template <class Format>
struct GroupCursor<Format, false> {
    const uint8_t* block;
    static constexpr int group = 0;

    QUIRE_INLINE void advance() { block += Format::block_bytes; }
};

template <int Bits, int Group, ScaleType Scale, Codebook Book>
using CodebookFormat = IntFormat<Bits, Group, Scale, false, 0, Book>;

template <Layout Element>
struct FloatFormat {
    static constexpr Layout element = Element;
    static constexpr int element_bytes = Element == Layout::Float32 ? 4 : 2;
};

template <class Visitor>
void visit_codebook(const PackedMatrix& w, const Visitor& visitor) {
    constexpr ScaleType kWide = ScaleType::WideTwoLevel;
    switch (w.codebook) {
        case Codebook::None: return;
        case Codebook::IQ4:
            if (w.scale_type == ScaleType::TwoLevel)
                return visitor.template visit<CodebookFormat<4, 32, ScaleType::TwoLevel, Codebook::IQ4>>();
            return visitor.template visit<CodebookFormat<4, 32, ScaleType::Float16, Codebook::IQ4>>();
        case Codebook::E2M1:
            if (w.group == 16)
                return visitor.template visit<CodebookFormat<4, 16, ScaleType::Float16, Codebook::E2M1>>();
            return visitor.template visit<CodebookFormat<4, 32, ScaleType::BFloat16, Codebook::E2M1>>();
        case Codebook::IQ1:
            if (w.group == 16) return visitor.template visit<CodebookFormat<3, 16, kWide, Codebook::IQ1>>();
            return visitor.template visit<CodebookFormat<3, 32, kWide, Codebook::IQ1>>();
        case Codebook::IQ2:
            if (w.group == 16) return visitor.template visit<CodebookFormat<3, 16, kWide, Codebook::IQ2>>();
            return visitor.template visit<CodebookFormat<3, 32, kWide, Codebook::IQ2>>();
        case Codebook::IQ3_XXS: return visitor.template visit<CodebookFormat<4, 32, kWide, Codebook::IQ3_XXS>>();
        case Codebook::IQ3_S: return visitor.template visit<CodebookFormat<4, 32, kWide, Codebook::IQ3_S>>();
        case Codebook::NF4: return visitor.template visit<CodebookFormat<4, 32, ScaleType::Float32, Codebook::NF4>>();
        case Codebook::FP4: return visitor.template visit<CodebookFormat<4, 32, ScaleType::Float32, Codebook::FP4>>();
    }
}

// Calls visitor.visit<Format>() for the format of this matrix.
template <class Visitor>
void visit_format(const PackedMatrix& w, const Visitor& visitor) {
    const bool wide = w.scale_type == ScaleType::Float32;
    switch (w.layout) {
        case Layout::Float32: return visitor.template visit<FloatFormat<Layout::Float32>>();
        case Layout::Float16: return visitor.template visit<FloatFormat<Layout::Float16>>();
        case Layout::BFloat16: return visitor.template visit<FloatFormat<Layout::BFloat16>>();
        case Layout::Int2:
            if (!w.has_offset) return visitor.template visit<IntFormat<2, 32, ScaleType::Float16, false, 1>>();
            return visitor.template visit<IntFormat<2, 16, ScaleType::TwoLevel, true>>();
        case Layout::Int3: return visitor.template visit<IntFormat<3, 16, ScaleType::TwoLevel, false, 4>>();
        case Layout::Int4:
            if (!w.has_offset) return visitor.template visit<IntFormat<4, 32, ScaleType::Float16, false, 8>>();
            if (wide) return visitor.template visit<IntFormat<4, 32, ScaleType::Float32, true>>();
            if (w.scale_type == ScaleType::ZeroPoint)
                return visitor.template visit<IntFormat<4, 32, ScaleType::ZeroPoint, true>>();
            if (w.scale_type == ScaleType::TwoLevel)
                return visitor.template visit<IntFormat<4, 32, ScaleType::TwoLevel, true>>();
            return visitor.template visit<IntFormat<4, 32, ScaleType::Float16, true>>();
        case Layout::Int5:
            if (!w.has_offset) return visitor.template visit<IntFormat<5, 32, ScaleType::Float16, false, 16>>();
            if (w.scale_type == ScaleType::TwoLevel)
                return visitor.template visit<IntFormat<5, 32, ScaleType::TwoLevel, true>>();
            return visitor.template visit<IntFormat<5, 32, ScaleType::Float16, true>>();
        case Layout::Int6: return visitor.template visit<IntFormat<6, 16, ScaleType::TwoLevel, false, 32>>();
        case Layout::Int8:
            if (wide && w.has_offset) return visitor.template visit<IntFormat<8, 32, ScaleType::Float32, true>>();
            if (wide) return visitor.template visit<IntFormat<8, 32, ScaleType::Float32, false>>();
            if (w.has_offset) return visitor.template visit<IntFormat<8, 32, ScaleType::Float16, true>>();
            return visitor.template visit<IntFormat<8, 32, ScaleType::Float16, false>>();
        case Layout::Codebook3:
        case Layout::Codebook4: return visit_codebook(w, visitor);
    }
}

// The rows of one call of a tile matmul.
struct Block {
    const float* x;  // [rows, num_inputs], rows `stride` floats apart
    int64_t stride;
    const QuantizedGroup* groups;  // group 0 of all rows; the next group is group_stride further on
    int64_t group_stride;
    const Fp16Group* fp16;           // in the same order
    const void* arranged = nullptr;  // the same rows, as arranged by the tiles (matrix_tiles.h)
};

// The factor of the offsets of a group: the sum of its activations.
template <class Format>
QUIRE_INLINE const float* sum_of(const QuantizedGroup& x, int part) {
    return Format::parts == 1 ? &x.sum : &x.half_sums[part];
}

template <class Format>
QUIRE_INLINE int32_t quant_sum_of(const QuantizedGroup& x, int part) {
    return Format::parts == 1 ? x.quant_sum : x.half_quant_sums[part];
}

}  // namespace
}  // namespace quire::QUIRE_ISA
