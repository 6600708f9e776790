// Attention over int8 pages (see Pages in ops.h): both matmuls are integer.
//
// A query is quantized to 15 bits. So are its weights for a span, after each is multiplied by the scale of its value;
// weights of slots that the query may not see are 0. So rounding depends only on the slots that the query sees.
#pragma once

#include "attention_state.h"
#include "int8.h"

namespace quire::QUIRE_ISA {
namespace {

// high, low += dot products of C vectors of the matrix, from `quants` on, with N <= 4 vectors, `quads` quads deep.
template <int N, int C, class Prefetch>
QUIRE_INLINE void add_dot_products(const int8_t* quants, int64_t row_bytes, const int8_t* planes, int64_t quads,
                                   Integers (&high)[N * C], Integers (&low)[N * C], const Prefetch& prefetch) {
    for (int64_t quad = 0; quad < quads; ++quad, quants += row_bytes, planes += kQuadBytes) {
        prefetch(quad * row_bytes);
        Quants c[C];
        QUIRE_UNROLL
        for (int i = 0; i < C; ++i) c[i] = load_quants(quants + i * 4 * kLanes);
        const Quads vectors[2] = {load_quads(planes), load_quads(planes + 2 * kPlaneBytes)};
        each<N * C>([&](auto j) {
            constexpr int vector = j / C;
            high[j] = add_dot<vector % 2 * 2>(high[j], c[j % C], vectors[vector / 2]);
            low[j] = add_dot<vector % 2 * 2 + 1>(low[j], c[j % C], vectors[vector / 2]);
        });
    }
}

struct Int8Pages {
    static constexpr bool kAlwaysSharesKeys = false;

    // Vectors at a time. Few queries need two to keep the vector pipes busy.
    template <int N>
    static constexpr int kWidth = N <= 3 ? 2 : 1;

    static int64_t columns(const AttentionTile& t) { return t.pages->stored_columns(); }
    static int8_t* planes_of(const State& s, int64_t columns, int query) {
        return (int8_t*)s.q + query / kVectorsAtOnce * (columns / 4 * kQuadBytes) +
               query % kVectorsAtOnce * kPlaneBytes;
    }

    // Quantizes the queries into s.q [32 / 4][columns / 4][4][2][4].
    static void load_queries(const AttentionTile& t, State& s) {
        const int64_t n = columns(t);
        for (int i = 0; i < t.num_queries; ++i) {
            float* scaled = s.keys;  // the memory of a span's keys is unused so far
            for (int64_t d = 0; d < t.pages->head_dim; ++d) scaled[d] = t.q[i][d] * (t.scale * kLog2e);
            for (int64_t d = t.pages->head_dim; d < n; ++d) scaled[d] = 0.0f;
            s.q_scale[i] = quantize(scaled, n, magnitude_of(scaled, n), planes_of(s, n, i));
        }
    }

    static void share_keys(const AttentionTile&, const State&, int64_t, int64_t) {}

    // Queries [first, stop) attend to one span, in aligned groups of four. Results of queries before `first`, which see
    // nothing here, are discarded.
    static void attend_span(const AttentionTile& t, State& s, int first, int stop, const Span& span, bool) {
        using Attend = void (*)(const AttentionTile&, State&, int, int, const Span&);
        static constexpr Attend kAttend[] = {attend_four<1>, attend_four<2>, attend_four<3>, attend_four<4>};
        for (int four = first / kVectorsAtOnce * kVectorsAtOnce; four < stop; four += kVectorsAtOnce) {
            const int n = stop - four < kVectorsAtOnce ? stop - four : kVectorsAtOnce;
            kAttend[n - 1](t, s, four, first, span);
        }
    }

    template <int N>
    static void attend_four(const AttentionTile& t, State& s, int four, int first, const Span& span) {
        const int begin = first > four ? first - four : 0;
        score<N>(t, s, four, span);
        gather_value_scales(t, s, span);
        update_max<N>(t, s, four, begin, span);
        float scales[N] = {};
        for (int i = begin; i < N; ++i) scales[i] = exp_weights(s, four + i, i, span);
        accumulate<N>(t, s, four, first, span, scales);
    }

    // Copies the scales of the span's values into s.keys.
    static void gather_value_scales(const AttentionTile& t, const State& s, const Span& span) {
        for (int64_t b = 0; b < span.num_blocks; ++b) {
            const float* scales = t.pages->scales(s.values_at(span.first_block + b));
            for (int64_t slot = 0; slot < span.size; slot += kLanes)
                store(s.keys + b * span.size + slot, load(scales + slot));
        }
    }

