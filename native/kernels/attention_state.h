// What attention keeps while it walks over pages, and the softmax of one span: the same for all types of pages.
#pragma once

#include <math.h>

#include "activation.h"
#include "inline.h"
#include "ops.h"
#include "vec.h"

namespace quire::QUIRE_ISA {
namespace {

int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// What is kept of each query between spans, and what belongs to one span. The entries of `q` that belong to one
// head column lie together, so that a turn of the inner loop reads them from one place.
struct State {
    const uint8_t* head;   // the keys of block 0; its values lie `to_values` behind
    const int32_t* table;  // of the sequence
    size_t block_bytes, to_values;
    float* q;       // as Scoring<T> wants them; int8: codes
    float* acc;     // [32, round_up(head_dim)], rows acc_stride apart
    float* keys;    // [blocks of a span, head_dim, block_size]: those of the span, as floats; int8: units of its values
    float* scores;  // [8, slots of a span, each block's rounded up]
    void* p;        // the weights, as Weighing<T> wants them; int8: codes
    int64_t acc_stride, score_stride;
    int64_t span_blocks;               // attention_span
    int64_t last_block;                // of all parts to be visited
    int64_t num_groups;                // of 8 queries
    int64_t column_share, slot_share;  // what each group fetches of [block_size] and of [kLanes] numbers
    float most[kTileQueries];          // m
    Floats weight[kTileQueries];       // l, in lanes
    float correction[kTileQueries];    // 2^(m - m') of the span under way
    float unit[kTileQueries];          // int8: what a code of the query is worth

    // Of the sequence's block at `place`.
    const uint8_t* keys_at(int64_t place) const { return head + table[place] * block_bytes; }
    const uint8_t* values_at(int64_t place) const { return keys_at(place) + to_values; }

    // A block's place in the next span: what is fetched while this one is read. Each group of queries fetches its share
    // of the block, from `share_of` on, so that fetching is spread over all the time that a tile spends on a span.
    int64_t later(int64_t place) const { return place + span_blocks < last_block ? place + span_blocks : last_block; }
    int64_t share_of(int first_query, int64_t head_dim) const {
        return first_query / kQueriesAtOnce * head_dim * column_share;
    }
};

// What the queries of a tile found in one part, or in all so far.
struct Findings {
    float* data;
    int64_t value_dim;

    int64_t stride() const { return query_findings(value_dim); }
    float* acc(int i) const { return data + i * stride(); }
    float& most(int i) const { return acc(i)[round_up(value_dim)]; }        // m; -inf: it sees nothing there
    float& weight(int i) const { return acc(i)[round_up(value_dim) + 1]; }  // l
};

// The part of a span that some queries see.
struct Span {
    int64_t first_block, num_blocks;
    int64_t end;     // the position after the last one seen
    int64_t size;    // slots in a block
    int64_t padded;  // the same, rounded up: what a block takes in `scores` and `p`

