// Partial softmaxes: m, l and acc of the splits of a context, and their merge.
#pragma once

#include <math.h>

#include "activation.h"
#include "ops.h"
#include "vec.h"

namespace quire::QUIRE_ISA {
namespace {

// The partial softmax of the queries of a tile: of one split, or of all splits merged so far.
struct PartialSoftmax {
    float* data;
    int64_t value_dim;

    int64_t stride() const { return partial_floats(value_dim); }
    float* acc(int i) const { return data + i * stride(); }
    float& m(int i) const { return acc(i)[round_up(value_dim)]; }      // -inf: the query sees no slot
    float& l(int i) const { return acc(i)[round_up(value_dim) + 1]; }  // the sum of weights
};

// Merges the partial softmax of the next split into `merged`.
void merge(const PartialSoftmax& merged, const PartialSoftmax& next, int num_queries) {
    const int64_t value_dim = merged.value_dim;
    for (int first = 0; first < num_queries; first += kLanes) {
        const int end = num_queries - first < kLanes ? num_queries : first + kLanes;
        float m_old[kLanes] = {}, m_next[kLanes] = {}, m_new[kLanes], alphas[kLanes], betas[kLanes];
        for (int i = first; i < end; ++i) m_old[i - first] = merged.m(i), m_next[i - first] = next.m(i);
        store(m_new, max(load(m_old), load(m_next)));
        Floats factors[] = {load(m_old) - load(m_new), load(m_next) - load(m_new)};
        exp2_each(factors);
        store(alphas, factors[0]);
        store(betas, factors[1]);
        for (int i = first; i < end; ++i) {
            if (m_next[i - first] == -INFINITY) continue;
            const float alpha = alphas[i - first], beta = betas[i - first], *from = next.acc(i);
            float* to = merged.acc(i);
            for (int64_t d = 0; d < value_dim; d += kLanes)
                store(to + d, multiply_add(splat(beta), load(from + d), load(to + d) * splat(alpha)));
            merged.l(i) = merged.l(i) * alpha + next.l(i) * beta;
            merged.m(i) = m_new[i - first];
        }
    }
}

void finish(const AttentionTile& t, const PartialSoftmax& merged) {
    for (int i = 0; i < t.num_queries; ++i) {
        float l = merged.l(i);
        if (t.has_sinks) {
            float sink_weight[kLanes];
            store(sink_weight, exp2(splat(t.sink[i] * kLog2e - merged.m(i))));
            l += sink_weight[0];
        }
        const float inverse = 1.0f / l;
        for (int64_t d = 0; d < merged.value_dim; ++d) t.out[i][d] = merged.acc(i)[d] * inverse;
    }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
