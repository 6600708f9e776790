// Attention over pages of floats: fp16, bf16 or fp32. QkMath and PvMath choose the precision of both matmuls.
#pragma once

#include "attention_state.h"

namespace quire::QUIRE_ISA {
namespace {

// The arithmetic of weights times values, for values of type T. If the CPU has fp16 arithmetic, fp16 values are summed
// in fp16 over up to 64 slots, and these sums in fp32. Weights are at most 1, so this loses only a few ulps of fp16.
constexpr int64_t kSlotsAtOnce = 64;

template <class T>
struct PvMath {
    using Weight = float;
    using Sum = Floats;
    static Sum zero() { return splat(0.0f); }
    static Floats load_values(const T* p) { return load(p); }
    static Floats load_values(const T* p, int64_t n) { return load_part(p, n); }
    static Floats total(Sum sum) { return sum; }
    static constexpr auto exp_weights = [](auto& scores) { exp2_each(scores); };

    // The weights of one query for a vector of slots.
    using Weights = const float*;
    static Weights load_weights(const float* p) { return p; }
    template <int Slot>
    static Sum add(Weights weights, Floats values, Sum sum) {
        return multiply_add(splat(weights[Slot]), values, sum);
    }
};
#ifdef QUIRE_FP16_MATH
template <>
struct PvMath<Fp16> {
    using Weight = Fp16;
    using Sum = Fp16x8;
    static Sum zero() { return zero_fp16(); }
    static Fp16x8 load_values(const Fp16* p) { return load_fp16(p); }
    static Fp16x8 load_values(const Fp16* p, int64_t n) { return to_fp16(load_part(p, n)); }
    static Floats total(Sum sum) { return to_floats(sum); }
    static constexpr auto exp_weights = [](auto& scores) { coarse_exp2_each(scores); };

