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
    using Sum = Floats;
    static Sum zero() { return splat(0.0f); }
    static Floats load_values(const T* p) { return load(p); }
    static Floats load_values(const T* p, int64_t n) { return load_part(p, n); }
    static Floats total(Sum sum) { return sum; }
    static constexpr auto weigh = [](auto& scores) { exp2_each(scores); };

    // The weights of one query, at a vector of slots.
    using Weights = const float*;
    static Weights load_weights(const float* p) { return p; }
    template <int Slot>
    static Sum add(Weights weights, Floats values, Sum sum) {
        return multiply_add(splat(weights[Slot]), values, sum);
    }
};
#ifdef QUIRE_HALF_MATH
template <>
struct Weighing<Half> {
    using Weight = Half;
    using Sum = Halves;
    static Sum zero() { return zero_halves(); }
    static Halves load_values(const Half* p) { return load_halves(p); }
    static Halves load_values(const Half* p, int64_t n) { return to_halves(load_part(p, n)); }
    static Floats total(Sum sum) { return to_floats(sum); }
    static constexpr auto weigh = [](auto& scores) { coarse_exp2_each(scores); };

    using Weights = Halves;
    static Weights load_weights(const Half* p) { return load_halves(p); }
    template <int Slot>
    static Sum add(Weights weights, Halves values, Sum sum) {
        return multiply_add<Slot>(weights, values, sum);
    }
};
#endif

// The arithmetic of queries times keys, for keys of type T. Halves are again multiplied and added as halves where the
// CPU can: of 32 columns those that are even, and those that are odd, then the two sums, then those of 64 columns; in
// fp32 that joins the others.
// `q` is what load_queries made; a query of it is where `query_at` says.
template <class T>
struct Scoring {
    using Query = float;
    using Sum = Floats;
    static constexpr int kChains = 1;   // sums that are added to in turn
    static constexpr int kColumns = 2;  // of which the queries are loaded at once
    static constexpr int64_t kChained = INT64_MAX, kColumnsAtOnce = INT64_MAX;
    static Sum zero() { return splat(0.0f); }
    static Floats load_keys(const T* p) { return load(p); }
    template <int N>
    struct Queries {
        const float* at;
        Queries(const float* q, int64_t, int64_t column) : at(q + column * kQueriesAtOnce) {}
        template <int Q, int Column>
        Sum add(Floats keys, Sum sum) const {
            return multiply_add(splat(at[Column * kQueriesAtOnce + Q]), keys, sum);
        }
    };
    // [32 / 8, head_dim, 8]
    static float* query_at(void* q, int query, int64_t head_dim) {
        return (float*)q + query / kQueriesAtOnce * kQueriesAtOnce * head_dim + query % kQueriesAtOnce;
    }
    static void store_queries(float* q, int64_t, int64_t column, const Floats (&rows)[kQueriesAtOnce], int) {
        store_columns(q + column * kQueriesAtOnce, rows);
    }
    static Sum join(const Sum* chains) { return chains[0]; }
    static Floats total(Sum sum) { return sum; }
};
#ifdef QUIRE_HALF_MATH
template <>
struct Scoring<Half> {
    using Query = Half;
    using Sum = Halves;
    static constexpr int kColumns = kLanes, kChains = 2;
    static constexpr int64_t kChained = 32, kColumnsAtOnce = 64;
    static Sum zero() { return zero_halves(); }
    static Halves load_keys(const Half* p) { return load_halves(p); }
    template <int N>
    struct Queries {
        Halves rows[N];
        Queries(const Half* q, int64_t head_dim, int64_t column) {
            QUIRE_UNROLL
            for (int i = 0; i < N; ++i) rows[i] = load_halves(query_at(q, i, head_dim) + column);
        }
        template <int Q, int Column>
        Sum add(Halves keys, Sum sum) const {
            return multiply_add<Column>(rows[Q], keys, sum);
        }
    };
    // [32, head_dim and up to 15 more]
    static Half* query_at(const void* q, int query, int64_t head_dim) {
        return (Half*)q + query * (round_up(head_dim) + kLanes);
    }
    static void store_queries(Half* q, int64_t head_dim, int64_t column, const Floats (&rows)[kQueriesAtOnce],
                              int count) {
        for (int i = 0; i < count; ++i) store(query_at(q, i, head_dim) + column, rows[i]);
    }
    static Sum join(const Sum* chains) { return chains[0] + chains[1]; }
    static Floats total(Sum sum) { return to_floats(sum); }
};
#endif

