// The scores of an indexer. They are specified in index.h.

#include "index.h"

#include "inline.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

namespace {

// The scores of N keys. A query's columns are loaded once for all of them.
template <int N, class T>
void score_keys(const float* q, const float* weights, int64_t heads, int64_t dim, const T* keys, float* scores) {
    float totals[N] = {};
    for (int64_t head = 0; head < heads; ++head, q += dim) {
        Floats sums[N];
        QUIRE_UNROLL
        for (int i = 0; i < N; ++i) sums[i] = splat(0.0f);
        int64_t d = 0;
        for (; d + kLanes <= dim; d += kLanes) {
            const Floats query = load(q + d);
            QUIRE_UNROLL
            for (int i = 0; i < N; ++i) sums[i] = multiply_add(query, load(keys + i * dim + d), sums[i]);
        }
        if (d < dim) {
            const Floats query = load_part(q + d, dim - d);
            for (int i = 0; i < N; ++i) sums[i] = multiply_add(query, load_part(keys + i * dim + d, dim - d), sums[i]);
        }
        for (int i = 0; i < N; ++i) {
            const float dot = sum(sums[i]);
            totals[i] += weights[head] * (dot < 0.0f ? 0.0f : dot);
        }
    }
    for (int i = 0; i < N; ++i) scores[i] = totals[i];
}

template <class T>
void score_all(const float* q, const float* weights, int64_t heads, int64_t dim, const T* keys, int64_t count,
               float* scores) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) score_keys<4>(q, weights, heads, dim, keys + i * dim, scores + i);
    for (; i < count; ++i) score_keys<1>(q, weights, heads, dim, keys + i * dim, scores + i);
}

void scores(PageType type, const float* q, const float* weights, int64_t heads, int64_t dim, const uint8_t* keys,
            int64_t count, float* scores) {
    switch (type) {
        case PageType::Float16: return score_all(q, weights, heads, dim, (const Fp16*)keys, count, scores);
        case PageType::Bfloat16: return score_all(q, weights, heads, dim, (const Bf16*)keys, count, scores);
        case PageType::Float32: return score_all(q, weights, heads, dim, (const float*)keys, count, scores);
        case PageType::Int8: return;  // keys of an indexer are floats
    }
}

}  // namespace

extern const IndexKernels index_kernels;
const IndexKernels index_kernels = {scores};

}  // namespace quire::QUIRE_ISA