    template <int N>
    static void score(const AttentionTile& t, const State& s, int four, const Span& span) {
        const int64_t last_block = t.last[t.num_queries - 1] / span.size;
        const int64_t row_bytes = 4 * span.size, quads = columns(t) / 4;
        const int8_t* q = planes_of(s, columns(t), four);
        for (int64_t b = 0; b < span.num_blocks; ++b) {
            const int64_t block = span.first_block + b, next = block < last_block ? block + 1 : last_block;
            const uint8_t *keys = s.keys_at(block), *next_keys = s.keys_at(next), *values = s.values_at(block);
            const float* scales = t.pages->scales(keys);
            const int64_t num_slots = round_up(span.num_slots(b));
            __builtin_prefetch(t.pages->scales(next_keys));
            __builtin_prefetch(t.pages->scales(values));
            const auto from = [&](auto width, int64_t slot) {
                const auto prefetch = [&](int64_t at) {
                    __builtin_prefetch(next_keys + 4 * slot + at);
                    __builtin_prefetch(values + 4 * slot + at);
                };
                score_slots<N, width>(s, four, q, (const int8_t*)keys + 4 * slot, row_bytes, quads, scales + slot,
                                      b * span.size + slot, prefetch);
            };
            int64_t slot = 0;
            for (; slot + kWidth<N> * kLanes <= num_slots; slot += kWidth<N> * kLanes)
                from(std::integral_constant<int, kWidth<N>>{}, slot);
            for (; slot < num_slots; slot += kLanes) from(std::integral_constant<int, 1>{}, slot);
        }
    }

    template <int N, int C, class Prefetch>
    QUIRE_INLINE static void score_slots(const State& s, int four, const int8_t* q, const int8_t* keys,
                                         int64_t row_bytes, int64_t quads, const float* scales, int64_t column,
                                         const Prefetch& prefetch) {
        Integers high[N * C], low[N * C];
        QUIRE_UNROLL
        for (int j = 0; j < N * C; ++j) high[j] = low[j] = zero_integers();
        add_dot_products<N, C>(keys, row_bytes, q, quads, high, low, prefetch);
        QUIRE_UNROLL
        for (int j = 0; j < N * C; ++j)
            store(s.scores + j / C * s.score_stride + column + j % C * kLanes,
                  joined(high[j], low[j]) * (load(scales + j % C * kLanes) * splat(s.q_scale[four + j / C])));
    }

    // Turns scores into weights times the scales of values, quantized into s.p [slots of a span / 4][4][2][4]. Returns
    // their scale. Slots that the query may not see may hold any scale: their weight is set to 0.
    static float exp_weights(State& s, int query, int i, const Span& span) {
        Floats maximum = splat(0.0f);
        float* weights = s.scores + i * s.score_stride;
        const auto exp = [](auto& scores) { coarse_exp2_each(scores); };
        softmax_row(s, query, i, span, exp, [&](int64_t column, Floats score, Floats p) {
            const Floats weight = zero_at(p * load(s.keys + column), score, splat(-INFINITY));
            maximum = max_magnitude(maximum, weight);
            store(weights + column, weight);
        });
        const int64_t n = span.num_blocks * span.size;
        return quantize(weights, n, reduce_max_magnitude(maximum), (int8_t*)s.p + i * kPlaneBytes);
    }

    template <int N>
    static void accumulate(const AttentionTile& t, const State& s, int four, int first, const Span& span,
                           const float (&scales)[N]) {
        constexpr int C = kWidth<N>;
        int64_t d = 0;
        for (; d + C * kLanes <= columns(t); d += C * kLanes)
            accumulate_columns<N, C>(t, s, four, first, span, scales, d);
        for (; d < columns(t); d += kLanes) accumulate_columns<N, 1>(t, s, four, first, span, scales, d);
    }

    template <int N, int C>
    static void accumulate_columns(const AttentionTile& t, const State& s, int four, int first, const Span& span,
                                   const float (&scales)[N], int64_t d) {
        Integers high[N * C], low[N * C];
        QUIRE_UNROLL
        for (int j = 0; j < N * C; ++j) high[j] = low[j] = zero_integers();
        const int64_t row_bytes = 4 * columns(t);
        for (int64_t b = 0; b < span.num_blocks; ++b) {
            add_dot_products<N, C>((const int8_t*)s.values_at(span.first_block + b) + 4 * d, row_bytes,
                                   (const int8_t*)s.p + b * span.size * kPlaneBytes, (span.num_slots(b) + 3) / 4, high,
                                   low, [](int64_t) {});
        }
        QUIRE_UNROLL
        for (int j = 0; j < N * C; ++j) {
            if (four + j / C < first) continue;
            float* to = s.acc + (four + j / C) * s.acc_stride + d + j % C * kLanes;
            const Floats pv = joined(high[j], low[j]) * splat(scales[j / C]);
            store(to, multiply_add(load(to), splat(s.alpha[four + j / C]), pv));
        }
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
