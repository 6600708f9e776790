#include "wkv7.h"

#include <algorithm>
#include <cmath>

namespace quire {

namespace {

constexpr float kFastestDecay = 0.606530659713f;  // exp(-0.5)
constexpr float kMinLength = 1e-12f;              // of a key that is normed

// What the recurrence reads of a token, for one head.
struct HeadToken {
    float decay[kMaxWkvDim], recall[kMaxWkvDim], erase[kMaxWkvDim], key[kMaxWkvDim];
    float bonus;  // of the value

    HeadToken(const Wkv7Weights& weights, int64_t column, const float* r, const float* w, const float* k,
              const float* a) {
        const int64_t n = weights.head_dim;
        const float *scale = weights.remove_scale + column, *learn = weights.learn_scale + column;
        float squares = 0.0f;
        bonus = 0.0f;
        for (int64_t i = 0; i < n; ++i) {
            decay[i] = std::exp(-kFastestDecay / (1.0f + std::exp(-w[i])));
            recall[i] = k[i] * scale[i];
            squares += recall[i] * recall[i];
            key[i] = k[i] * (1.0f + (a[i] - 1.0f) * learn[i]);
            bonus += r[i] * key[i] * weights.bonus[column + i];
        }
        const float length = std::max(std::sqrt(squares), kMinLength);
        for (int64_t i = 0; i < n; ++i) {
            recall[i] /= length;
            erase[i] = recall[i] * a[i];
        }
    }
};

// out = norm(out) + bonus * v, of one head.
void finish(const Wkv7Weights& weights, int64_t column, float bonus, const float* v, float* out) {
    const int64_t n = weights.head_dim;
    float mean = 0.0f, variance = 0.0f;
    for (int64_t i = 0; i < n; ++i) mean += out[i];
    mean /= float(n);
    for (int64_t i = 0; i < n; ++i) variance += (out[i] - mean) * (out[i] - mean);
    const float scale = 1.0f / std::sqrt(variance / float(n) + weights.eps);
    for (int64_t i = 0; i < n; ++i)
        out[i] = (out[i] - mean) * scale * weights.norm[column + i] + weights.norm_bias[column + i] + bonus * v[i];
}

}  // namespace

void wkv7(const SegmentedStates& s, const Wkv7Weights& weights, Rows r, Rows w, Rows k, Rows v, Rows a, Rows out,
          const ThreadPool& pool) {
    const int64_t n = weights.head_dim;
    const auto [first_head, last_head] = pool.share(weights.heads);
    const auto run_head = [&](int64_t head, int64_t first, int64_t end, const float* source, float* target) {
        const int64_t column = head * n, offset = head * n * n;
        float* const state = target + offset;
        if (!source)
            std::fill_n(state, n * n, 0.0f);
        else if (source != target)
            std::copy_n(source + offset, n * n, state);
        for (int64_t t = first; t < end; ++t) {
            const float *query = r.at(t) + column, *value = v.at(t) + column;
            const HeadToken token(weights, column, query, w.at(t) + column, k.at(t) + column, a.at(t) + column);
            float* const row = out.at(t) + column;
            kernels().scan.wkv7({query, token.decay, token.recall, token.erase, token.key, value, n, n, state, row});
            finish(weights, column, token.bonus, value, row);
        }
    };
    for_each_segment(s.states, s.segments, s.num_segments, s.layer, 0,
                     [&](int64_t first, int64_t end, const float* source, float* target) {
                         for (int64_t head = first_head; head < last_head; ++head)
                             run_head(head, first, end, source, target);
                     });
}

}  // namespace quire
