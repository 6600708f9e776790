// Attention to pages of floats: fp16, bf16 or fp32. Keys become fp32; values are weighed as `Weighing` says.
#pragma once

#include "attention_state.h"

namespace quire::QUIRE_ISA {
namespace {

// The arithmetic of weights times values, for values of type T. Halves are multiplied and added as halves where the CPU
// can: up to 64 slots of them, whose sum then joins the others in fp32. Weights are at most 1, so this loses no more
// than a few units in the last place of a half.
constexpr int64_t kSlotsAtOnce = 64;

template <class T>
struct Weighing {
    using Weight = float;
    using Sum = F8;
    static Sum zero() { return splat(0.0f); }
    static F8 load_values(const T* p) { return load(p); }
    static F8 load_values(const T* p, int64_t n) { return load_part(p, n); }
    static const float* load_weights(const float* p) { return p; }  // of 8 queries
    template <int Query>
    static Sum add(const float* weights, F8 values, Sum sum) {
        return multiply_add(splat(weights[Query]), values, sum);
    }
    static F8 total(Sum sum) { return sum; }
    static F8 weigh(F8 score) { return exp2(score); }
};
#ifdef QUIRE_HALF_MATH
template <>
struct Weighing<Half> {
    using Weight = Half;
    using Sum = H8;
    static Sum zero() { return zero_halves(); }
    static H8 load_values(const Half* p) { return load_halves(p); }
    static H8 load_values(const Half* p, int64_t n) { return to_halves(load_part(p, n)); }
    static H8 load_weights(const Half* p) { return load_halves(p); }
    template <int Query>
    static Sum add(H8 weights, H8 values, Sum sum) {
        return multiply_add<Query>(weights, values, sum);
    }
    static F8 total(Sum sum) { return to_floats(sum); }
    static F8 weigh(F8 score) { return coarse_exp2(score); }
};
#endif

// Few queries alone do not keep the vector unit busy: they take two vectors of slots or of columns at a time.
template <int N>
constexpr int kVectors = N <= 4 ? 2 : 1;

// What will be read soon, a line of each for every head column scored: a head's part of a block is a few kilobytes, too
// short for the CPU to foresee the next one.
template <class T>
struct Ahead {
    const T *keys, *values;
};

// Scores of N queries with C vectors of slots, from `keys` on.
template <int N, int C, class T>
void score_slots(const State& s, const float* q, const T* keys, int64_t stride, int64_t head_dim, int64_t column,
                 Ahead<T> ahead) {
    F8 sums[N * C];
    QUIRE_UNROLL
    for (int j = 0; j < N * C; ++j) sums[j] = splat(0.0f);
    for (int64_t d = 0; d < head_dim; ++d, keys += stride, q += kQueriesAtOnce) {
        if (ahead.keys) {
            __builtin_prefetch(ahead.keys + d * stride);
            __builtin_prefetch(ahead.values + d * stride);
        }
        F8 k[C];
        for (int c = 0; c < C; ++c) k[c] = load(keys + c * kLanes);
        QUIRE_UNROLL
        for (int j = 0; j < N * C; ++j) sums[j] = multiply_add(splat(q[j / C]), k[j % C], sums[j]);
    }
    float* scores = s.scores + column;
    QUIRE_UNROLL
    for (int j = 0; j < N * C; ++j) store(scores + j / C * s.score_stride + j % C * kLanes, sums[j]);
}

// Scores with one block of the span.
template <int N, class T>
void score_block(const State& s, const float* q, const T* keys, int64_t num_slots, int64_t stride, int64_t head_dim,
                 int64_t column, Ahead<T> ahead) {
    constexpr int64_t kWide = kVectors<N> * kLanes;
    int64_t slot = 0;
    for (; slot + kWide <= num_slots; slot += kWide)
        score_slots<N, kVectors<N>>(s, q, keys + slot, stride, head_dim, column + slot, ahead);
    for (; slot < num_slots; slot += kLanes)
        score_slots<N, 1>(s, q, keys + slot, stride, head_dim, column + slot, ahead);
}

// Keys are read from the pages, or where other queries of the tile will read them too, as floats from `s.keys`.
template <int N, class T>
void score(const AttentionTile& t, const State& s, int first, const Span& span, bool shared) {
    const int64_t head_dim = t.pages->head_dim;
    const float* q = s.q + first / kQueriesAtOnce * kQueriesAtOnce * head_dim + first % kQueriesAtOnce;
    const int64_t last_block = t.last[t.num_queries - 1] / span.size;
    const int64_t skipped = span.first_block % attention_span(span.size);  // blocks of the span that nobody here sees
    for (int64_t b = 0; b < span.num_blocks; ++b) {
        const int64_t num_slots = round_up(span.num_slots(b)), column = b * span.padded;
        if (shared) {
            score_block<N>(s, q, s.keys + (skipped + b) * head_dim * span.size, num_slots, span.size, head_dim, column,
                           Ahead<float>{});
            continue;
        }
        const int64_t block = span.first_block + b, next = block < last_block ? block + 1 : last_block;
        const Ahead<T> ahead{(const T*)s.keys_at(next), (const T*)s.values_at(block)};
        score_block<N>(s, q, (const T*)s.keys_at(block), num_slots, span.size, head_dim, column, ahead);
    }
}

// Blocks [first, end) of the span, as floats into `s.keys`.
template <class T>
void convert_keys(const AttentionTile& t, const State& s, int64_t first, int64_t end) {
    const int64_t n = t.pages->head_dim * t.pages->block_size, skipped = first % attention_span(t.pages->block_size);
    float* to = s.keys + skipped * n;
    for (int64_t block = first; block < end; ++block, to += n) {
        const T* keys = (const T*)s.keys_at(block);
        const int64_t whole = n / kLanes * kLanes;
        for (int64_t i = 0; i < whole; i += kLanes) store(to + i, load(keys + i));
        if (whole < n) store_part(to + whole, load_part(keys + whole, n - whole), n - whole);
    }
}

// The weights of N queries, as `accumulate` reads them.
template <int N, class Weight>
void gather(const State& s, const Span& span, Weight* p) {
    F8 rows[kQueriesAtOnce];
    for (int i = N; i < kQueriesAtOnce; ++i) rows[i] = splat(0.0f);
    for (int64_t c = 0; c < span.num_blocks * span.padded; c += kLanes) {
        for (int i = 0; i < N; ++i) rows[i] = load(s.scores + i * s.score_stride + c);
        store_columns(p + c * kQueriesAtOnce, rows);
    }
}

// C vectors of columns from d on: acc = acc * factor + p . values, for up to 64 slots of each block from `begin` on.
// `Whole`: the columns lie within the head.
template <int N, int C, bool Whole, class T>
void accumulate_columns(const AttentionTile& t, const State& s, int first, const Span& span, int64_t begin, int64_t d) {
    using W = Weighing<T>;
    const int64_t head_dim = t.pages->head_dim;
    float* acc = s.acc + first * s.acc_stride + d;
    typename W::Sum sums[N * C];
    QUIRE_UNROLL
    for (int j = 0; j < N * C; ++j) sums[j] = W::zero();
    for (int64_t b = 0; b < span.num_blocks; ++b) {
        const T* values = (const T*)s.values_at(span.first_block + b);
        const auto* p = (const typename W::Weight*)s.p + (b * span.padded + begin) * kQueriesAtOnce;
        const int64_t end = span.num_slots(b) < begin + kSlotsAtOnce ? span.num_slots(b) : begin + kSlotsAtOnce;
        values += begin * head_dim + d;
        for (int64_t slot = begin; slot < end; ++slot, values += head_dim, p += kQueriesAtOnce) {
            decltype(W::load_values(values)) v[C];
            for (int c = 0; c < C; ++c)
                v[c] = Whole ? W::load_values(values + c * kLanes) : W::load_values(values, head_dim - d);
            const auto weights = W::load_weights(p);
            each<N * C>([&](auto j) { sums[j] = W::template add<j / C>(weights, v[j % C], sums[j]); });
        }
    }
    QUIRE_UNROLL
    for (int j = 0; j < N * C; ++j) {
        float* to = acc + j / C * s.acc_stride + j % C * kLanes;
        const float factor = begin == 0 ? s.correction[first + j / C] : 1.0f;
        store(to, multiply_add(load(to), splat(factor), W::total(sums[j])));
    }
}

template <int N, class T>
void accumulate(const AttentionTile& t, const State& s, int first, const Span& span) {
    constexpr int kAtOnce = sizeof(typename Weighing<T>::Weight) == 2 ? 2 * kVectors<N> : kVectors<N>;
    constexpr int64_t kWide = kAtOnce * kLanes;
    const int64_t head_dim = t.pages->head_dim;
    for (int64_t begin = 0; begin < span.num_slots(0); begin += kSlotsAtOnce) {
        int64_t d = 0;
        for (; d + kWide <= head_dim; d += kWide) accumulate_columns<N, kAtOnce, true, T>(t, s, first, span, begin, d);
        for (; d + kLanes <= head_dim; d += kLanes) accumulate_columns<N, 1, true, T>(t, s, first, span, begin, d);
        if (d < head_dim) accumulate_columns<N, 1, false, T>(t, s, first, span, begin, d);
    }
}

template <class T>
void soften_one(const AttentionTile& t, State& s, int query, int i, const Span& span) {
    soften(t, s, query, i, span, Weighing<T>::weigh, [](int64_t, F8, F8 p) { return p; });
}

// Queries [first, first + N), which lie in one vector, meet one span.
template <int N, class T>
void meet(const AttentionTile& t, State& s, int first, const Span& span, bool shared) {
    score<N, T>(t, s, first, span, shared);
    for (int i = 0; i < N; ++i) soften_one<T>(t, s, first + i, i, span);
    gather<N>(s, span, (typename Weighing<T>::Weight*)s.p);
    accumulate<N, T>(t, s, first, span);
}

template <class T>
struct FloatPages {
    static void load_queries(const AttentionTile& t, State& s) {
        const int64_t head_dim = t.pages->head_dim;
        for (int i = 0; i < t.num_queries; ++i) {
            float* q = s.q + i / kQueriesAtOnce * kQueriesAtOnce * head_dim + i % kQueriesAtOnce;
            for (int64_t d = 0; d < head_dim; ++d) q[d * kQueriesAtOnce] = t.q[i][d] * (t.scale * kLog2e);
        }
    }

    static void share_keys(const AttentionTile& t, const State& s, int64_t first_block, int64_t end_block) {
        convert_keys<T>(t, s, first_block, end_block);
    }

    static void visit(const AttentionTile& t, State& s, int first, int stop, const Span& span, bool shared) {
        using Visit = void (*)(const AttentionTile&, State&, int, const Span&, bool);
        static constexpr Visit kVisit[] = {meet<1, T>, meet<2, T>, meet<3, T>, meet<4, T>,
                                           meet<5, T>, meet<6, T>, meet<7, T>, meet<8, T>};
        kVisit[stop - first - 1](t, s, first, span, shared);
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
