// Kernels of recurrences: some tokens of a sequence, one after the other, for a part of a state.
#pragma once

#include <cstdint>

namespace quire {

// Consecutive tokens of a value: the row of token t begins at base + t * stride.
struct TokenRows {
    const float* base;
    int64_t stride;
};

// Some tokens of one head of Mamba 2.
struct Mamba2Tokens {
    int64_t count;
    TokenRows x, b, c;                 // [head_dim], [columns], [columns]
    const float *deltas, *decays;      // [count]
    float skip;
    int64_t columns, head_dim;
    float* state;  // [columns, head_dim]
    float* out;    // [head_dim] each, out_stride apart
    int64_t out_stride;
};

// Some tokens of `size` neighbouring channels of Mamba.
struct MambaTokens {
    int64_t count;
    TokenRows x, dt, b, c;  // [size], [size], [columns], [columns]
    const float *a, *skip;  // [columns, size] with rows `stride` apart, [size]
    int64_t columns, size;
    int64_t stride;  // from one column of `a`, or of `state`, to the next
    float* state;
    float* out;  // [size] each, out_stride apart
    int64_t out_stride;
};

struct ScanKernels {
    // For each token: state = decay * state + (delta * b) x^T, and out = c^T state + skip * x. The sum runs over columns
    // in order.
    void (*mamba2)(const Mamba2Tokens& tokens);
    // For each token, with delta = softplus(dt): state = exp(a * delta) * state + b * (delta * x), and out = the sum of
    // c * state over columns in order, and skip * x.
    void (*mamba)(const MambaTokens& tokens);
};

}  // namespace quire