// Few queries alone do not keep the vector unit busy: they take two vectors of slots at a time. Columns of values
// likewise, and AVX-512 has registers for twice as many of both.
template <int N>
constexpr int kVectors = (N <= 4 ? 2 : 1) * (kLanes == 16 ? 2 : 1);
template <int N, class T>
constexpr int kColumnVectors = kVectors<N> * (sizeof(typename Weighing<T>::Weight) == 2 ? 2 : 1);

template <class T>
constexpr bool kInHalves = sizeof(typename Scoring<T>::Query) == 2;

// Of blocks and heads: where halves are multiplied, addresses take no instructions of their own if these are constants.
constexpr int64_t kUsualSize = 16, kUsualDim = 64;

// A branch in the loop over columns of halves makes many queries, a prefill's, a fifth slower, and few of them faster
// by a thirtieth. Those who have nothing to fetch give the keys that they read.
template <int N, class T>
constexpr bool kAlwaysFetches = kLanes == 16 || (N > 4 && kInHalves<T>);

// Scores of N queries with C vectors of slots, each from its place in `keys` on, whose columns are `stride` apart.
// With every other column some of each of `ahead` is fetched: `share` numbers of T for a column.
template <int N, int C, int A, class T>
QUIRE_INLINE void score_slots(const State& s, const typename Scoring<T>::Query* q, const T* const (&keys)[C],
                              int64_t stride, int64_t head_dim, int64_t column, const T* const (&ahead)[A],
                              int64_t share) {
    using W = Scoring<T>;
    float* const scores = s.scores + column;
    const int64_t score_stride = s.score_stride;
    for (int64_t begin = 0; begin < head_dim; begin += W::kColumnsAtOnce) {
        const int64_t end = head_dim - begin < W::kColumnsAtOnce ? head_dim : begin + W::kColumnsAtOnce;
        typename W::Sum sums[N * C];
        const auto add_chained = [&](int64_t d, int64_t stop, bool more) QUIRE_INLINED {
            typename W::Sum chains[N * C][W::kChains];
            QUIRE_UNROLL
            for (int j = 0; j < N * C * W::kChains; ++j) chains[j / W::kChains][j % W::kChains] = W::zero();
            const auto add_columns = [&](auto count) QUIRE_INLINED {
                const typename W::template Queries<N> queries(q, head_dim, d);
                each<W::kColumns>([&](auto i) QUIRE_INLINED {
                    if (i >= count) return;
                    QUIRE_UNROLL
                    for (int a = i % 2; a < A; a += 2)
                        if (kAlwaysFetches<N, T> || ahead[a]) __builtin_prefetch(ahead[a] + (d + i - i % 2) * share);
                    decltype(W::load_keys(keys[0])) k[C];
                    for (int c = 0; c < C; ++c) k[c] = W::load_keys(keys[c] + (d + i) * stride);
                    each<N * C>([&](auto j) {
                        auto& sum = chains[j][i % W::kChains];
                        sum = queries.template add<j / C, i>(k[j % C], sum);
                    });
                });
            };
            for (; d + W::kColumns <= stop; d += W::kColumns) add_columns(std::integral_constant<int, W::kColumns>{});
            if (d < stop) add_columns(stop - d);
            QUIRE_UNROLL
            for (int j = 0; j < N * C; ++j) sums[j] = more ? sums[j] + W::join(chains[j]) : W::join(chains[j]);
        };
        if (end - begin > W::kChained) {
            add_chained(begin, begin + W::kChained, false);
            add_chained(begin + W::kChained, end, true);
        } else {
            add_chained(begin, end, false);
        }
        QUIRE_UNROLL
        for (int j = 0; j < N * C; ++j) {
            float* to = scores + j / C * score_stride + j % C * kLanes;
            store(to, begin == 0 ? W::total(sums[j]) : load(to) + W::total(sums[j]));
        }
    }
}

// Scores with one block of the span.
template <int N, class T>
QUIRE_INLINE void score_block(const State& s, const typename Scoring<T>::Query* q, const T* keys, int64_t num_slots,
                              int64_t stride, int64_t head_dim, int64_t column, const T* const (&ahead)[1]) {
    constexpr int64_t kWide = kVectors<N> * kLanes;
    int64_t slot = 0;
    for (; slot + kWide <= num_slots; slot += kWide) {
        const T* places[kVectors<N>];
        for (int c = 0; c < kVectors<N>; ++c) places[c] = keys + slot + c * kLanes;
        score_slots<N>(s, q, places, stride, head_dim, column + slot, ahead, stride);
    }
    for (; slot < num_slots; slot += kLanes) {
        const T* const place[] = {keys + slot};
        score_slots<N>(s, q, place, stride, head_dim, column + slot, ahead, stride);
    }
}

