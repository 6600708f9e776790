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
    const int64_t count = end - first, start = context_len - count;
    if (count == 0 || columns_.first == columns_.last) return;
    const auto state_at = [&](int64_t position) {
        return pages_.conv_state(block_table[position / pages_.block_size], layer_) + columns_.first;
    };
    const float* before = start > 0 && weights_.taps > 1 ? state_at(start - 1) : nullptr;
    convolve(first, count, before);
    // The last state first: the one that takes the place of `before` may be written when no other needs that.
    for (int64_t i = count - 1; i >= 0; --i)
        if (i == count - 1 || (start + i + 1) % pages_.block_size == 0)
            write_state(first, i, before, state_at(start + i));
}

void ConvRunner::run(const SegmentedStates& s) const {
    if (columns_.first == columns_.last) return;
    const auto state_in = [&](int64_t slot) { return s.states.conv(slot, layer_) + weights_.first + columns_.first; };
    int64_t first = 0;
    for (const Segment* segment = s.segments; segment < s.segments + s.num_segments; ++segment) {
        const float* before = segment->source < 0 ? nullptr : state_in(segment->source);
        convolve(first, segment->end - first, before);
        write_state(first, segment->end - first - 1, before, state_in(segment->target));
        first = segment->end;
    }
}

void ConvRunner::convolve(int64_t first, int64_t count, const float* before) const {
    const float* inputs[kMaxTaps];
    const float* bias = weights_.bias ? weights_.bias + columns_.first : nullptr;
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t tap = 0; tap < weights_.taps; ++tap)
            inputs[tap] = input(first, i - weights_.taps + 1 + tap, before);
        kernels().ops.causal_conv(inputs, weights_.weight + columns_.first, weights_.channels, bias, weights_.taps,
                                  columns_.last - columns_.first, out_.at(first + i) + columns_.first);
    }
}

// The rows of a state come from rows behind them, so they are copied in order: `state` may be `before`.
void ConvRunner::write_state(int64_t first, int64_t i, const float* before, float* state) const {
    const int64_t rows = weights_.taps - 1, n = columns_.last - columns_.first;
    for (int64_t row = 0; row < rows; ++row, state += weights_.state_channels) {
        const float* from = input(first, i - rows + 1 + row, before);
        if (from)
            std::copy_n(from, n, state);
        else
            std::fill_n(state, n, 0.0f);
    }
}

}  // namespace quire