    using Weights = Fp16x8;
    static Weights load_weights(const Fp16* p) { return load_fp16(p); }
    template <int Slot>
    static Sum add(Weights weights, Fp16x8 values, Sum sum) {
        return multiply_add<Slot>(weights, values, sum);
    }
};
#endif

// The arithmetic of queries times keys, for keys of type T. If the CPU has fp16 arithmetic, fp16 keys are summed in
// fp16: the even and the odd columns of 32, then the two sums, then those of 64 columns. These are summed in fp32. `q`
// has the layout of load_queries; query_at returns the address of a query.
template <class T>
struct QkMath {
    using Query = float;
    using Sum = Floats;
    static constexpr int kChains = 1;   // sums that alternate
    static constexpr int kColumns = 2;  // columns whose queries are loaded at once
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
#ifdef QUIRE_FP16_MATH
template <>
struct QkMath<Fp16> {
    using Query = Fp16;
    using Sum = Fp16x8;
    static constexpr int kColumns = kLanes, kChains = 2;
    static constexpr int64_t kChained = 32, kColumnsAtOnce = 64;
    static Sum zero() { return zero_fp16(); }
    static Fp16x8 load_keys(const Fp16* p) { return load_fp16(p); }
    template <int N>
    struct Queries {
        Fp16x8 rows[N];
        Queries(const Fp16* q, int64_t head_dim, int64_t column) {
            QUIRE_UNROLL
            for (int i = 0; i < N; ++i) rows[i] = load_fp16(query_at(q, i, head_dim) + column);
        }
        template <int Q, int Column>
        Sum add(Fp16x8 keys, Sum sum) const {
            return multiply_add<Column>(rows[Q], keys, sum);
        }
    };
    // [32, head_dim, rounded up and one vector more]
    static Fp16* query_at(const void* q, int query, int64_t head_dim) {
        return (Fp16*)q + query * (round_up(head_dim) + kLanes);
    }
    static void store_queries(Fp16* q, int64_t head_dim, int64_t column, const Floats (&rows)[kQueriesAtOnce],
                              int count) {
        for (int i = 0; i < count; ++i) store(query_at(q, i, head_dim) + column, rows[i]);
    }
    static Sum join(const Sum* chains) { return chains[0] + chains[1]; }
    static Floats total(Sum sum) { return to_floats(sum); }
};
#endif

// Vectors of slots at a time. Up to 4 queries need two to keep the vector pipes busy. AVX-512 has registers for twice
// as many.
template <int N>
constexpr int kVectors = (N <= 4 ? 2 : 1) * (kLanes == 16 ? 2 : 1);
template <int N, class T>
constexpr int kColumnVectors = kVectors<N> * (sizeof(typename PvMath<T>::Weight) == 2 ? 2 : 1);

template <class T>
constexpr bool kInFp16 = sizeof(typename QkMath<T>::Query) == 2;

// A common block size and head_dim. As constants, they save the address arithmetic of the fp16 loops.
constexpr int64_t kUsualSize = 16, kUsualDim = 64;

// Whether the loop over columns prefetches without a branch: for fp16, a branch makes a prefill a fifth slower (and few
// queries 3 % faster). Callers that have nothing to prefetch pass the keys that they read.
template <int N, class T>
constexpr bool kAlwaysPrefetches = kLanes == 16 || (N > 4 && kInFp16<T>);

// Scores of N queries with C vectors of slots, at `keys`, whose columns are `stride` apart. Every other column
// prefetches some of each of `prefetched`: prefetch_stride elements per column.
template <int N, int C, int A, class T>
QUIRE_INLINE void score_slots(const State& s, const typename QkMath<T>::Query* q, const T* const (&keys)[C],
                              int64_t stride, int64_t head_dim, int64_t column, const T* const (&prefetched)[A],
                              int64_t prefetch_stride) {
    using W = QkMath<T>;
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
                        if (kAlwaysPrefetches<N, T> || prefetched[a])
                            __builtin_prefetch(prefetched[a] + (d + i - i % 2) * prefetch_stride);
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

// Scores with one block of a span.
template <int N, class T>
QUIRE_INLINE void score_block(const State& s, const typename QkMath<T>::Query* q, const T* keys, int64_t num_slots,
                              int64_t stride, int64_t head_dim, int64_t column, const T* const (&prefetched)[1]) {
    constexpr int64_t kWide = kVectors<N> * kLanes;
    int64_t slot = 0;
    for (; slot + kWide <= num_slots; slot += kWide) {
        const T* key_slots[kVectors<N>];
        for (int c = 0; c < kVectors<N>; ++c) key_slots[c] = keys + slot + c * kLanes;
        score_slots<N>(s, q, key_slots, stride, head_dim, column + slot, prefetched, stride);
    }
    for (; slot < num_slots; slot += kLanes) {
        const T* const key_slot[] = {keys + slot};
        score_slots<N>(s, q, key_slot, stride, head_dim, column + slot, prefetched, stride);
    }
}

// Scores with the blocks of a span if a block is as long as a vector: several blocks at a time. Values are prefetched
// meanwhile: of the next span or, with a single group of queries, of this one.
template <int N, class T>
void score_short_blocks(const State& s, const typename QkMath<T>::Query* q, int first, const Span& span,
                        int64_t head_dim) {
    const auto score_some = [&](auto count, int64_t b) QUIRE_INLINED {
        const T *keys[count], *prefetched[count];
        for (int c = 0; c < count; ++c) {
            const int64_t block = span.first_block + b + c;
            keys[c] = (const T*)s.keys_at(block);
            prefetched[c] = (const T*)s.values_at(s.num_groups > 1 ? s.next_span_block(block) : block) +
                            s.prefetch_start(first, head_dim);
        }
        score_slots<N>(s, q, keys, kLanes, head_dim, b * kLanes, prefetched, s.prefetch_columns);
    };
    constexpr int kAtOnce = kVectors<N>;
    int64_t b = 0;
    for (; b + kAtOnce <= span.num_blocks; b += kAtOnce) score_some(std::integral_constant<int, kAtOnce>{}, b);
    for (; b < span.num_blocks; ++b) score_some(std::integral_constant<int, 1>{}, b);
}

// Whether keys that many queries read are converted to fp32 once. Not worth it if registers hold enough scores.
template <class T>
constexpr bool kConverts = sizeof(typename QkMath<T>::Query) != sizeof(T) && kLanes < 16;

// Scores with a span. While keys are read, values are prefetched: the pages of a head are a few kilobytes, too short
// for the hardware prefetcher. Keys are read from the pages or, if other queries of the tile share them, as fp32 from
// s.keys.
template <int N, class T>
void score(const AttentionTile& t, const State& s, int first, const Span& span, bool shared) {
    const int64_t head_dim = t.pages->head_dim;
    const auto* q = QkMath<T>::query_at(s.q, first, head_dim);
    if (kLanes == 16 && span.size == kLanes) return score_short_blocks<N, T>(s, q, first, span, head_dim);
    const int64_t skipped = span.first_block % s.span_blocks;  // blocks of the span that these queries do not see
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
        const T* nothing = kAlwaysPrefetches<N, T> ? keys : nullptr;
        const T* const prefetched[] = {
            first >= kQueriesAtOnce ? nothing : (const T*)s.values_at(block)};  // only the first group of a tile
        if constexpr (kInFp16<T>) {
            if (span.size == kUsualSize && head_dim == kUsualDim) {
                score_block<N>(s, q, keys, num_slots, kUsualSize, kUsualDim, column, prefetched);
                continue;
            }
        }
        score_block<N>(s, q, keys, num_slots, span.size, head_dim, column, prefetched);
    }
}

// Converts the keys of blocks [first, end) of a span to fp32, into s.keys. Prefetches their values.
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

// C vectors of columns from d on: acc = acc * alpha + p . values, for up to 64 slots of each block from `begin` on.
// `Whole`: the columns lie within the value. While values are read, the keys of the next span are prefetched.
template <int N, int C, bool Whole, class T>
void accumulate_columns(const AttentionTile& t, const State& s, int first, const Span& span, int64_t begin, int64_t d) {
    using W = PvMath<T>;
    const int64_t head_dim = t.pages->head_dim;
    float* acc = s.acc + first * s.acc_stride + d;
    typename W::Sum sums[N * C];
    QUIRE_UNROLL
    for (int j = 0; j < N * C; ++j) sums[j] = W::zero();
    for (int64_t b = 0; b < span.num_blocks; ++b) {
        const T* values = (const T*)s.values_at(span.first_block + b);
        const auto* p = (const typename W::Weight*)s.p + b * span.padded + begin;
        const int64_t end = span.num_slots(b) < begin + kSlotsAtOnce ? span.num_slots(b) : begin + kSlotsAtOnce;
        const T* prefetched = (const T*)s.keys_at(s.next_span_block(span.first_block + b)) +
                              s.prefetch_start(first, head_dim) + d * s.prefetch_columns;
        values += begin * head_dim + d;
        int64_t slot = begin;
        const auto add_slot = [&](auto lane, const auto& weights) {
            __builtin_prefetch(prefetched + slot * (C * s.prefetch_slots));
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
        const float alpha = begin == 0 ? s.alpha[first + j / C] : 1.0f;
        store(to, multiply_add(load(to), splat(alpha), W::total(sums[j])));
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

// Turns row i of the scores, which belongs to the query, into row i of s.p.
template <class T>
void exp_weights(State& s, int query, int i, const Span& span) {
    auto* p = (typename PvMath<T>::Weight*)s.p + i * s.score_stride;
    softmax_row(s, query, i, span, PvMath<T>::exp_weights,
                [&](int64_t column, Floats, Floats x) { store(p + column, x); });
}

// The rest of a span, once queries [first, first + N), which are in one group of 8, have scores.
template <int N, class T>
void softmax_and_accumulate(const AttentionTile& t, State& s, int first, const Span& span) {
    update_max<N>(t, s, first, 0, span);
    for (int i = 0; i < N; ++i) exp_weights<T>(s, first + i, i, span);
    accumulate<N, T>(t, s, first, span);
}

template <int N, class T>
void attend_queries(const AttentionTile& t, State& s, int first, const Span& span, bool shared) {
    score<N, T>(t, s, first, span, shared);
    softmax_and_accumulate<N, T>(t, s, first, span);
}

// Loads `count` columns of 8 queries from `first` on into s.q, from column `to` on. Overwrites up to kLanes - 1 columns
// behind them.
template <class T>
void load_query_columns(const AttentionTile& t, State& s, int first, const float* const* queries, int64_t count,
                        int64_t to) {
    const int here = t.num_queries - first < kQueriesAtOnce ? t.num_queries - first : kQueriesAtOnce;
    auto* q = QkMath<T>::query_at(s.q, first, t.pages->head_dim);
    for (int64_t d = 0; d < count; d += kLanes) {
        const int64_t n = count - d < kLanes ? count - d : kLanes;
        Floats rows[kQueriesAtOnce] = {};
        for (int i = 0; i < here; ++i) {
            const float* from = queries[first + i] + d;
            rows[i] = (n == kLanes ? load(from) : load_part(from, n)) * splat(t.scale * kLog2e);
        }
        QkMath<T>::store_queries(q, t.pages->head_dim, to + d, rows, here);
    }
}

template <class T>
struct FloatPages {
    static constexpr bool kAlwaysSharesKeys = false;

    static void load_queries(const AttentionTile& t, State& s) {
        for (int first = 0; first < t.num_queries; first += kQueriesAtOnce)
            load_query_columns<T>(t, s, first, t.q, t.pages->head_dim, 0);
    }

    static void share_keys(const AttentionTile& t, const State& s, int64_t first_block, int64_t end_block) {
        if constexpr (kConverts<T>) convert_keys<T>(t, s, first_block, end_block);
    }

    static void attend_span(const AttentionTile& t, State& s, int first, int stop, const Span& span, bool shared) {
        if constexpr (kMaxQueries<T> < kQueriesAtOnce) {
            constexpr int kCount = kMaxQueries<T>;
            for (; first + kCount <= stop; first += kCount) attend_queries<kCount, T>(t, s, first, span, shared);
            for (; first < stop; ++first) attend_queries<1, T>(t, s, first, span, shared);
        } else {
            using Attend = void (*)(const AttentionTile&, State&, int, const Span&, bool);
            static constexpr Attend kAttend[] = {attend_queries<1, T>, attend_queries<2, T>, attend_queries<3, T>,
                                                 attend_queries<4, T>, attend_queries<5, T>, attend_queries<6, T>,
                                                 attend_queries<7, T>, attend_queries<8, T>};
            kAttend[stop - first - 1](t, s, first, span, shared);
        }
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
