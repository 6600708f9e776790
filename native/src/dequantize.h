// The types in which checkpoints store weights, and the values they mean.
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

// A row of a storage type is a run of blocks. Quantized weights come in groups: w = scale * code + offset, or, where
// there is a codebook, w = scale * codebook[code]. With zero points (ScaleType), the offset is a count of scales; with
// two levels, scales and offsets are counts of units, which a block of 256 weights has one of each of.
struct StorageInfo {
    const char* name;
    Storage storage;
    int block;  // weights in a block; 1 for floats, unless they have a scale
    int block_bytes;
    int group;               // weights that share a scale; 0 for floats
    int min_code, max_code;  // of w above
    ScaleType scale_type;    // holds scale and offset, which may be products, exactly
    bool has_offset;
    Codebook codebook;
};

const StorageInfo& storage_info(Storage storage);
const StorageInfo* find_storage(const char* name);  // null if there is no such type

// One block of a quantized type, taken apart.
struct DecodedBlock {
    int8_t codes[256];
    float scales[16];   // one for each group
    float offsets[16];  // set where the type has offsets
    // Where scales have two levels: scales[g] is unit * counts[g], offsets[g] is offset_unit * offset_counts[g]. Units
    // are halves' values, unless they are wide.
    float unit, offset_unit;
    int8_t counts[16], offset_counts[16];
};

// The scales of the first `groups` groups, once their unit and counts are known.
void multiply_levels(int groups, DecodedBlock& out);

using DecodeBlock = void (*)(const uint8_t* block, DecodedBlock& out);
DecodeBlock block_decoder(Storage storage);  // of a quantized type

// The n weights of one row, as fp32. n is a multiple of the type's block.
void dequantize_row(Storage storage, const uint8_t* row, float* out, int64_t n);

}  // namespace quire
