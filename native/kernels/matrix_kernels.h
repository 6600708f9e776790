// The tile kernels of each format, as tables, for matrix.cpp. Groups of formats have a file each, as they take long to
// compile.
#pragma once

#include "matrix.h"

namespace quire::QUIRE_ISA {

// The rows of one call of a tile kernel.
struct Block {
    const float* x;  // [rows, num_inputs], rows `stride` floats apart
    int64_t stride;
    const QuantizedGroup* groups;  // group 0 of all rows; the next group is group_stride further on
    int64_t group_stride;
    const Fp16Group* fp16;           // in the same order
    const void* arranged = nullptr;  // the same rows, as arranged by TileKernels::arrange
};

constexpr int kMaxBlockRows = 12, kMaxBundle = 2;

// One way to multiply the tiles of a format. Arrays are indexed by the number of rows minus 1.
struct TileKernels {
    int max_rows;                                  // that are multiplied at once
    int64_t bundle;                                // tiles that are multiplied at once: a panel is padded to a multiple
    int64_t (*tile_bytes)(const PackedMatrix& w);  // of a loaded tile
    // The tiles [first, last), one after the other: in place, or unpacked into `panel`.
    const uint8_t* (*load_tiles)(const PackedMatrix& w, int64_t first, int64_t last, uint8_t* panel);
    // out [rows, bundle * kTileOutputs] = rows times a bundle of tiles.
    void (*multiply[kMaxBlockRows])(const uint8_t* tile, const Block& a, int64_t num_inputs, float* out,
                                    int64_t out_stride);
    // Or null: the same for max_rows rows and a packed tile, which is unpacked into `tile` meanwhile.
    void (*unpack_and_multiply)(const uint8_t* packed, uint8_t* tile, const Block& a, int64_t num_inputs, float* out,
                                int64_t out_stride);
    // Or null: copies the rows of a block in the order of the kernel, once for all tiles.
    void (*arrange[kMaxBlockRows])(const Block& a, int64_t num_inputs, void* arranged);
    int64_t (*arranged_bytes)(int64_t num_inputs);
};

struct FormatKernels {
    const TileKernels *in_place, *panel;
    int64_t panel_rows;  // from which on panels are used
};

FormatKernels int4_kernels(const PackedMatrix& w);     // Int4, Codebook4: matrix_int4.cpp
FormatKernels integer_kernels(const PackedMatrix& w);  // other integer layouts: matrix_integers.cpp
FormatKernels float_kernels(const PackedMatrix& w);    // matrix_floats.cpp
void to_fp16(const float* x, int64_t num_inputs, Fp16Group* groups, int64_t stride);  // NEON: matrix_floats.cpp

}  // namespace quire::QUIRE_ISA
