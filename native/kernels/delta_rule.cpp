// Linear attention with a state, and the decays of its states. They are specified in scan.h.

#include "inline.h"
#include "scan.h"
#include "softplus.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

namespace {

constexpr int kVectors = 4;  // of columns that are in registers at once

// One token, for N vectors of columns. `read` and `write` take whole vectors, or the part of one at the end of a row.
template <int N, class Read, class Write>
QUIRE_INLINE void step(const DeltaTokens& d, int64_t t, const float* v, float* state, float* out, const Read& read,
                       const Write& write) {
    const float *q = d.q.base + t * d.q.stride, *k = d.k.base + t * d.k.stride;
    const float* decays = d.decay.base + t * d.decay.stride;
    Floats added[N], sums[N];
    QUIRE_UNROLL
    for (int j = 0; j < N; ++j) added[j] = read(v + j * kLanes);
    if (d.beta.base) {
        QUIRE_UNROLL
        for (int j = 0; j < N; ++j) sums[j] = splat(0.0f);
        const float* row = state;
        for (int64_t i = 0; i < d.key_dim; ++i, row += d.stride) {
            const Floats key = splat(k[i]), decay = splat(decays[i * d.decay_step]);
            QUIRE_UNROLL
            for (int j = 0; j < N; ++j) sums[j] = multiply_add(read(row + j * kLanes) * decay, key, sums[j]);
        }
        const Floats beta = splat(d.beta.base[t * d.beta.stride]);
        QUIRE_UNROLL
        for (int j = 0; j < N; ++j) added[j] = (added[j] - sums[j]) * beta;
    }
    QUIRE_UNROLL
    for (int j = 0; j < N; ++j) sums[j] = splat(0.0f);
    float* row = state;
    for (int64_t i = 0; i < d.key_dim; ++i, row += d.stride) {
        const Floats key = splat(k[i]), query = splat(q[i]), decay = splat(decays[i * d.decay_step]);
        QUIRE_UNROLL
        for (int j = 0; j < N; ++j) {
            const Floats next = multiply_add(added[j], key, read(row + j * kLanes) * decay);
            write(row + j * kLanes, next);
            sums[j] = multiply_add(next, query, sums[j]);
        }
    }
    QUIRE_UNROLL
    for (int j = 0; j < N; ++j) write(out + j * kLanes, sums[j]);
}

// All tokens, for the columns from `first` on: a part of the state that stays in the L1 cache.
template <int N, class Read, class Write>
void columns(const DeltaTokens& d, int64_t first, const Read& read, const Write& write) {
    for (int64_t t = 0; t < d.count; ++t)
        step<N>(d, t, d.v.base + t * d.v.stride + first, d.state + first, d.out + t * d.out_stride + first, read,
                write);
}

QUIRE_INLINE Floats decayed(Floats x, Floats bias, Floats rate) { return exp(splat(0.0f) - rate * softplus(x + bias)); }

}  // namespace

void delta_rule(const DeltaTokens& d) {
    const auto read = [](const float* p) QUIRE_INLINED { return load(p); };
    const auto write = [](float* p, Floats x) QUIRE_INLINED { store(p, x); };
    int64_t c = 0;
    for (; c + kVectors * kLanes <= d.size; c += kVectors * kLanes) columns<kVectors>(d, c, read, write);
    for (; c + kLanes <= d.size; c += kLanes) columns<1>(d, c, read, write);
    const int64_t rest = d.size - c;
    if (rest)
        columns<1>(
            d, c, [rest](const float* p) { return load_part(p, rest); },
            [rest](float* p, Floats x) { store_part(p, x, rest); });
}

void decay(const float* x, const float* bias, const float* rate, int64_t n, float* out) {
    const int64_t whole = n / kLanes * kLanes, rest = n - whole;
    for (int64_t i = 0; i < whole; i += kLanes) store(out + i, decayed(load(x + i), load(bias + i), load(rate + i)));
    if (!rest) return;
    const auto part = [&](const float* p) { return load_part(p + whole, rest); };
    store_part(out + whole, decayed(part(x), part(bias), part(rate)), rest);
}

}  // namespace quire::QUIRE_ISA
