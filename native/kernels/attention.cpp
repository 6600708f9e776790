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

#include "attention_float.h"
#include "attention_int8.h"
#include "attention_latent.h"

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

// f(P{}) for the type of the pages.
template <class F>
void with_pages(const Pages& pages, const F& f) {
    switch (pages.type) {
        case PageType::Float16: return pages.latent ? f(LatentPages<Fp16>{}) : f(FloatPages<Fp16>{});
        case PageType::Bfloat16: return pages.latent ? f(LatentPages<Bf16>{}) : f(FloatPages<Bf16>{});
        case PageType::Float32: return pages.latent ? f(LatentPages<float>{}) : f(FloatPages<float>{});
        case PageType::Int8: return f(Int8Pages{});
    }
}

// Loads the queries, and lays out the scratch memory for positions up to `end`.
State init_state(const AttentionTile& t, int64_t end) {
    const int64_t head_dim = t.pages->head_dim, block_size = t.pages->block_size;
    const int64_t span_blocks = attention_span(block_size);
    State s;
    s.head = t.pages->keys(0, t.layer, t.kv_head);
    s.value_offset = t.pages->values(0, t.layer, t.kv_head) - s.head;
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
    with_pages(*t.pages, [&](auto pages) { pages.load_queries(t, s); });
    return s;
}

float* scratch_partials(const AttentionTile& t) {
    return t.scratch + attention_scratch(t.pages->head_dim, t.pages->block_size) -
           2 * tile_partial_floats(t.pages->head_dim);
}

void attend_split(const AttentionTile& t, State& s, int64_t split, const PartialSoftmax& partial) {
    s.acc = partial.data;
    s.acc_stride = partial.stride();
    for (int i = 0; i < t.num_queries; ++i) {
        for (int64_t d = 0; d < round_up(partial.value_dim); ++d) partial.acc(i)[d] = 0.0f;
        s.m[i] = -INFINITY;
        s.l[i] = splat(0.0f);
    }
    with_pages(*t.pages, [&](auto pages) { attend_spans<decltype(pages)>(t, s, split); });
    for (int i = 0; i < t.num_queries; ++i) {
        partial.m(i) = s.m[i];
        partial.l(i) = sum(s.l[i]);
    }
}

// Merges the partial softmax of the next split into `merged`.
void merge(const PartialSoftmax& merged, const PartialSoftmax& next, int num_queries) {
    const int64_t value_dim = merged.value_dim;
    for (int first = 0; first < num_queries; first += kLanes) {
        const int end = num_queries - first < kLanes ? num_queries : first + kLanes;
        float m_old[kLanes] = {}, m_next[kLanes] = {}, m_new[kLanes], alphas[kLanes], betas[kLanes];
        for (int i = first; i < end; ++i) m_old[i - first] = merged.m(i), m_next[i - first] = next.m(i);
        store(m_new, max(load(m_old), load(m_next)));
        Floats factors[] = {load(m_old) - load(m_new), load(m_next) - load(m_new)};
        exp2_each(factors);
        store(alphas, factors[0]);
        store(betas, factors[1]);
        for (int i = first; i < end; ++i) {
            if (m_next[i - first] == -INFINITY) continue;
            const float alpha = alphas[i - first], beta = betas[i - first], *from = next.acc(i);
            float* to = merged.acc(i);
            for (int64_t d = 0; d < value_dim; d += kLanes)
                store(to + d, multiply_add(splat(beta), load(from + d), load(to + d) * splat(alpha)));
            merged.l(i) = merged.l(i) * alpha + next.l(i) * beta;
            merged.m(i) = m_new[i - first];
        }
    }
}

void finish(const AttentionTile& t, const PartialSoftmax& merged) {
    for (int i = 0; i < t.num_queries; ++i) {
        float l = merged.l(i);
        if (t.has_sinks) {
            float sink_weight[kLanes];
            store(sink_weight, exp2(splat(t.sink[i] * kLog2e - merged.m(i))));
            l += sink_weight[0];
        }
        const float inverse = 1.0f / l;
        for (int64_t d = 0; d < merged.value_dim; ++d) t.out[i][d] = merged.acc(i)[d] * inverse;
    }
}

}  // namespace

void attend(const AttentionTile& t);
void attend(const AttentionTile& t) {
    State s = init_state(t, INT64_MAX);
    const int64_t value_dim = t.pages->value_dim(), split_size = attention_split(t.pages->block_size);
    const PartialSoftmax merged{scratch_partials(t), value_dim};
    const PartialSoftmax partial{merged.data + tile_partial_floats(value_dim), value_dim};
    const int64_t first = t.first[0] / split_size, last = t.last[t.num_queries - 1] / split_size;
    attend_split(t, s, first, merged);
    for (int64_t split = first + 1; split <= last; ++split) {
        attend_split(t, s, split, partial);
        merge(merged, partial, t.num_queries);
    }
    finish(t, merged);
}

void attend_splits(const AttentionTile& t, int64_t first, int64_t end, float* partials, int64_t split_stride);
void attend_splits(const AttentionTile& t, int64_t first, int64_t end, float* partials, int64_t split_stride) {
    State s = init_state(t, end * attention_split(t.pages->block_size));
    for (int64_t split = first; split < end; ++split, partials += split_stride)
        attend_split(t, s, split, PartialSoftmax{partials, t.pages->value_dim()});
}

void merge_splits(const AttentionTile& t, float* partials, int64_t num_splits, int64_t split_stride);
void merge_splits(const AttentionTile& t, float* partials, int64_t num_splits, int64_t split_stride) {
    const int64_t value_dim = t.pages->value_dim();
    const PartialSoftmax merged{partials, value_dim};
    for (int64_t split = 1; split < num_splits; ++split)
        merge(merged, PartialSoftmax{partials + split * split_stride, value_dim}, t.num_queries);
    finish(t, merged);
}

}  // namespace quire::QUIRE_ISA
