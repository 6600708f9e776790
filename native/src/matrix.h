// Weight matrices, packed for the vector unit, and their products with rows of activations.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

enum class Storage : int { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K };

// How a packed matrix is laid out. Outputs come in tiles; within a tile, inputs run fastest in the order the kernels read.
enum class Layout : int { Int4, Int8, Float16, BFloat16, Float32 };

struct PackedMatrix {
    Layout layout;
    int64_t num_outputs, num_inputs;
    int group;            // inputs that share a scale (integer layouts)
    const uint8_t* data;  // owned by whoever packed it
    size_t nbytes;
};

// Rows of activations as a linear layer wants them: quantized in groups for integer layouts, as they are for float ones.
struct Activations {
    const float* x;  // [rows, num_inputs], stride in floats
    int64_t stride;
    int8_t* codes;  // [rows, num_inputs], filled by quantize
    float* scales;  // [rows, num_inputs / 32]
    float* sums;    // [rows, num_inputs / 16]: scale times the sum of the codes of each half group
};

struct MatrixKernels {
    // Quantize rows [first, last): 8-bit codes in groups of 32, scale = max |x| / 127.
    void (*quantize)(const Activations& a, int64_t num_inputs, int64_t first, int64_t last);
    // out[r, o] = sum over inputs of x[r] * w[o], for rows [0, rows) and this thread's share of the outputs.
    void (*multiply)(const PackedMatrix& w, const Activations& a, int64_t rows, float* out, int64_t out_stride, int thread,
                     int num_threads);
};

}  // namespace quire
