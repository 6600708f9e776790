// Random matrices and activations, the same in every run.
#pragma once

#include <cstdint>
#include <vector>

#include "dequantize.h"

namespace quire::tests {

class Random {
 public:
    explicit Random(uint64_t seed) : state_(seed * 2654435761u + 88172645463325252u) {}
    uint32_t bits() {  // xorshift
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return uint32_t(state_ >> 32);
    }
    float uniform() { return float(int32_t(bits())) * 0x1p-31f; }  // -1 .. 1

 private:
    uint64_t state_;
};

inline int64_t row_bytes(Storage storage, int64_t n) {
    const StorageInfo& info = storage_info(storage);
    return n / info.block * info.block_bytes;
}

// Pointers to each row of `data`.
inline std::vector<const uint8_t*> rows_in(const uint8_t* data, int64_t rows, int64_t bytes) {
    std::vector<const uint8_t*> starts;
    for (int64_t r = 0; r < rows; ++r) starts.push_back(data + r * bytes);
    return starts;
}

// Rows of a storage type: any quantized values, scales near 0.01. Every fifth row repeats one byte: 0x80, 0x7f, 0xff or
// 0.
std::vector<uint8_t> sample_rows(Storage storage, int64_t rows, int64_t n, Random& random);

// Every fifth row is constant, so that its quantized values are all 127 or all -127.
std::vector<float> sample_activations(int64_t rows, int64_t n, Random& random);

}  // namespace quire::tests
