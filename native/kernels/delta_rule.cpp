// Linear attention with a state, and the decays of its states. They are specified in scan.h.

#include "activation.h"
#include "inline.h"
#include "scan.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

namespace {

// Vectors of columns that are in registers at once: for one token, whose state comes from memory, and for several.
constexpr int kWide = 4, kVectors = 32 / kLanes;
// Several tokens run on a copy of their columns, side by side: rows of a state are a power of two apart, and would
// share a few lines of the L1 cache.
constexpr int64_t kMinCopied = 4, kMaxCopiedRows = 256;

template <int N>
QUIRE_INLINE void clear(Floats (&x)[N]) {
    QUIRE_UNROLL
    for (int j = 0; j < N; ++j) x[j] = splat(0.0f);
}

// N vectors of columns of a state. `read` and `write` take whole vectors, or the part of one at the end of a row.
template <int N, class Read, class Write>
struct Columns {
    const DeltaTokens& d;
    const Read& read;
    const Write& write;
    float* state;
    int64_t stride;

    const float* keys(int64_t t) const { return d.k.base + t * d.k.stride; }
    const float* decays(int64_t t) const { return d.decay.base + t * d.decay.stride; }

    // sums = k . (decay * state) of token t.
    QUIRE_INLINE void recall(int64_t t, Floats (&sums)[N]) const {
        clear(sums);
        const float *k = keys(t), *decay = decays(t), *row = state;
        for (int64_t i = 0; i < d.key_dim; ++i, row += stride) {
            const Floats key = splat(k[i]), kept = splat(decay[i * d.decay_step]);
            QUIRE_UNROLL
            for (int j = 0; j < N; ++j) sums[j] = multiply_add(read(row + j * kLanes) * kept, key, sums[j]);
        }
    }

    // state = decay * state + k added^T of token t, and sums = q . state. If another token follows (`More`), what it
    // recalls of the state is summed on the way, as `recall` would.
    template <bool More>
    QUIRE_INLINE void update(int64_t t, const Floats (&added)[N], Floats (&sums)[N], Floats (&recalled)[N]) const {
        clear(sums);
        clear(recalled);
        const float *q = d.q.base + t * d.q.stride, *k = keys(t), *decay = decays(t);
        const float *next_k = keys(t + More), *next_decay = decays(t + More);
        float* row = state;
        for (int64_t i = 0; i < d.key_dim; ++i, row += stride) {
            const Floats key = splat(k[i]), query = splat(q[i]), kept = splat(decay[i * d.decay_step]);
            const Floats next_key = splat(next_k[i]), next_kept = splat(next_decay[i * d.decay_step]);
            QUIRE_UNROLL
            for (int j = 0; j < N; ++j) {
                const Floats next = multiply_add(added[j], key, read(row + j * kLanes) * kept);
                write(row + j * kLanes, next);
                sums[j] = multiply_add(next, query, sums[j]);
                if constexpr (More) recalled[j] = multiply_add(next * next_kept, next_key, recalled[j]);
            }
        }
    }

    QUIRE_INLINE void run(int64_t first) const {
        Floats recalled[N], added[N], sums[N];
        clear(recalled);
        if (d.beta.base) recall(0, recalled);
        for (int64_t t = 0; t < d.count; ++t) {
            const float* v = d.v.base + t * d.v.stride + first;
            QUIRE_UNROLL
            for (int j = 0; j < N; ++j) added[j] = read(v + j * kLanes);
            if (d.beta.base) {
                const Floats beta = splat(d.beta.base[t * d.beta.stride]);
                QUIRE_UNROLL
                for (int j = 0; j < N; ++j) added[j] = (added[j] - recalled[j]) * beta;
            }
            if (d.beta.base && t + 1 < d.count)
                update<true>(t, added, sums, recalled);
            else
                update<false>(t, added, sums, recalled);
            float* out = d.out + t * d.out_stride + first;
            QUIRE_UNROLL
            for (int j = 0; j < N; ++j) write(out + j * kLanes, sums[j]);
        }
    }
};

// All tokens, for N vectors of columns from `first` on.
template <int N, class Read, class Write>
void run_columns(const DeltaTokens& d, int64_t first, const Read& read, const Write& write) {
    float* const stored = d.state + first;
    if (d.count < kMinCopied || d.key_dim > kMaxCopiedRows)
        return Columns<N, Read, Write>{d, read, write, stored, d.stride}.run(first);
    alignas(64) float copy[kMaxCopiedRows * N * kLanes];
    for (int64_t i = 0; i < d.key_dim; ++i)
        for (int j = 0; j < N; ++j) store(copy + (i * N + j) * kLanes, read(stored + i * d.stride + j * kLanes));
    Columns<N, Read, Write>{d, read, write, copy, N * kLanes}.run(first);
    for (int64_t i = 0; i < d.key_dim; ++i)
        for (int j = 0; j < N; ++j) write(stored + i * d.stride + j * kLanes, load(copy + (i * N + j) * kLanes));
}

QUIRE_INLINE Floats decayed(Floats x, Floats bias, Floats rate) { return exp(splat(0.0f) - rate * softplus(x + bias)); }

}  // namespace

void delta_rule(const DeltaTokens& d) {
    const auto read = [](const float* p) QUIRE_INLINED { return load(p); };
    const auto write = [](float* p, Floats x) QUIRE_INLINED { store(p, x); };
    int64_t c = 0;
    if (d.count < kMinCopied)
        for (; c + kWide * kLanes <= d.size; c += kWide * kLanes) run_columns<kWide>(d, c, read, write);
    for (; c + kVectors * kLanes <= d.size; c += kVectors * kLanes) run_columns<kVectors>(d, c, read, write);
    for (; c + kLanes <= d.size; c += kLanes) run_columns<1>(d, c, read, write);
    const int64_t rest = d.size - c;
    if (rest)
        run_columns<1>(
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
