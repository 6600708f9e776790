// Paged attention: a tile of queries passes over the blocks of its sequence once, with an online softmax.
//
// Blocks are taken in spans of about 64 slots. For every span:
//     scores = q . keys, with softcap, slopes and biases;  m' = max(m, scores);  p = 2^(scores - m');
//     alpha = 2^(m - m');  l = l * alpha + p;  acc = acc * alpha + p . values.
// A split ends after about 256 positions. Its (m, l, acc) are merged with those of the splits before, and start anew.
// At the end, out = acc / l. Scores are scaled by log2(e): the queries are multiplied by scale * log2(e) beforehand.
//
// The order of every sum depends on the positions of the query alone: a score is summed over head columns in order, in
// one sum or more (see QkMath); l in the lanes of a vector (slot mod kLanes) over blocks in order, and then over the
// lanes; acc over slots in order. Slots that a query may not see add an exact 0.
#pragma once

#include "attention.h"
#include "attention_state.h"
#include "partial_softmax.h"

namespace quire::QUIRE_ISA {
namespace {

// Attends to the spans of one split. P: FloatPages, Int8Pages or LatentPages.
template <class P>
void attend_spans(const AttentionTile& t, State& s, int64_t split) {
    const int64_t size = t.pages->block_size, span_size = attention_span(size) * size;
    const int64_t split_size = attention_split(size), split_end = (split + 1) * split_size;
    const int64_t last = t.last[t.num_queries - 1] < split_end ? t.last[t.num_queries - 1] : split_end - 1;
    const int64_t first_span = t.first[0] / span_size * span_size;
    // Queries are ordered by token, so those that see a part of a span are consecutive.
    int begin = 0, end = 0;
    for (int64_t start = first_span > split * split_size ? first_span : split * split_size; start <= last;
         start += span_size) {
        while (t.last[begin] < start) ++begin;
        while (end < t.num_queries && t.first[end] < start + span_size) ++end;
        const bool shared = P::kAlwaysSharesKeys || begin / kQueriesAtOnce < (end - 1) / kQueriesAtOnce;
        const auto first_block = [&](int query) { return (t.first[query] > start ? t.first[query] : start) / size; };
        const auto seen_end = [&](int query) {
            return t.last[query] + 1 < start + span_size ? t.last[query] + 1 : start + span_size;
        };
        if (shared) P::share_keys(t, s, first_block(begin), (seen_end(end - 1) + size - 1) / size);
        for (int first = begin; first < end;) {
            const int next = (first / kQueriesAtOnce + 1) * kQueriesAtOnce, stop = next < end ? next : end;
            const int64_t block = first_block(first), end_position = seen_end(stop - 1);
            const Span span{block, (end_position + size - 1) / size - block, end_position, size, round_up(size)};
            P::attend_span(t, s, first, stop, span, shared);
            first = stop;
        }
    }
}

// Loads the queries, and lays out the scratch memory for positions up to `end`.
template <class P>
State init_state(const AttentionTile& t, int64_t end) {
    const int64_t head_dim = t.pages->head_dim, block_size = t.pages->block_size;
    const int64_t span_blocks = attention_span(block_size);
    State s;
    s.head = t.pages->keys(0, t.layer, t.kv_head);
    s.value_offset = t.pages->value_offset();
    s.tail = t.tail;
    s.tail_block = t.tail_block;
    s.tail_bytes = t.pages->tail_bytes();
    s.block_bytes = t.pages->block_bytes();
    s.block_table = t.block_table;
    s.span_blocks = span_blocks;
    s.num_groups = (t.num_queries + kQueriesAtOnce - 1) / kQueriesAtOnce;
    s.prefetch_columns = (block_size + s.num_groups - 1) / s.num_groups;
    s.prefetch_slots = (kLanes + s.num_groups - 1) / s.num_groups;
    s.last_block = (t.last[t.num_queries - 1] < end ? t.last[t.num_queries - 1] : end - 1) / block_size;
    s.score_stride = span_blocks * round_up(block_size);
    s.q = t.scratch;
    s.scores = s.q + kTileQueries * round_up(head_dim);
    s.p = s.scores + kQueriesAtOnce * s.score_stride;
    s.keys = s.scores + 2 * kQueriesAtOnce * s.score_stride;
    P::load_queries(t, s);
    return s;
}

float* scratch_partials(const AttentionTile& t) {
    return t.scratch + attention_scratch(t.pages->head_dim, t.pages->block_size) -
           2 * tile_partial_floats(t.pages->head_dim);
}

template <class P>
void attend_split(const AttentionTile& t, State& s, int64_t split, const PartialSoftmax& partial) {
    s.acc = partial.data;
    s.acc_stride = partial.stride();
    for (int i = 0; i < t.num_queries; ++i) {
        for (int64_t d = 0; d < round_up(partial.value_dim); ++d) partial.acc(i)[d] = 0.0f;
        s.m[i] = -INFINITY;
        s.l[i] = splat(0.0f);
    }
    attend_spans<P>(t, s, split);
    for (int i = 0; i < t.num_queries; ++i) {
        partial.m(i) = s.m[i];
        partial.l(i) = sum(s.l[i]);
    }
}

template <class P>
void attend(const AttentionTile& t) {
    State s = init_state<P>(t, INT64_MAX);
    const int64_t value_dim = t.pages->value_dim(), split_size = attention_split(t.pages->block_size);
    const PartialSoftmax merged{scratch_partials(t), value_dim};
    const PartialSoftmax partial{merged.data + tile_partial_floats(value_dim), value_dim};
    const int64_t first = t.first[0] / split_size, last = t.last[t.num_queries - 1] / split_size;
    attend_split<P>(t, s, first, merged);
    for (int64_t split = first + 1; split <= last; ++split) {
        attend_split<P>(t, s, split, partial);
        merge(merged, partial, t.num_queries);
    }
    finish(t, merged);
}

template <class P>
void attend_splits(const AttentionTile& t, int64_t first, int64_t end, float* partials, int64_t split_stride) {
    State s = init_state<P>(t, end * attention_split(t.pages->block_size));
    for (int64_t split = first; split < end; ++split, partials += split_stride)
        attend_split<P>(t, s, split, PartialSoftmax{partials, t.pages->value_dim()});
}

template <class P>
constexpr AttentionKernels kAttentionKernels = {attend<P>, attend_splits<P>};

}  // namespace
}  // namespace quire::QUIRE_ISA
