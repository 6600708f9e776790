// Causal convolutions over the tokens of a sequence, each column by itself.
//
// The inputs before the step are the state in the block of the position before the step. The state after a block's last
// position, and after the step's last, is written into the block of that position: so a prefix that ends with a block
// has its state beside its keys and values. In models with state slots, the states are there.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "mamba.h"
#include "moe.h"
#include "thread_pool.h"

namespace quire {

struct ConvWeights {
    const float* weight;  // [taps, channels], the oldest tap first
    const float* bias;    // [channels], or null
    int64_t taps, channels;
    int64_t first, state_channels;  // the convolution's columns of a state slot begin at `first`, of `state_channels`
};

// One convolution of a step. Threads take columns: each reads and writes the states of its own. Sequences must be run
// in their order in the step, since one may continue a block that another before it fills in this step.
class ConvRunner {
 public:
    ConvRunner(const Pages& pages, int64_t layer, const ConvWeights& weights, Rows x, Rows out, const ThreadPool& pool);

    // Tokens [first, end) of the step are the last of `context_len` tokens of a sequence.
    void run(int64_t first, int64_t end, int64_t context_len, const int32_t* block_table) const;

    // All segments of a step, with states in slots.
    void run(const SegmentedStates& s) const;

 private:
    // The input of token first + i. Those before the step are in the state `before`; null: they are zeros.
    const float* input(int64_t first, int64_t i, const float* before) const {
        if (i >= 0) return x_.at(first + i) + columns_.first;
        return before ? before + (weights_.taps - 1 + i) * weights_.state_channels : nullptr;
    }
    void convolve(int64_t first, int64_t count, const float* before) const;
    // The state after token first + i.
    void write_state(int64_t first, int64_t i, const float* before, float* state) const;

    const Pages& pages_;
    const int64_t layer_;
    const ConvWeights& weights_;
    const Rows x_, out_;
    Range columns_;  // of this thread
};

}  // namespace quire
