#include "causal_conv.h"

#include <algorithm>

namespace quire {

ConvRunner::ConvRunner(const Pages& pages, int64_t layer, const ConvWeights& weights, Rows x, Rows out,
                       const ThreadPool& pool)
    : pages_(pages), layer_(layer), weights_(weights), x_(x), out_(out) {
    const auto [first, last] = pool.share(whole_vectors(weights.channels) / kMaxLanes);
    columns_ = {std::min(first * kMaxLanes, weights.channels), std::min(last * kMaxLanes, weights.channels)};
}

void ConvRunner::run(int64_t first, int64_t end, int64_t context_len, const int32_t* block_table) const {
    const int64_t count = end - first, start = context_len - count, rows = weights_.taps - 1;
    const int64_t column = columns_.first, n = columns_.last - columns_.first;
    if (count == 0 || n == 0) return;
    const auto state_at = [&](int64_t position) {
        return pages_.conv_state(block_table[position / pages_.block_size], layer_) + column;
    };
    const float* before = start > 0 && rows > 0 ? state_at(start - 1) : nullptr;
    // The input of token first + i. Those before the step are in the state.
    const auto input = [&](int64_t i) -> const float* {
        if (i >= 0) return x_.at(first + i) + column;
        return before ? before + (rows + i) * weights_.channels : nullptr;
    };
    const float* inputs[kMaxTaps];
    const float* bias = weights_.bias ? weights_.bias + column : nullptr;
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t tap = 0; tap < weights_.taps; ++tap) inputs[tap] = input(i - rows + tap);
        kernels().ops.causal_conv(inputs, weights_.weight + column, weights_.channels, bias, weights_.taps, n,
                                  out_.at(first + i) + column);
    }
    // The last state first: the one that takes the place of `before` may be written when no other needs that. The rows
    // of a state come from rows behind them, so they are copied in order.
    for (int64_t i = count - 1; i >= 0; --i) {
        if (i != count - 1 && (start + i + 1) % pages_.block_size != 0) continue;
        float* state = state_at(start + i);
        for (int64_t row = 0; row < rows; ++row, state += weights_.channels) {
            const float* from = input(i - rows + 1 + row);
            if (from)
                std::copy_n(from, n, state);
            else
                std::fill_n(state, n, 0.0f);
        }
    }
}

}  // namespace quire
