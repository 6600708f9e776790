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
    MXFP4
};
constexpr int kNumStorages = int(Storage::MXFP4) + 1;

// A row of a storage type is a run of blocks. Quantized weights come in groups: w = scale * code + offset, or, where
// there is a codebook, w = scale * codebook[code].
struct StorageInfo {
    const char* name;
    Storage storage;
    int block;  // weights in a block; 1 for floats
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
};

using DecodeBlock = void (*)(const uint8_t* block, DecodedBlock& out);
DecodeBlock block_decoder(Storage storage);  // of a quantized type

// The n weights of one row, as fp32. n is a multiple of the type's block.
void dequantize_row(Storage storage, const uint8_t* row, float* out, int64_t n);

}  // namespace quire
