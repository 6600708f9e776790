// A few columns of an int8 matrix times a few inputs, for outliers. Compilers vectorize the loops over the outputs of a
// tile.
#pragma once

#include "fp16.h"
#include "matrix_format.h"

namespace quire::QUIRE_ISA {
namespace {

template <class Format>
QUIRE_INLINE void load_scales(const uint8_t* block, float (&scales)[kTileOutputs]) {
    if constexpr (Format::scale_type == ScaleType::Float32) {
        __builtin_memcpy(scales, Format::scales(block, 0, 0), sizeof scales);
    } else {
        uint16_t fp16[kTileOutputs];
        __builtin_memcpy(fp16, Format::scales(block, 0, 0), sizeof fp16);
        for (int o = 0; o < kTileOutputs; ++o) scales[o] = fp16_to_float(fp16[o]);
    }
}

// sums[o] += x * w[o, column], for the 16 outputs of a tile.
template <class Format>
QUIRE_INLINE void add_column(const uint8_t* tile, int32_t column, float x, float (&sums)[kTileOutputs]) {
    const uint8_t* block = tile + column / kGroupInputs * Format::block_bytes;
    float scales[kTileOutputs];
    uint32_t quads[kTileOutputs];  // four inputs of an output
    load_scales<Format>(block, scales);
    __builtin_memcpy(quads, Format::quants(block, 0) + column % kGroupInputs / 4 * Format::plane_row, sizeof quads);
    const int above = 24 - column % 4 * 8;  // bits
    for (int o = 0; o < kTileOutputs; ++o)
        sums[o] = __builtin_fmaf(float(int32_t(quads[o] << above) >> 24) * scales[o], x, sums[o]);
}

template <class Format>
void add_columns(const PackedMatrix& w, const int32_t* columns, const float* x, int64_t count, int64_t first,
                 int64_t last, float* out) {
    const int64_t tile_bytes = w.num_inputs / kGroupInputs * Format::block_bytes;
    for (int64_t t = first; t < last; ++t) {
        const int64_t outputs = w.num_outputs - t * kTileOutputs;
        float* to = out + t * kTileOutputs;
        float sums[kTileOutputs] = {};
        if (outputs >= kTileOutputs)
            __builtin_memcpy(sums, to, sizeof sums);
        else
            __builtin_memcpy(sums, to, size_t(outputs) * sizeof(float));
        for (int64_t i = 0; i < count; ++i) add_column<Format>(w.data + t * tile_bytes, columns[i], x[i], sums);
        if (outputs >= kTileOutputs)
            __builtin_memcpy(to, sums, sizeof sums);
        else
            __builtin_memcpy(to, sums, size_t(outputs) * sizeof(float));
    }
}

void add_columns(const PackedMatrix& w, const int32_t* columns, const float* x, int64_t count, int64_t first,
                 int64_t last, float* out) {
    if (w.scale_type == ScaleType::Float32)
        add_columns<IntFormat<8, 32, ScaleType::Float32, false>>(w, columns, x, count, first, last, out);
    else
        add_columns<IntFormat<8, 32, ScaleType::Float16, false>>(w, columns, x, count, first, last, out);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
