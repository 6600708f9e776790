// Many rows of floats with NEON: a panel of fp32 weights.
#pragma once

#include "matrix_tiles.h"
#include "matrix_vector.h"

namespace quire::QUIRE_ISA {
namespace {

// Tiles of floats, as fp32: converting fp16 takes longer than multiplying with it.
template <Layout Element>
struct Unpacked<FloatFormat<Element>> {
    using Floats = InPlace<FloatFormat<Layout::Float32>>;
    static constexpr int max_rows = Floats::max_rows;

    static int64_t tile_bytes(const PackedMatrix& w) { return w.num_inputs * kTileOutputs * 4; }

    static const uint8_t* load_tiles(const PackedMatrix& w, int64_t first_tile, int64_t last_tile, uint8_t* panel) {
        const uint8_t* from = w.data + first_tile * w.tile_bytes();
        for (int64_t i = 0; i < (last_tile - first_tile) * w.num_inputs * kTileOutputs; i += Simd::lanes)
            Simd::store((float*)panel + i, load_weights<Element>(from + i * FloatFormat<Element>::element_bytes));
        return panel;
    }

    template <int Rows>
    static constexpr auto multiply = Floats::template multiply<Rows>;
};

template <>
struct Unpacked<FloatFormat<Layout::Float32>> : InPlace<FloatFormat<Layout::Float32>> {};

}  // namespace
}  // namespace quire::QUIRE_ISA
