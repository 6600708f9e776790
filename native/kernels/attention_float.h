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
    static F8 total(Sum sum) { return sum; }
    static constexpr auto weigh = [](auto& scores) { exp2_each(scores); };

    // The weights of one query, at 8 slots.
    using Weights = const float*;
    static Weights load_weights(const float* p) { return p; }
    template <int Slot>
    static Sum add(Weights weights, F8 values, Sum sum) {
        return multiply_add(splat(weights[Slot]), values, sum);
    }
};
#ifdef QUIRE_HALF_MATH
template <>
struct Weighing<Half> {
    using Weight = Half;
    using Sum = H8;
    static Sum zero() { return zero_halves(); }
    static H8 load_values(const Half* p) { return load_halves(p); }
    static H8 load_values(const Half* p, int64_t n) { return to_halves(load_part(p, n)); }
    static F8 total(Sum sum) { return to_floats(sum); }
    static constexpr auto weigh = [](auto& scores) { coarse_exp2_each(scores); };

    using Weights = H8;
    static Weights load_weights(const Half* p) { return load_halves(p); }
    template <int Slot>
    static Sum add(Weights weights, H8 values, Sum sum) {
        return multiply_add<Slot>(weights, values, sum);
    }
};
#endif

// The arithmetic of queries times keys, for keys of type T. Halves are again multiplied and added as halves where the
// CPU can: of 32 columns those that are even, and those that are odd, and then the two sums; in fp32 that joins the
// others.
template <class T>
struct Scoring {
    using Query = float;
    using Sum = F8;
    static constexpr int kChains = 1;
    static constexpr int64_t kColumnsAtOnce = INT64_MAX;
    static Sum zero() { return splat(0.0f); }
    static F8 load_keys(const T* p) { return load(p); }
    static const float* load_queries(const float* p) { return p; }  // of 8 queries
    template <int Q>
    static Sum add(const float* queries, F8 keys, Sum sum) {
        return multiply_add(splat(queries[Q]), keys, sum);
    }
    static F8 total(const Sum* chains) { return chains[0]; }
};
#ifdef QUIRE_HALF_MATH
template <>
struct Scoring<Half> {
    using Query = Half;
    using Sum = H8;
    static constexpr int kChains = 2;
    static constexpr int64_t kColumnsAtOnce = 32;
    static Sum zero() { return zero_halves(); }
    static H8 load_keys(const Half* p) { return load_halves(p); }
    static H8 load_queries(const Half* p) { return load_halves(p); }
    template <int Q>
    static Sum add(H8 queries, H8 keys, Sum sum) {
        return multiply_add<Q>(queries, keys, sum);
    }
    static F8 total(const Sum* chains) { return to_floats(chains[0] + chains[1]); }
};
#endif

// Few queries alone do not keep the vector unit busy: they take two vectors of slots or of columns at a time.
template <int N>
constexpr int kVectors = N <= 4 ? 2 : 1;

// Scores of N queries with C vectors of slots, from `keys` on.
template <int N, int C, class T>
void score_slots(const State& s, const typename Scoring<T>::Query* q, const T* keys, int64_t stride, int64_t head_dim,
                 int64_t column, const T* ahead) {
    using W = Scoring<T>;
    for (int64_t begin = 0; begin < head_dim; begin += W::kColumnsAtOnce) {
        const int64_t end = head_dim - begin < W::kColumnsAtOnce ? head_dim : begin + W::kColumnsAtOnce;
        typename W::Sum sums[N * C][W::kChains];
        QUIRE_UNROLL
        for (int j = 0; j < N * C * W::kChains; ++j) sums[j / W::kChains][j % W::kChains] = W::zero();
        const auto add_column = [&](auto chain) {
            decltype(W::load_keys(keys)) k[C];
            for (int c = 0; c < C; ++c) k[c] = W::load_keys(keys + c * kLanes);
            const auto queries = W::load_queries(q);
            each<N * C>([&](auto j) { sums[j][chain] = W::template add<j / C>(queries, k[j % C], sums[j][chain]); });
            keys += stride, q += kQueriesAtOnce;
        };
        int64_t d = begin;
        const auto add_chains = [&](auto) {
            if (ahead) __builtin_prefetch(ahead + d * stride);
            each<W::kChains>(add_column);
            d += W::kChains;
        };
        if constexpr (W::kColumnsAtOnce < INT64_MAX)
            if (end - begin == W::kColumnsAtOnce) each<W::kColumnsAtOnce / W::kChains>(add_chains);
        while (d + W::kChains <= end) add_chains(0);
        if (d < end) add_column(std::integral_constant<int, 0>{});
        QUIRE_UNROLL
        for (int j = 0; j < N * C; ++j) {
            float* to = s.scores + column + j / C * s.score_stride + j % C * kLanes;
            store(to, begin == 0 ? W::total(sums[j]) : load(to) + W::total(sums[j]));
        }
    }
}

