#include "mamba.h"

#include <algorithm>
#include <cmath>

namespace quire {

namespace {

constexpr int64_t kTokensAtOnce = 64;
constexpr float kSoftplusThreshold = 20.0f;  // above it, log(1 + exp(x)) is x

float softplus(float x) { return x > kSoftplusThreshold ? x : std::log1p(std::exp(x)); }

// `count` floats of a state, at the start of a segment.
void begin_state(const float* source, float* target, int64_t count) {
    if (!source)
        std::fill_n(target, count, 0.0f);
    else if (source != target)
        std::copy_n(source, count, target);
}

}  // namespace

void mamba2_scan(const SegmentedStates& s, const Mamba2Weights& w, int64_t head_dim, int64_t groups, int64_t columns,
                 Rows x, Rows dt, Rows b, Rows c, Rows out, const ThreadPool& pool) {
    const auto [first_head, last_head] = pool.share(w.heads);
    const int64_t head_floats = columns * head_dim;
    const auto run_head = [&](int64_t head, int64_t first, int64_t end, float* state) {
        float deltas[kTokensAtOnce], decays[kTokensAtOnce];
        const int64_t group = head / (w.heads / groups) * columns;
        for (int64_t t = first; t < end; t += kTokensAtOnce) {
            const int64_t count = std::min(kTokensAtOnce, end - t);
            for (int64_t i = 0; i < count; ++i) {
                const float delta = softplus(dt.at(t + i)[head] + w.dt_bias[head]);
                deltas[i] = std::min(std::max(delta, w.min_delta), w.max_delta);
                decays[i] = std::exp(w.a[head] * deltas[i]);
            }
            kernels().scan.mamba2({count,
                                   {x.at(t) + head * head_dim, x.stride},
                                   {b.at(t) + group, b.stride},
                                   {c.at(t) + group, c.stride},
                                   deltas,
                                   decays,
                                   w.skip[head],
                                   columns,
                                   head_dim,
                                   state,
                                   out.at(t) + head * head_dim,
                                   out.stride});
        }
    };
    for_each_segment(s.states, s.segments, s.num_segments, s.layer, first_head * head_floats,
                     [&](int64_t first, int64_t end, const float* source, float* target) {
                         for (int64_t head = first_head; head < last_head; ++head) {
                             begin_state(source, target, head_floats);
                             run_head(head, first, end, target);
                             source = source ? source + head_floats : nullptr;
                             target += head_floats;
                         }
                     });
}

void mamba_scan(const SegmentedStates& s, const MambaWeights& w, Rows x, Rows dt, Rows b, Rows c, Rows out,
                const ThreadPool& pool) {
    const auto [first_vector, last_vector] = pool.share(whole_vectors(w.channels) / kMaxLanes);
    const int64_t begin = std::min(first_vector * kMaxLanes, w.channels);
    const int64_t size = std::min(last_vector * kMaxLanes, w.channels) - begin;
    if (size <= 0) return;
    for_each_segment(s.states, s.segments, s.num_segments, s.layer, begin,
                     [&](int64_t first, int64_t end, const float* source, float* target) {
                         for (int64_t column = 0; column < w.columns; ++column) {
                             const int64_t offset = column * w.channels;
                             begin_state(source ? source + offset : nullptr, target + offset, size);
                         }
                         kernels().scan.mamba({end - first,
                                               {x.at(first) + begin, x.stride},
                                               {dt.at(first) + begin, dt.stride},
                                               {b.at(first), b.stride},
                                               {c.at(first), c.stride},
                                               w.a + begin,
                                               w.skip + begin,
                                               w.columns,
                                               size,
                                               w.channels,
                                               target,
                                               out.at(first) + begin,
                                               out.stride});
                     });
}

}  // namespace quire
