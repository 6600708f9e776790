// The state of an online softmax over pages, and its update with one span: the same for all types of pages.
#pragma once

#include <math.h>

#include "activation.h"
#include "inline.h"
#include "ops.h"
#include "vec.h"

namespace quire::QUIRE_ISA {
namespace {

// The most queries that are attended to at once, and share loads of keys and values. Without SIMD, only conversions
// from fp16 are worth sharing.
#ifdef QUIRE_NO_SIMD
template <class T>
constexpr int kMaxQueries = 1;
template <>
constexpr int kMaxQueries<Fp16> = 2;
#else
template <class T>
constexpr int kMaxQueries = kQueriesAtOnce;
#endif

// The state of each query between spans, and buffers of one span. The entries of `q` for one head column are
// contiguous, so an iteration of the inner loop reads them with one load.
struct State {
    const uint8_t* head;         // the keys of block 0; its values are value_offset bytes behind
    const int32_t* block_table;  // of the sequence
    size_t block_bytes, value_offset;
    const uint8_t* tail;  // the keys of block tail_block, and the blocks behind it tail_bytes apart
    int64_t tail_block;
    size_t tail_bytes;
    float* q;     // in the layout of QkMath<T>; int8: quantized values
    float* acc;   // [32, round_up(head_dim)], rows acc_stride apart
    float* keys;  // [blocks of a span, head_dim, block_size]: the span's keys as floats; int8: the scales of its values
    float* scores;  // [8, slots of a span], with each block rounded up to whole vectors
    void* p;        // the weights, in the layout of PvMath<T>; int8: quantized values
    int64_t acc_stride, score_stride;
    int64_t span_blocks;  // attention_span
    int64_t last_block;   // of all splits to be attended to
    int64_t num_groups;   // of 8 queries
    int64_t prefetch_columns,
        prefetch_slots;           // share of a group in the prefetch of [block_size] and of [kLanes] numbers
    float m[kTileQueries];        // running maximum
    Floats l[kTileQueries];       // running sum, in lanes
    float alpha[kTileQueries];    // rescale factor 2^(m - m') of the current span
    float q_scale[kTileQueries];  // int8: the scale of the query

    // Of block `index` of the sequence.
    const uint8_t* keys_at(int64_t index) const {
        return index < tail_block ? head + block_table[index] * block_bytes : tail + (index - tail_block) * tail_bytes;
    }
    const uint8_t* values_at(int64_t index) const { return keys_at(index) + value_offset; }

    // The corresponding block of the next span, which is prefetched while this one is read. Each group of queries
    // prefetches its share of the block, from prefetch_start on, so that prefetches spread over the whole span.
    int64_t next_span_block(int64_t index) const {
        return index + span_blocks < last_block ? index + span_blocks : last_block;
    }
    int64_t prefetch_start(int first_query, int64_t head_dim) const {
        return first_query / kQueriesAtOnce * head_dim * prefetch_columns;
    }
};

// The blocks of a span that some queries see.
struct Span {
    int64_t first_block, num_blocks;
    int64_t end;     // the position behind the last visible one
    int64_t size;    // slots of a block
    int64_t padded;  // the same, rounded up: entries of a block in `scores` and `p`

    int64_t base(int64_t b) const { return (first_block + b) * size; }
    int64_t num_slots(int64_t b) const { return end - base(b) < size ? end - base(b) : size; }
};

// Sets the slots of a span that a query may not see to `value`, in its row of scores or weights.
void mask_scores(const AttentionTile& t, int query, const Span& span, float* row, float value) {
    if (t.first[query] <= span.base(0) && t.last[query] + 1 >= span.base(span.num_blocks) && span.padded == span.size)
        return;
    for (int64_t b = 0; b < span.num_blocks; ++b) {
        const int64_t begin = t.first[query] - span.base(b), end = t.last[query] + 1 - span.base(b);  // visible slots
        float* block = row + b * span.padded;
        for (int64_t slot = 0; slot < begin && slot < span.padded; ++slot) block[slot] = value;
        for (int64_t slot = end < 0 ? 0 : end < span.size ? end : span.size; slot < span.padded; ++slot)
            block[slot] = value;
    }
}

// Adds the relative position biases to a row of scores.
void add_biases(const AttentionTile& t, int query, const Span& span, float* row) {
    const Floats log2e = splat(kLog2e);
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
            store(scores, multiply_add(log2e, load(bias), load(scores)));
        }
    }
}

