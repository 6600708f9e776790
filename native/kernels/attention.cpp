// Attention over pages: a tile of queries walks the blocks of its sequence once, keeping a running softmax.
//
// Blocks are taken in spans of some 64 slots. For every span:
//     scores = q . keys, capped and sloped where that is asked for;  m' = max(m, scores);  p = 2^(scores - m');
//     l = l * 2^(m - m') + p;  acc = acc * 2^(m - m') + p . values.
// After some 256 positions a part ends, and (m, l, acc) are folded with those of the parts before; then they begin
// anew. At the end, out = acc / l.
// Scores are in units of log2(e): the queries are multiplied by scale * log2(e) beforehand.
//
// The order of every sum, which depends on the query's own positions alone: a score over head columns in order, in
// one sum or more (see Scoring); l in the lanes of a vector (slot mod kLanes) over blocks in order, then the lanes; acc
// over slots in order. Slots a query may not see add an exact 0.

#include "attention_float.h"
#include "attention_int8.h"
#include "attention_latent.h"

namespace quire::QUIRE_ISA {
namespace {

// The spans of one part, in pages P: FloatPages, Int8Pages or LatentPages.
template <class P>
void walk(const AttentionTile& t, State& s, int64_t part) {
    const int64_t size = t.pages->block_size, span_size = attention_span(size) * size;
    const int64_t part_size = attention_part(size), part_end = (part + 1) * part_size;
    const int64_t last = t.last[t.num_queries - 1] < part_end ? t.last[t.num_queries - 1] : part_end - 1;
    const int64_t seen = t.first[0] / span_size * span_size;
    // Queries are ordered by token, so those that see something of a span are neighbours.
    int begin = 0, end = 0;
    for (int64_t start = seen > part * part_size ? seen : part * part_size; start <= last; start += span_size) {
        while (t.last[begin] < start) ++begin;
        while (end < t.num_queries && t.first[end] < start + span_size) ++end;
        const bool shared = P::kMustShare || begin / kQueriesAtOnce < (end - 1) / kQueriesAtOnce;
        const auto first_block = [&](int query) { return (t.first[query] > start ? t.first[query] : start) / size; };
        const auto seen_end = [&](int query) {
            return t.last[query] + 1 < start + span_size ? t.last[query] + 1 : start + span_size;
        };
        if (shared) P::share_keys(t, s, first_block(begin), (seen_end(end - 1) + size - 1) / size);
        for (int first = begin; first < end;) {
            const int next = (first / kQueriesAtOnce + 1) * kQueriesAtOnce, stop = next < end ? next : end;
            const int64_t block = first_block(first), end_position = seen_end(stop - 1);
            const Span span{block, (end_position + size - 1) / size - block, end_position, size, round_up(size)};
            P::visit(t, s, first, stop, span, shared);
            first = stop;
        }
    }
}

// f(P{}) for the type of the pages.
template <class F>
void with_pages(const Pages& pages, const F& f) {
    switch (pages.type) {
        case PageType::Float16: return pages.latent ? f(LatentPages<Half>{}) : f(FloatPages<Half>{});
        case PageType::Bfloat16: return pages.latent ? f(LatentPages<Bfloat>{}) : f(FloatPages<Bfloat>{});
        case PageType::Float32: return pages.latent ? f(LatentPages<float>{}) : f(FloatPages<float>{});
        case PageType::Int8: return f(Int8Pages{});
    }
}

// The queries, and room for what a walk up to `end` needs; findings_of lie behind it.
State prepare(const AttentionTile& t, int64_t end) {
    const int64_t head_dim = t.pages->head_dim, block_size = t.pages->block_size;
    const int64_t span_blocks = attention_span(block_size);
    State s;
    s.head = t.pages->keys(0, t.layer, t.kv_head);
    s.to_values = t.pages->values(0, t.layer, t.kv_head) - s.head;
    s.block_bytes = t.pages->block_bytes();
    s.table = t.block_table;
    s.span_blocks = span_blocks;
    s.num_groups = (t.num_queries + kQueriesAtOnce - 1) / kQueriesAtOnce;
    s.column_share = (block_size + s.num_groups - 1) / s.num_groups;
    s.slot_share = (kLanes + s.num_groups - 1) / s.num_groups;
    s.last_block = (t.last[t.num_queries - 1] < end ? t.last[t.num_queries - 1] : end - 1) / block_size;
    s.score_stride = span_blocks * round_up(block_size);
    s.q = t.scratch;
    s.scores = s.q + kTileQueries * round_up(head_dim);
    s.p = s.scores + kQueriesAtOnce * s.score_stride;
    s.keys = s.scores + 2 * kQueriesAtOnce * s.score_stride;
    with_pages(*t.pages, [&](auto pages) { pages.load_queries(t, s); });
    return s;
}

float* findings_of(const AttentionTile& t) {
    return t.scratch + attention_scratch(t.pages->head_dim, t.pages->block_size) -
           2 * attention_findings(t.pages->head_dim);
}

void visit_part(const AttentionTile& t, State& s, int64_t part, const Findings& found) {
    s.acc = found.data;
    s.acc_stride = found.stride();
    for (int i = 0; i < t.num_queries; ++i) {
        for (int64_t d = 0; d < round_up(found.value_dim); ++d) found.acc(i)[d] = 0.0f;
        s.most[i] = -INFINITY;
        s.weight[i] = splat(0.0f);
    }
    with_pages(*t.pages, [&](auto pages) { walk<decltype(pages)>(t, s, part); });
    for (int i = 0; i < t.num_queries; ++i) {
        found.most(i) = s.most[i];
        found.weight(i) = sum(s.weight[i]);
    }
}

// total and then part, as if they had been one.
void fold(const Findings& total, const Findings& part, int num_queries) {
    const int64_t value_dim = total.value_dim;
    for (int first = 0; first < num_queries; first += kLanes) {
        const int end = num_queries - first < kLanes ? num_queries : first + kLanes;
        float before[kLanes] = {}, here[kLanes] = {}, now[kLanes], kept[kLanes], added[kLanes];
        for (int i = first; i < end; ++i) before[i - first] = total.most(i), here[i - first] = part.most(i);
        store(now, max(load(before), load(here)));
        Floats factors[] = {load(before) - load(now), load(here) - load(now)};
        exp2_each(factors);
        store(kept, factors[0]);
        store(added, factors[1]);
        for (int i = first; i < end; ++i) {
            if (here[i - first] == -INFINITY) continue;
            const float keep = kept[i - first], add = added[i - first], *from = part.acc(i);
            float* to = total.acc(i);
            for (int64_t d = 0; d < value_dim; d += kLanes)
                store(to + d, multiply_add(splat(add), load(from + d), load(to + d) * splat(keep)));
            total.weight(i) = total.weight(i) * keep + part.weight(i) * add;
            total.most(i) = now[i - first];
        }
    }
}

void finish(const AttentionTile& t, const Findings& total) {
    for (int i = 0; i < t.num_queries; ++i) {
        float weight = total.weight(i);
        if (t.has_sinks) {
            float sunk[kLanes];
            store(sunk, exp2(splat(t.sink[i] * kLog2e - total.most(i))));
            weight += sunk[0];
        }
        const float factor = 1.0f / weight;
        for (int64_t d = 0; d < total.value_dim; ++d) t.out[i][d] = total.acc(i)[d] * factor;
    }
}

}  // namespace

void attend(const AttentionTile& t);
void attend(const AttentionTile& t) {
    State s = prepare(t, INT64_MAX);
    const int64_t value_dim = t.pages->value_dim(), part_size = attention_part(t.pages->block_size);
    const Findings total{findings_of(t), value_dim};
    const Findings found{total.data + attention_findings(value_dim), value_dim};
    const int64_t first = t.first[0] / part_size, last = t.last[t.num_queries - 1] / part_size;
    visit_part(t, s, first, total);
    for (int64_t part = first + 1; part <= last; ++part) {
        visit_part(t, s, part, found);
        fold(total, found, t.num_queries);
    }
    finish(t, total);
}

void attend_parts(const AttentionTile& t, int64_t first, int64_t end, float* findings, int64_t part_stride);
void attend_parts(const AttentionTile& t, int64_t first, int64_t end, float* findings, int64_t part_stride) {
    State s = prepare(t, end * attention_part(t.pages->block_size));
    for (int64_t part = first; part < end; ++part, findings += part_stride)
        visit_part(t, s, part, Findings{findings, t.pages->value_dim()});
}

void fold_parts(const AttentionTile& t, float* findings, int64_t num_parts, int64_t part_stride);
void fold_parts(const AttentionTile& t, float* findings, int64_t num_parts, int64_t part_stride) {
    const int64_t value_dim = t.pages->value_dim();
    const Findings total{findings, value_dim};
    for (int64_t part = 1; part < num_parts; ++part)
        fold(total, Findings{findings + part * part_stride, value_dim}, t.num_queries);
    finish(t, total);
}

}  // namespace quire::QUIRE_ISA
