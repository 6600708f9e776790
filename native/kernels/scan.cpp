// Recurrences of Mamba and Mamba 2. They are specified in scan.h.

#include "scan.h"

#include "activation.h"
#include "inline.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

void delta_rule(const DeltaTokens& tokens);  // delta_rule.cpp
void wkv7(const WkvToken& token);            // wkv7.cpp
void decay(const float* x, const float* bias, const float* rate, int64_t n, float* out);

namespace {

// A vector of which only `rest` floats are there, if `Part`. Known when compiled, so that inner loops have no branch.
template <bool Part>
QUIRE_INLINE Floats load_some(const float* p, int64_t rest) {
    if constexpr (Part) return load_part(p, rest);
    return load(p);
}
template <bool Part>
QUIRE_INLINE void store_some(float* p, Floats x, int64_t rest) {
    if constexpr (Part)
        store_part(p, x, rest);
    else
        store(p, x);
}

// N vectors of a head, from column `first` of its output on.
template <int N, bool Part>
void mamba2_part(const Mamba2Tokens& m, int64_t first, int64_t rest) {
    const Floats skip = splat(m.skip);
    for (int64_t t = 0; t < m.count; ++t) {
        const float *b = m.b.base + t * m.b.stride, *c = m.c.base + t * m.c.stride;
        const float* in = m.x.base + t * m.x.stride + first;
        const Floats decay = splat(m.decays[t]);
        Floats x[N], sums[N];
        QUIRE_UNROLL
        for (int i = 0; i < N; ++i) {
            x[i] = load_some<Part>(in + i * kLanes, rest);
            sums[i] = splat(0.0f);
        }
        float* row = m.state + first;
        for (int64_t column = 0; column < m.columns; ++column, row += m.head_dim) {
            const Floats gain = splat(m.deltas[t] * b[column]), weight = splat(c[column]);
            QUIRE_UNROLL
            for (int i = 0; i < N; ++i) {
                const Floats state = multiply_add(decay, load_some<Part>(row + i * kLanes, rest), gain * x[i]);
                store_some<Part>(row + i * kLanes, state, rest);
                sums[i] = multiply_add(weight, state, sums[i]);
            }
        }
        float* out = m.out + t * m.out_stride + first;
        QUIRE_UNROLL
        for (int i = 0; i < N; ++i) store_some<Part>(out + i * kLanes, multiply_add(skip, x[i], sums[i]), rest);
    }
}

void mamba2(const Mamba2Tokens& m) {
    int64_t first = 0;
    for (; first + 4 * kLanes <= m.head_dim; first += 4 * kLanes) mamba2_part<4, false>(m, first, 0);
    for (; first + kLanes <= m.head_dim; first += kLanes) mamba2_part<1, false>(m, first, 0);
    if (first < m.head_dim) mamba2_part<1, true>(m, first, m.head_dim - first);
}

// N columns of the states of a vector of channels; returns `sum` and what they add to the output.
template <int N, bool Part>
QUIRE_INLINE Floats mamba_columns(const MambaTokens& m, int64_t column, int64_t first, int64_t rest, Floats delta,
                                  Floats gain, const float* b, const float* c, Floats sum) {
    const float* a = m.a + column * m.stride + first;
    float* state = m.state + column * m.stride + first;
    Floats decay[N];
    QUIRE_UNROLL
    for (int i = 0; i < N; ++i) decay[i] = load_some<Part>(a + i * m.stride, rest) * delta * splat(kLog2e);
    exp2_each(decay);
    QUIRE_UNROLL
    for (int i = 0; i < N; ++i) {
        const Floats before = load_some<Part>(state + i * m.stride, rest);
        const Floats after = multiply_add(decay[i], before, splat(b[column + i]) * gain);
        store_some<Part>(state + i * m.stride, after, rest);
        sum = multiply_add(splat(c[column + i]), after, sum);
    }
    return sum;
}

// One vector of channels.
template <bool Part>
void mamba_part(const MambaTokens& m, int64_t first, int64_t rest) {
    const auto part = [&](const float* p) QUIRE_INLINED { return load_some<Part>(p + first, rest); };
    for (int64_t t = 0; t < m.count; ++t) {
        const float *b = m.b.base + t * m.b.stride, *c = m.c.base + t * m.c.stride;
        const Floats x = part(m.x.base + t * m.x.stride), delta = softplus(part(m.dt.base + t * m.dt.stride));
        const Floats gain = delta * x;
        Floats sum = splat(0.0f);
        int64_t column = 0;
        for (; column + 4 <= m.columns; column += 4)
            sum = mamba_columns<4, Part>(m, column, first, rest, delta, gain, b, c, sum);
        for (; column < m.columns; ++column)
            sum = mamba_columns<1, Part>(m, column, first, rest, delta, gain, b, c, sum);
        store_some<Part>(m.out + t * m.out_stride + first, multiply_add(part(m.skip), x, sum), rest);
    }
}

void mamba(const MambaTokens& m) {
    int64_t first = 0;
    for (; first + kLanes <= m.size; first += kLanes) mamba_part<false>(m, first, 0);
    if (first < m.size) mamba_part<true>(m, first, m.size - first);
}

}  // namespace

extern const ScanKernels scan_kernels;
const ScanKernels scan_kernels = {mamba2, mamba, delta_rule, wkv7, decay};

}  // namespace quire::QUIRE_ISA
