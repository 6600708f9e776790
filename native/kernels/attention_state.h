// What attention keeps while it walks over pages, and the softmax of one span: the same for all types of pages.
#pragma once

#include <math.h>

#include <utility>

#include "inline.h"
#include "ops.h"
#include "vec.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float kLog2e = 1.44269504f;

// f(0), f(1), .. f(N - 1), each with a constant.
template <class F, int... I>
QUIRE_INLINE void each(const F& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
QUIRE_INLINE void each(const F& f) {
    each(f, std::make_integer_sequence<int, N>{});
}

int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// What is kept of each query between spans, and what belongs to one span. The entries of `q` and `p` that belong to one
// head column or slot lie together, so that a turn of the inner loops reads them from one place.
struct State {
    const uint8_t* head;   // the keys of block 0; its values lie `to_values` behind
    const int32_t* table;  // of the sequence
    size_t block_bytes, to_values;
    float* q;       // [32 / 8, head_dim, 8]; int8: codes
    float* acc;     // [32, round_up(head_dim)], rows acc_stride apart
    float* keys;    // [blocks of a span, head_dim, block_size]: those of the span, as floats; int8: units of its values
    float* scores;  // [8, slots of a span, each block's rounded up]
    void* p;        // [slots of a span, 8] of Weighing<T>::Weight; int8: codes
    int64_t acc_stride, score_stride;
    int64_t last_block;              // of the part under way
    float most[kTileQueries];        // m
    F8 weight[kTileQueries];         // l, in lanes
    float correction[kTileQueries];  // 2^(m - m') of the span under way
    float unit[kTileQueries];        // int8: what a code of the query is worth

    // Of the sequence's block at `place`.
    const uint8_t* keys_at(int64_t place) const { return head + table[place] * block_bytes; }
    const uint8_t* values_at(int64_t place) const { return keys_at(place) + to_values; }
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

// Row i of the scores, which is the query's, becomes weights p = weigh(score - m'), of which keep(column, score, p) is
// stored.
template <class Weigh, class Keep>
QUIRE_INLINE void soften(const AttentionTile& t, State& s, int query, int i, const Span& span, const Weigh& weigh,
                         const Keep& keep) {
    float* scores = s.scores + i * s.score_stride;
    const int64_t num_columns = span.num_blocks * span.padded;
    hide(t, query, span, scores, -INFINITY);
    F8 most = splat(s.most[query]);
    for (int64_t c = 0; c < num_columns; c += kLanes) most = max(most, load(scores + c));
    const float now = largest(most);
    float correction[kLanes];
    store(correction, exp2(splat(s.most[query] - now)));
    s.most[query] = now;
    s.correction[query] = correction[0];
    F8 weight = s.weight[query] * splat(correction[0]);
    for (int64_t c = 0; c < num_columns; c += kLanes) {
        const F8 score = load(scores + c), p = weigh(score - splat(now));
        weight = weight + p;
        store(scores + c, keep(c, score, p));
    }
    s.weight[query] = weight;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
