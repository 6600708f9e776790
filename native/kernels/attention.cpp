// Attention over pages: a tile of queries walks the blocks of its sequence once, keeping a running softmax.
//
// Blocks are taken in spans of some 64 slots. For every span:
//     scores = q . keys;  m' = max(m, scores);  p = 2^(scores - m');
//     l = l * 2^(m - m') + p;  acc = acc * 2^(m - m') + p . values.
// After some 256 positions a part ends, and (m, l, acc) are folded with those of the parts before; then they begin
// anew. At the end, out = acc / l.
// Scores are in units of log2(e): the queries are multiplied by scale * log2(e) beforehand.
//
// The order of every sum, which depends on the query's own positions alone: a score over head columns in order; l in 8
// lanes (slot mod 8) over blocks in order, then the lanes; acc over slots in order. Slots a query may not see add an
// exact 0.

#include <math.h>

#include "ops.h"
#include "vec.h"

// Before a loop over sums that must stay in registers: compilers keep an array there only if its loops are unrolled
// early.
#define QUIRE_UNROLL _Pragma("GCC unroll 16")

namespace quire::QUIRE_ISA {
namespace {

constexpr float kLog2e = 1.44269504f;

int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// What is kept of each query between spans, and the scores of one span. The entries of `q` and `p` that belong to one
// head column or slot lie together, so that a turn of the inner loops reads them from one place.
struct State {
    float* q;       // [head_dim, 8]
    float* acc;     // [8, round_up(head_dim)], rows acc_stride apart
    float* scores;  // [8, slots of a span, each block's rounded up]
    float* p;       // [slots of a span, 8]
    int64_t acc_stride, score_stride;
    float most[kTileQueries];        // m
    F8 weight[kTileQueries];         // l, in lanes
    float correction[kTileQueries];  // 2^(m - m') of the span under way
};

// What the queries of a tile found in one part, or in all so far.
struct Findings {
    float* data;
    int64_t head_dim;

    int64_t stride() const { return round_up(head_dim) + kLanes; }
    float* acc(int i) const { return data + i * stride(); }
    float& most(int i) const { return acc(i)[round_up(head_dim)]; }        // m; -inf: it sees nothing there
    float& weight(int i) const { return acc(i)[round_up(head_dim) + 1]; }  // l
};

// The part of a span that some query of the tile sees.
struct Span {
    int64_t first_block, num_blocks;
    int64_t end;     // the position after the last one seen
    int64_t size;    // slots in a block
    int64_t padded;  // the same, rounded up: what a block takes in `scores` and `p`

