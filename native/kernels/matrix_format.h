// The formats of packed matrices, as types that kernels are instantiated with. Layouts: native/src/matrix.h.
#pragma once

#include "inline.h"
#include "matrix_kernels.h"

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