// Scores with the blocks of a span that are as long as a vector: several blocks at a time. Meanwhile values are
// fetched, a span ahead, or those of this span where they are wanted sooner than memory could bring others.
template <int N, class T>
void score_short_blocks(const State& s, const typename Scoring<T>::Query* q, int first, const Span& span,
                        int64_t head_dim) {
    const auto score_some = [&](auto count, int64_t b) QUIRE_INLINED {
        const T *keys[count], *ahead[count];
        for (int c = 0; c < count; ++c) {
            const int64_t block = span.first_block + b + c;
            keys[c] = (const T*)s.keys_at(block);
            ahead[c] = (const T*)s.values_at(s.num_groups > 1 ? s.later(block) : block) + s.share_of(first, head_dim);
        }
        score_slots<N>(s, q, keys, kLanes, head_dim, b * kLanes, ahead, s.column_share);
    };
    constexpr int kAtOnce = kVectors<N>;
    int64_t b = 0;
    for (; b + kAtOnce <= span.num_blocks; b += kAtOnce) score_some(std::integral_constant<int, kAtOnce>{}, b);
    for (; b < span.num_blocks; ++b) score_some(std::integral_constant<int, 1>{}, b);
}

// Whether keys are worth converting once where many queries read them: not where registers hold enough scores.
template <class T>
constexpr bool kConverts = sizeof(typename Scoring<T>::Query) != sizeof(T) && kLanes < 16;

// While keys are read, values are fetched: the pages of a head are a few kilobytes, too short for the CPU to foresee
// the next one. Keys are read from the pages, or where other queries of the tile will read them too, as floats from
// `s.keys`.
template <int N, class T>
void score(const AttentionTile& t, const State& s, int first, const Span& span, bool shared) {
    const int64_t head_dim = t.pages->head_dim;
    const auto* q = Scoring<T>::query_at(s.q, first, head_dim);
    if (kLanes == 16 && span.size == kLanes) return score_short_blocks<N, T>(s, q, first, span, head_dim);
    const int64_t skipped = span.first_block % s.span_blocks;  // blocks of the span that nobody here sees
    for (int64_t b = 0; b < span.num_blocks; ++b) {
        const int64_t num_slots = round_up(span.num_slots(b)), column = b * span.padded;
        if constexpr (kConverts<T>) {
            if (shared) {
                score_block<N>(s, q, s.keys + (skipped + b) * head_dim * span.size, num_slots, span.size, head_dim,
                               column, {(const float*)nullptr});
                continue;
            }
        }
        const int64_t block = span.first_block + b;
        const T* keys = (const T*)s.keys_at(block);
        const T* nothing = kAlwaysFetches<N, T> ? keys : nullptr;
        const T* const ahead[] = {first >= kQueriesAtOnce ? nothing : (const T*)s.values_at(block)};  // once a tile
        if constexpr (kInHalves<T>) {
            if (span.size == kUsualSize && head_dim == kUsualDim) {
                score_block<N>(s, q, keys, num_slots, kUsualSize, kUsualDim, column, ahead);
                continue;
            }
        }
        score_block<N>(s, q, keys, num_slots, span.size, head_dim, column, ahead);
    }
}

// Blocks [first, end) of the span, as floats into `s.keys`. Their values are fetched.
template <class T>
void convert_keys(const AttentionTile& t, const State& s, int64_t first, int64_t end) {
    const int64_t n = t.pages->head_dim * t.pages->block_size, skipped = first % s.span_blocks;
    float* to = s.keys + skipped * n;
    for (int64_t block = first; block < end; ++block, to += n) {
        const T* keys = (const T*)s.keys_at(block);
        const int64_t whole = n / kLanes * kLanes;
        const T* values = (const T*)s.values_at(block);
        for (int64_t i = 0; i < whole; i += kLanes) {
            __builtin_prefetch(values + i);
            store(to + i, load(keys + i));
        }
        if (whole < n) store_part(to + whole, load_part(keys + whole, n - whole), n - whole);
    }
}

