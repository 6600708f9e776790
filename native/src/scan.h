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
    TokenRows x, b, c;             // [head_dim], [columns], [columns]
    const float *deltas, *decays;  // [count]
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

// Some tokens of one head of linear attention, for `size` neighbouring columns of its state.
struct DeltaTokens {
    int64_t count;
    TokenRows q, k, v;   // [key_dim], [key_dim], [size]
    TokenRows decay;     // of row i of the state: decay[i * decay_step]
    int64_t decay_step;  // 1, or 0: all rows have one decay
    TokenRows beta;      // of the delta rule; its base is null where values are added as they are
    int64_t key_dim, size;
    int64_t stride;  // from one row of the state to the next
    float* state;    // [key_dim, size]
    float* out;      // [size] each, out_stride apart
    int64_t out_stride;
};

// One token of one head of RWKV 7.
struct WkvToken {
    const float *query, *decay, *recall, *erase, *key;  // [key_dim]
    const float* value;                                 // [value_dim]
    int64_t key_dim, value_dim;
    float* state;  // [key_dim, value_dim]
    float* out;    // [value_dim]
};

struct ScanKernels {
    // For each token: state = decay * state + (delta * b) x^T, and out = c^T state + skip * x. The sum runs over
    // columns in order.
    void (*mamba2)(const Mamba2Tokens& tokens);
    // For each token, with delta = softplus(dt): state = exp(a * delta) * state + b * (delta * x), and out = the sum of
    // c * state over columns in order, and skip * x.
    void (*mamba)(const MambaTokens& tokens);
    // For each token: state = decay * state, then state += k (beta * (v - k . state))^T, or += k v^T without a beta,
    // and out = q . state. Both sums run over the rows of the state in order; a column depends on no other.
    void (*delta_rule)(const DeltaTokens& tokens);
    // state = decay * state + key value^T - erase (recall . state)^T, where the last is the state before, and out =
    // query . state. Both sums run over the rows of the state in order; a column depends on no other.
    void (*wkv7)(const WkvToken& token);
    // out = exp(-rate * softplus(x + bias)), [n] each; out may be x.
    void (*decay)(const float* x, const float* bias, const float* rate, int64_t n, float* out);
};

}  // namespace quire