    int64_t base(int64_t b) const { return (first_block + b) * size; }
    int64_t num_slots(int64_t b) const { return end - base(b) < size ? end - base(b) : size; }
};

// What the query may not see of a span becomes `value` in its row of scores or weights.
void hide(const AttentionTile& t, int query, const Span& span, float* row, float value) {
    if (t.first[query] <= span.base(0) && t.last[query] + 1 >= span.base(span.num_blocks) && span.padded == span.size)
        return;
    for (int64_t b = 0; b < span.num_blocks; ++b) {
        const int64_t begin = t.first[query] - span.base(b), end = t.last[query] + 1 - span.base(b);  // slots it sees
        float* block = row + b * span.padded;
        for (int64_t slot = 0; slot < begin && slot < span.padded; ++slot) block[slot] = value;
        for (int64_t slot = end < 0 ? 0 : end < span.size ? end : span.size; slot < span.padded; ++slot)
            block[slot] = value;
    }
}

// A row of scores gains what a table says of the distance to each key.
void add_biases(const AttentionTile& t, int query, const Span& span, float* row) {
    const Floats unit = splat(kLog2e);
    for (int64_t b = 0; b < span.num_blocks; ++b) {
        for (int64_t slot = 0; slot < span.padded; slot += kLanes) {
            const int64_t distance = span.base(b) + slot - t.position[query];
            float kept[kLanes];
            const float* bias = t.bias[query] + distance;
            if (distance < -t.reach || distance + kLanes - 1 > t.reach) {
                for (int64_t i = distance; i < distance + kLanes; ++i)
                    kept[i - distance] = t.bias[query][i < -t.reach ? -t.reach : i > t.reach ? t.reach : i];
                bias = kept;
            }
            float* scores = row + b * span.padded + slot;
            store(scores, multiply_add(unit, load(bias), load(scores)));
        }
    }
}

// A row of scores is capped, and gains what the distance to each key is worth.
void bend(const AttentionTile& t, int query, const Span& span, float* row) {
    if (t.softcap != 0) {
        const Floats most = splat(t.softcap * kLog2e), inverse = splat(1.0f / (t.softcap * kLog2e));
        for (int64_t c = 0; c < span.num_blocks * span.padded; c += kLanes)
            store(row + c, tanh(load(row + c) * inverse) * most);
    }
    if (t.reach) add_biases(t, query, span, row);
    if (!t.has_slopes) return;
    static constexpr float kPlaces[kMostLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Floats slope = splat(t.slope[query] * kLog2e);
    for (int64_t b = 0; b < span.num_blocks; ++b) {
        const int64_t distance = span.base(b) - t.position[query];
        for (int64_t slot = 0; slot < span.padded; slot += kLanes) {
            float* scores = row + b * span.padded + slot;
            store(scores, multiply_add(slope, load(kPlaces) + splat(float(distance + slot)), load(scores)));
        }
    }
}

// Rows [begin, N) of the scores belong to the queries from `first` + begin on: m', and the correction of what was found
// so far.
template <int N>
QUIRE_INLINE void raise(const AttentionTile& t, State& s, int first, int begin, const Span& span) {
    Floats most[N];
    for (int i = 0; i < N; ++i) most[i] = splat(s.most[first + i]);
    for (int i = begin; i < N; ++i) {
        float* row = s.scores + i * s.score_stride;
        if (t.softcap != 0 || t.has_slopes || t.reach) bend(t, first + i, span, row);
        hide(t, first + i, span, row, -INFINITY);
    }
    for (int64_t c = 0; c < span.num_blocks * span.padded; c += kLanes) {
        QUIRE_UNROLL
        for (int i = 0; i < N; ++i) most[i] = max(most[i], load(s.scores + i * s.score_stride + c));
    }
    float before[kLanes] = {}, now[kLanes] = {}, correction[kLanes];
    for (int i = begin; i < N; ++i) {
        before[i] = s.most[first + i];
        now[i] = s.most[first + i] = largest(most[i]);
    }
    store(correction, exp2(load(before) - load(now)));
    for (int i = begin; i < N; ++i) s.correction[first + i] = correction[i];
}

// Row i of the scores, which is the query's, becomes weights p = weigh(score - m'), which keep(column, score, p) is
// told of. `weigh` works on an array of vectors, in place.
template <class Weigh, class Keep>
QUIRE_INLINE void soften(State& s, int query, int i, const Span& span, const Weigh& weigh, const Keep& keep) {
    const float* scores = s.scores + i * s.score_stride;
    const Floats most = splat(s.most[query]);
    Floats weight = s.weight[query] * splat(s.correction[query]);
    const int64_t n = span.num_blocks * span.padded;
    int64_t c = 0;
    const auto take = [&](auto count) {
        Floats p[count];
        QUIRE_UNROLL
        for (int j = 0; j < count; ++j) p[j] = load(scores + c + j * kLanes) - most;
        weigh(p);
        QUIRE_UNROLL
        for (int j = 0; j < count; ++j, c += kLanes) {
            weight = weight + p[j];
            keep(c, load(scores + c), p[j]);
        }
    };
    while (c + 4 * kLanes <= n) take(std::integral_constant<int, 4>{});
    while (c < n) take(std::integral_constant<int, 1>{});
    s.weight[query] = weight;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