// C vectors of columns from d on: acc = acc * factor + p . values, for up to 64 slots of each block from `begin` on.
// `Whole`: the columns lie within the value.
// While values are read, the keys of the next span are fetched.
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
        const auto* p = (const typename W::Weight*)s.p + b * span.padded + begin;
        const int64_t end = span.num_slots(b) < begin + kSlotsAtOnce ? span.num_slots(b) : begin + kSlotsAtOnce;
        const T* ahead =
            (const T*)s.keys_at(s.later(span.first_block + b)) + s.share_of(first, head_dim) + d * s.column_share;
        values += begin * head_dim + d;
        int64_t slot = begin;
        const auto add_slot = [&](auto lane, const auto& weights) {
            __builtin_prefetch(ahead + slot * (C * s.slot_share));
            decltype(W::load_values(values)) v[C];
            for (int c = 0; c < C; ++c)
                v[c] = Whole ? W::load_values(values + c * kLanes) : W::load_values(values, t.pages->value_dim() - d);
            each<N * C>([&](auto j) { sums[j] = W::template add<lane>(weights[j / C], v[j % C], sums[j]); });
            ++slot, values += head_dim;
        };
        while (slot < end) {
            typename W::Weights weights[N];
            for (int i = 0; i < N; ++i) weights[i] = W::load_weights(p + i * s.score_stride);
            if (end - slot >= kLanes) {
                each<kLanes>([&](auto lane) { add_slot(lane, weights); });
                p += kLanes;
            } else {
                add_slot(std::integral_constant<int, 0>{}, weights);
                ++p;
            }
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
    constexpr int kAtOnce = kColumnVectors<N, T>;
    constexpr int64_t kWide = kAtOnce * kLanes;
    const int64_t width = t.pages->value_dim();
    for (int64_t begin = 0; begin < span.num_slots(0); begin += kSlotsAtOnce) {
        int64_t d = 0;
        for (; d + kWide <= width; d += kWide) accumulate_columns<N, kAtOnce, true, T>(t, s, first, span, begin, d);
        for (; d + kLanes <= width; d += kLanes) accumulate_columns<N, 1, true, T>(t, s, first, span, begin, d);
        if (d < width) accumulate_columns<N, 1, false, T>(t, s, first, span, begin, d);
    }
}

// Row i of the scores, which is the query's, becomes row i of `s.p`.
template <class T>
void weigh(State& s, int query, int i, const Span& span) {
    auto* p = (typename Weighing<T>::Weight*)s.p + i * s.score_stride;
    soften(s, query, i, span, Weighing<T>::weigh,
           [&](int64_t column, Floats, Floats weight) { store(p + column, weight); });
}

// What is left to do of a span once queries [first, first + N), which lie in one vector, have scores.
template <int N, class T>
void take_values(const AttentionTile& t, State& s, int first, const Span& span) {
    raise<N>(t, s, first, 0, span);
    for (int i = 0; i < N; ++i) weigh<T>(s, first + i, i, span);
    accumulate<N, T>(t, s, first, span);
}

template <int N, class T>
void meet(const AttentionTile& t, State& s, int first, const Span& span, bool shared) {
    score<N, T>(t, s, first, span, shared);
    take_values<N, T>(t, s, first, span);
}

// `count` columns of 8 queries from `first` on into `s.q`, from column `to` on; up to kLanes - 1 columns behind them
// are lost.
template <class T>
void load_query_columns(const AttentionTile& t, State& s, int first, const float* const* queries, int64_t count,
                        int64_t to) {
    const int here = t.num_queries - first < kQueriesAtOnce ? t.num_queries - first : kQueriesAtOnce;
    auto* q = Scoring<T>::query_at(s.q, first, t.pages->head_dim);
    for (int64_t d = 0; d < count; d += kLanes) {
        const int64_t n = count - d < kLanes ? count - d : kLanes;
        Floats rows[kQueriesAtOnce] = {};
        for (int i = 0; i < here; ++i) {
            const float* from = queries[first + i] + d;
            rows[i] = (n == kLanes ? load(from) : load_part(from, n)) * splat(t.scale * kLog2e);
        }
        Scoring<T>::store_queries(q, t.pages->head_dim, to + d, rows, here);
    }
}

template <class T>
struct FloatPages {
    static constexpr bool kMustShare = false;

    static void load_queries(const AttentionTile& t, State& s) {
        for (int first = 0; first < t.num_queries; first += kQueriesAtOnce)
            load_query_columns<T>(t, s, first, t.q, t.pages->head_dim, 0);
    }

    static void share_keys(const AttentionTile& t, const State& s, int64_t first_block, int64_t end_block) {
        if constexpr (kConverts<T>) convert_keys<T>(t, s, first_block, end_block);
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