// Applies softcap, biases and slopes to a row of scores.
void adjust_scores(const AttentionTile& t, int query, const Span& span, float* row) {
    if (t.softcap != 0) {
        const Floats cap = splat(t.softcap * kLog2e), inverse = splat(1.0f / (t.softcap * kLog2e));
        for (int64_t c = 0; c < span.num_blocks * span.padded; c += kLanes)
            store(row + c, tanh(load(row + c) * inverse) * cap);
    }
    if (t.reach) add_biases(t, query, span, row);
    if (!t.has_slopes) return;
    static constexpr float kLaneIndex[kMaxLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Floats slope = splat(t.slope[query] * kLog2e);
    for (int64_t b = 0; b < span.num_blocks; ++b) {
        const int64_t distance = span.base(b) - t.position[query];
        for (int64_t slot = 0; slot < span.padded; slot += kLanes) {
            float* scores = row + b * span.padded + slot;
            store(scores, multiply_add(slope, load(kLaneIndex) + splat(float(distance + slot)), load(scores)));
        }
    }
}

// Updates m to m', and computes alpha, for the queries from `first` + begin on, whose scores are rows [begin, N).
template <int N>
QUIRE_INLINE void update_max(const AttentionTile& t, State& s, int first, int begin, const Span& span) {
    Floats m[N];
    for (int i = 0; i < N; ++i) m[i] = splat(s.m[first + i]);
    for (int i = begin; i < N; ++i) {
        float* row = s.scores + i * s.score_stride;
        if (t.softcap != 0 || t.has_slopes || t.reach) adjust_scores(t, first + i, span, row);
        mask_scores(t, first + i, span, row, -INFINITY);
    }
    for (int64_t c = 0; c < span.num_blocks * span.padded; c += kLanes) {
        QUIRE_UNROLL
        for (int i = 0; i < N; ++i) m[i] = max(m[i], load(s.scores + i * s.score_stride + c));
    }
    float m_old[kLanes] = {}, m_new[kLanes] = {}, alpha[kLanes];
    for (int i = begin; i < N; ++i) {
        m_old[i] = s.m[first + i];
        m_new[i] = s.m[first + i] = largest(m[i]);
    }
    store(alpha, exp2(load(m_old) - load(m_new)));
    for (int i = begin; i < N; ++i) s.alpha[first + i] = alpha[i];
}

// Computes the weights p = exp_weights(score - m') of row i of the scores, which belongs to the query, calls
// emit(column, score, p), and adds p to l. `exp_weights` works on an array of vectors, in place.
template <class Weigh, class Emit>
QUIRE_INLINE void softmax_row(State& s, int query, int i, const Span& span, const Weigh& exp_weights,
                              const Emit& emit) {
    const float* scores = s.scores + i * s.score_stride;
    const Floats m = splat(s.m[query]);
    Floats l = s.l[query] * splat(s.alpha[query]);
    const int64_t n = span.num_blocks * span.padded;
    int64_t c = 0;
    const auto take = [&](auto count) {
        Floats p[count];
        QUIRE_UNROLL
        for (int j = 0; j < count; ++j) p[j] = load(scores + c + j * kLanes) - m;
        exp_weights(p);
        QUIRE_UNROLL
        for (int j = 0; j < count; ++j, c += kLanes) {
            l = l + p[j];
            emit(c, load(scores + c), p[j]);
        }
    };
    while (c + 4 * kLanes <= n) take(std::integral_constant<int, 4>{});
    while (c < n) take(std::integral_constant<int, 1>{});
    s.l[query] = l;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