// Scores with one block of the span.
template <int N, class T>
void score_block(const State& s, const typename Scoring<T>::Query* q, const T* keys, int64_t num_slots, int64_t stride,
                 int64_t head_dim, int64_t column, const T* ahead) {
    constexpr int64_t kWide = kVectors<N> * kLanes;
    int64_t slot = 0;
    for (; slot + kWide <= num_slots; slot += kWide)
        score_slots<N, kVectors<N>>(s, q, keys + slot, stride, head_dim, column + slot, ahead);
    for (; slot < num_slots; slot += kLanes)
        score_slots<N, 1>(s, q, keys + slot, stride, head_dim, column + slot, ahead);
}

// Whether keys are worth converting once where many queries read them.
template <class T>
constexpr bool kConverts = sizeof(typename Scoring<T>::Query) != sizeof(T);

// While keys are read, values are fetched: the pages of a head are a few kilobytes, too short for the CPU to foresee
// the next one. Keys are read from the pages, or where other queries of the tile will read them too, as floats from
// `s.keys`.
template <int N, class T>
void score(const AttentionTile& t, const State& s, int first, const Span& span, bool shared) {
    const int64_t head_dim = t.pages->head_dim;
    const auto* q = (const typename Scoring<T>::Query*)s.q + first / kQueriesAtOnce * kQueriesAtOnce * head_dim +
                    first % kQueriesAtOnce;
    const int64_t skipped = span.first_block % attention_span(span.size);  // blocks of the span that nobody here sees
    for (int64_t b = 0; b < span.num_blocks; ++b) {
        const int64_t num_slots = round_up(span.num_slots(b)), column = b * span.padded;
        if constexpr (kConverts<T>) {
            if (shared) {
                score_block<N>(s, q, s.keys + (skipped + b) * head_dim * span.size, num_slots, span.size, head_dim,
                               column, (const float*)nullptr);
                continue;
            }
        }
        const int64_t block = span.first_block + b;
        const T* ahead = first >= kQueriesAtOnce ? nullptr : (const T*)s.values_at(block);  // once a tile
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
        const int64_t later = span.first_block + b + attention_span(span.size);
        const T* ahead = (const T*)s.keys_at(later < s.last_block ? later : s.last_block) + d * span.size;
        values += begin * head_dim + d;
        int64_t slot = begin;
        const auto add_slot = [&](auto lane, const auto& weights) {
            __builtin_prefetch(ahead + slot * C * kLanes);
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
    constexpr int kAtOnce = sizeof(typename Weighing<T>::Weight) == 2 ? 2 * kVectors<N> : kVectors<N>;
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
    soften(s, query, i, span, Weighing<T>::weigh, [&](int64_t column, F8, F8 weight) { store(p + column, weight); });
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

// `count` columns of 8 queries from `first` on into `s.q`, from column `to` on; up to 7 columns behind them are lost.
template <class T>
void load_query_columns(const AttentionTile& t, State& s, int first, const float* const* queries, int64_t count,
                        int64_t to) {
    auto* q = (typename Scoring<T>::Query*)s.q + first * t.pages->head_dim + to * kQueriesAtOnce;
    for (int64_t d = 0; d < count; d += kLanes) {
        const int64_t n = count - d < kLanes ? count - d : kLanes;
        F8 rows[kQueriesAtOnce] = {};
        for (int i = 0; i < kQueriesAtOnce && first + i < t.num_queries; ++i) {
            const float* from = queries[first + i] + d;
            rows[i] = (n == kLanes ? load(from) : load_part(from, n)) * splat(t.scale * kLog2e);
        }
        store_columns(q + d * kQueriesAtOnce, rows);
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