    int64_t base(int64_t b) const { return (first_block + b) * size; }
    int64_t num_slots(int64_t b) const { return end - base(b) < size ? end - base(b) : size; }
};

// Few queries alone do not keep the vector unit busy: they take two vectors of slots or of columns at a time.
template <int N>
constexpr int kAtOnce = N <= 4 ? 2 : 1;

// What will be read soon, a line of each for every head column scored: a head's part of a block is a few kilobytes, too
// short for the CPU to foresee the next one.
template <class T>
struct Ahead {
    const T *keys, *values;
};

// Scores of queries [first, first + N) with C vectors of slots, from `keys` on.
template <int N, int C, class T>
void score_slots(const State& s, int first, const T* keys, int64_t stride, int64_t head_dim, int64_t column,
                 Ahead<T> ahead) {
    F8 sums[N * C];
    QUIRE_UNROLL
    for (int j = 0; j < N * C; ++j) sums[j] = splat(0.0f);
    const float* q = s.q + first;
    for (int64_t d = 0; d < head_dim; ++d, keys += stride, q += kTileQueries) {
        __builtin_prefetch(ahead.keys + d * stride);
        __builtin_prefetch(ahead.values + d * stride);
        F8 k[C];
        for (int c = 0; c < C; ++c) k[c] = load(keys + c * kLanes);
        QUIRE_UNROLL
        for (int j = 0; j < N * C; ++j) sums[j] = multiply_add(splat(q[j / C]), k[j % C], sums[j]);
    }
    float* scores = s.scores + first * s.score_stride + column;
    QUIRE_UNROLL
    for (int j = 0; j < N * C; ++j) store(scores + j / C * s.score_stride + j % C * kLanes, sums[j]);
}

template <int N, class T>
void score(const AttentionTile& t, const State& s, int first, const Span& span) {
    constexpr int64_t kWide = kAtOnce<N> * kLanes;
    for (int64_t b = 0; b < span.num_blocks; ++b) {
        const T* keys = (const T*)t.pages->keys(t.block_table[span.first_block + b], t.layer, t.kv_head);
        const int64_t head_dim = t.pages->head_dim, num_slots = round_up(span.num_slots(b)), column = b * span.padded;
        const int64_t last_block = t.last[t.num_queries - 1] / span.size;
        const int64_t next = span.first_block + b < last_block ? span.first_block + b + 1 : last_block;
        const Ahead<T> ahead{(const T*)t.pages->keys(t.block_table[next], t.layer, t.kv_head),
                             (const T*)t.pages->values(t.block_table[span.first_block + b], t.layer, t.kv_head)};
        int64_t slot = 0;
        for (; slot + kWide <= num_slots; slot += kWide)
            score_slots<N, kAtOnce<N>>(s, first, keys + slot, span.size, head_dim, column + slot, ahead);
        for (; slot < num_slots; slot += kLanes)
            score_slots<N, 1>(s, first, keys + slot, span.size, head_dim, column + slot, ahead);
    }
}

// Scores of query i become weights.
void soften(const AttentionTile& t, State& s, int i, const Span& span) {
    float* scores = s.scores + i * s.score_stride;
    const int64_t num_columns = span.num_blocks * span.padded;
    for (int64_t b = 0; b < span.num_blocks; ++b) {
        const int64_t begin = t.first[i] - span.base(b), end = t.last[i] + 1 - span.base(b);  // slots it sees
        float* block = scores + b * span.padded;
        for (int64_t slot = 0; slot < begin && slot < span.padded; ++slot) block[slot] = -INFINITY;
        for (int64_t slot = end < 0 ? 0 : end < span.size ? end : span.size; slot < span.padded; ++slot)
            block[slot] = -INFINITY;
    }
    F8 most = splat(s.most[i]);
    for (int64_t c = 0; c < num_columns; c += kLanes) most = max(most, load(scores + c));
    const float now = largest(most);
    float correction[kLanes];
    store(correction, exp2(splat(s.most[i] - now)));
    s.most[i] = now;
    s.correction[i] = correction[0];
    F8 weight = s.weight[i] * splat(correction[0]);
    for (int64_t c = 0; c < num_columns; c += kLanes) {
        const F8 p = exp2(load(scores + c) - splat(now));
        weight = weight + p;
        store(scores + c, p);
    }
    s.weight[i] = weight;
    for (int64_t c = 0; c < num_columns; ++c) s.p[c * kTileQueries + i] = scores[c];
}

// C vectors of columns from d on: acc = acc * correction + p . values. `Whole`: they lie within the head.
template <int N, int C, bool Whole, class T>
void accumulate_columns(const AttentionTile& t, const State& s, int first, const Span& span, int64_t d) {
    const int64_t head_dim = t.pages->head_dim;
    float* acc = s.acc + first * s.acc_stride + d;
    F8 sums[N * C];
    QUIRE_UNROLL
    for (int j = 0; j < N * C; ++j)
        sums[j] = load(acc + j / C * s.acc_stride + j % C * kLanes) * splat(s.correction[first + j / C]);
    for (int64_t b = 0; b < span.num_blocks; ++b) {
        const T* values = (const T*)t.pages->values(t.block_table[span.first_block + b], t.layer, t.kv_head) + d;
        const float* p = s.p + b * span.padded * kTileQueries + first;
        const int64_t num_slots = span.num_slots(b);
        for (int64_t slot = 0; slot < num_slots; ++slot, values += head_dim, p += kTileQueries) {
            F8 v[C];
            for (int c = 0; c < C; ++c) v[c] = Whole ? load(values + c * kLanes) : load_part(values, head_dim - d);
            QUIRE_UNROLL
            for (int j = 0; j < N * C; ++j) sums[j] = multiply_add(splat(p[j / C]), v[j % C], sums[j]);
        }
    }
    QUIRE_UNROLL
    for (int j = 0; j < N * C; ++j) store(acc + j / C * s.acc_stride + j % C * kLanes, sums[j]);
}

template <int N, class T>
void accumulate(const AttentionTile& t, const State& s, int first, const Span& span) {
    constexpr int64_t kWide = kAtOnce<N> * kLanes;
    const int64_t head_dim = t.pages->head_dim;
    int64_t d = 0;
    for (; d + kWide <= head_dim; d += kWide) accumulate_columns<N, kAtOnce<N>, true, T>(t, s, first, span, d);
    for (; d + kLanes <= head_dim; d += kLanes) accumulate_columns<N, 1, true, T>(t, s, first, span, d);
    if (d < head_dim) accumulate_columns<N, 1, false, T>(t, s, first, span, d);
}

// Queries [first, first + N) meet one span.
template <int N, class T>
void visit(const AttentionTile& t, State& s, int first, const Span& span) {
    score<N, T>(t, s, first, span);
    for (int i = first; i < first + N; ++i) soften(t, s, i, span);
    accumulate<N, T>(t, s, first, span);
}

// The spans of one part.
template <class T>
void walk(const AttentionTile& t, State& s, int64_t part) {
    using Visit = void (*)(const AttentionTile&, State&, int, const Span&);
    static constexpr Visit kVisit[] = {visit<1, T>, visit<2, T>, visit<3, T>, visit<4, T>,
                                       visit<5, T>, visit<6, T>, visit<7, T>, visit<8, T>};
    const int64_t size = t.pages->block_size, span_blocks = attention_span(size), span_size = span_blocks * size;
    const int64_t part_size = attention_part(size), part_end = (part + 1) * part_size;
    const int64_t last = t.last[t.num_queries - 1] < part_end ? t.last[t.num_queries - 1] : part_end - 1;
    const int64_t seen = t.first[0] / span_size * span_size;
    // Queries are ordered by token, so those that see something of a span are neighbours.
    int begin = 0, end = 0;
    for (int64_t start = seen > part * part_size ? seen : part * part_size; start <= last; start += span_size) {
        while (t.last[begin] < start) ++begin;
        while (end < t.num_queries && t.first[end] < start + span_size) ++end;
        const int64_t first_seen = t.first[begin] > start ? t.first[begin] : start;
        const int64_t seen_end = last + 1 < start + span_size ? last + 1 : start + span_size;
        const int64_t first_block = first_seen / size, end_block = (seen_end + size - 1) / size;
        kVisit[end - begin - 1](t, s, begin,
                                Span{first_block, end_block - first_block, seen_end, size, round_up(size)});
    }
}

// The queries, and room for what a walk needs; two findings lie behind it.
State prepare(const AttentionTile& t) {
    const int64_t head_dim = t.pages->head_dim, block_size = t.pages->block_size;
    State s;
    s.score_stride = attention_span(block_size) * round_up(block_size);
    s.q = t.scratch;
    s.scores = s.q + kTileQueries * head_dim;
    s.p = s.scores + kTileQueries * s.score_stride;
    for (int i = 0; i < t.num_queries; ++i)
        for (int64_t d = 0; d < head_dim; ++d) s.q[d * kTileQueries + i] = t.q[i][d] * (t.scale * kLog2e);
    return s;
}

void visit_part(const AttentionTile& t, State& s, int64_t part, const Findings& found) {
    s.acc = found.data;
    s.acc_stride = found.stride();
    for (int i = 0; i < t.num_queries; ++i) {
        for (int64_t d = 0; d < round_up(found.head_dim); ++d) found.acc(i)[d] = 0.0f;
        s.most[i] = -INFINITY;
        s.weight[i] = splat(0.0f);
    }
    if (t.pages->half)
        walk<Half>(t, s, part);
    else
        walk<float>(t, s, part);
    for (int i = 0; i < t.num_queries; ++i) {
        found.most(i) = s.most[i];
        found.weight(i) = sum(s.weight[i]);
    }
}

// total and then part, as if they had been one.
void fold(const Findings& total, const Findings& part, int num_queries) {
    for (int i = 0; i < num_queries; ++i) {
        const float before = total.most(i), here = part.most(i), now = here > before ? here : before;
        if (here == -INFINITY) continue;
        if (before == -INFINITY) {
            for (int64_t d = 0; d < total.stride(); ++d) total.acc(i)[d] = part.acc(i)[d];
            continue;
        }
        float kept[kLanes], added[kLanes];
        store(kept, exp2(splat(before - now)));
        store(added, exp2(splat(here - now)));
        for (int64_t d = 0; d < total.head_dim; d += kLanes) {
            const F8 old = load(total.acc(i) + d) * splat(kept[0]);
            store(total.acc(i) + d, multiply_add(splat(added[0]), load(part.acc(i) + d), old));
        }
        total.weight(i) = total.weight(i) * kept[0] + part.weight(i) * added[0];
        total.most(i) = now;
    }
}

void finish(const AttentionTile& t, const Findings& total) {
    for (int i = 0; i < t.num_queries; ++i) {
        const float factor = 1.0f / total.weight(i);
        for (int64_t d = 0; d < total.head_dim; ++d) t.out[i][d] = total.acc(i)[d] * factor;
    }
}

}  // namespace

void attend(const AttentionTile& t);
void attend(const AttentionTile& t) {
    State s = prepare(t);
    const int64_t head_dim = t.pages->head_dim, part_size = attention_part(t.pages->block_size);
    const Findings total{s.p + kTileQueries * s.score_stride, head_dim};
    const Findings found{total.data + attention_findings(head_dim), head_dim};
    const int64_t first = t.first[0] / part_size, last = t.last[t.num_queries - 1] / part_size;
    visit_part(t, s, first, total);
    for (int64_t part = first + 1; part <= last; ++part) {
        visit_part(t, s, part, found);
        fold(total, found, t.num_queries);
    }
    finish(t, total);
}

void attend_part(const AttentionTile& t, int64_t part, float* findings);
void attend_part(const AttentionTile& t, int64_t part, float* findings) {
    State s = prepare(t);
    visit_part(t, s, part, Findings{findings, t.pages->head_dim});
}

void fold_parts(const AttentionTile& t, float* findings, int64_t num_parts);
void fold_parts(const AttentionTile& t, float* findings, int64_t num_parts) {
    const int64_t head_dim = t.pages->head_dim;
    const Findings total{findings, head_dim};
    for (int64_t part = 1; part < num_parts; ++part)
        fold(total, Findings{findings + part * attention_findings(head_dim), head_dim}, t.num_queries);
    finish(t, total);
}

}  // namespace quire::QUIRE_ISA
