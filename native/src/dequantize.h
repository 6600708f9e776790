// The storage types of checkpoints, and their dequantization.
#pragma once

#include <cstdint>

#include "matrix.h"

namespace quire {

enum class Storage : int {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    TQ1_0,
    TQ2_0,
    NVFP4,
    Q4_Z,
    Q4_F,
    Q8_F,
    Q8_M,
    NF4,
    FP4,
    F8_E4M3,
    F8_E5M2,
    FP8
};
constexpr int kNumStorages = int(Storage::FP8) + 1;

// A row of a storage type is a sequence of blocks. Quantized weights come in groups: w = scale * q + offset or, with a
// codebook, w = scale * codebook[q]. With zero points (ScaleType), the offset is in units of the scale. With two
// levels, scales and offsets are sub-scales and sub-offsets times one super-scale and one super-offset per block of
// 256.
struct StorageInfo {
    const char* name;
    Storage storage;
    int block;  // weights in a block; 1 for floats without a scale
    int block_bytes;
    int group;                 // weights that share a scale; 0 for floats
    int min_quant, max_quant;  // of q
    ScaleType scale_type;      // holds scales and offsets exactly
    bool has_offset;
    Codebook codebook;
};

const StorageInfo& storage_info(Storage storage);
const StorageInfo* find_storage(const char* name);  // null if there is none

// One decoded block of a quantized type.
struct DecodedBlock {
    int8_t quants[256];
    float scales[16];   // of each group
    float offsets[16];  // set if the type has offsets
    // If scales have two levels: scales[g] = super_scale * sub_scales[g], offsets[g] = super_offset * sub_offsets[g].
    // The super-scales are exact in fp16, unless the type is wide.
    float super_scale, super_offset;
    int8_t sub_scales[16], sub_offsets[16];
};

// Computes the scales of the first `groups` groups from the super-scale and the sub-scales.
void multiply_sub_scales(int groups, DecodedBlock& out);

using DecodeBlock = void (*)(const uint8_t* block, DecodedBlock& out);
DecodeBlock block_decoder(Storage storage);  // the type must be quantized

// The n weights of one row, as fp32. n is a multiple of the type's block.
void dequantize_row(Storage storage, const uint8_t* row, float* out, int64_t n);

}  // namespace quire
