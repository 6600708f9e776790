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

#include <utility>

#include "ops.h"
#include "vec.h"

// Before a loop over sums that must stay in registers: compilers keep an array there only if its loops are unrolled
// early.
#define QUIRE_UNROLL _Pragma("GCC unroll 16")
#define QUIRE_INLINE inline __attribute__((always_inline))

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
    static const float* load_weights(const float* p) { return p; }  // of 8 queries
    template <int Query>
    static Sum add(const float* weights, F8 values, Sum sum) {
        return multiply_add(splat(weights[Query]), values, sum);
    }
    static F8 total(Sum sum) { return sum; }
    static F8 weigh(F8 score) { return exp2(score); }
};
#ifdef QUIRE_HALF_MATH
template <>
struct Weighing<Half> {
    using Weight = Half;
    using Sum = H8;
    static Sum zero() { return zero_halves(); }
    static H8 load_values(const Half* p) { return load_halves(p); }
    static H8 load_values(const Half* p, int64_t n) { return to_halves(load_part(p, n)); }
    static H8 load_weights(const Half* p) { return load_halves(p); }
    template <int Query>
    static Sum add(H8 weights, H8 values, Sum sum) {
        return multiply_add<Query>(weights, values, sum);
    }
    static F8 total(Sum sum) { return to_floats(sum); }
    static F8 weigh(F8 score) { return coarse_exp2(score); }
};
#endif

// What is kept of each query between spans, and what belongs to one span. The entries of `q` and `p` that belong to one
// head column or slot lie together, so that a turn of the inner loops reads them from one place.
struct State {
    float* q;       // [32 / 8, head_dim, 8]
    float* acc;     // [32, round_up(head_dim)], rows acc_stride apart
    float* keys;    // [blocks of a span, head_dim, block_size]: those of the span, as floats
    float* scores;  // [8, slots of a span, each block's rounded up]
    void* p;        // [slots of a span, 8] of Weighing<T>::Weight
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

// The part of a span that some queries see.
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
constexpr int kVectors = N <= 4 ? 2 : 1;

// What will be read soon, a line of each for every head column scored: a head's part of a block is a few kilobytes, too
// short for the CPU to foresee the next one.
template <class T>
struct Ahead {
    const T *keys, *values;
};

// Scores of N queries with C vectors of slots, from `keys` on.
template <int N, int C, class T>
void score_slots(const State& s, const float* q, const T* keys, int64_t stride, int64_t head_dim, int64_t column,
                 Ahead<T> ahead) {
    F8 sums[N * C];
    QUIRE_UNROLL
    for (int j = 0; j < N * C; ++j) sums[j] = splat(0.0f);
    for (int64_t d = 0; d < head_dim; ++d, keys += stride, q += kQueriesAtOnce) {
        if (ahead.keys) {
            __builtin_prefetch(ahead.keys + d * stride);
            __builtin_prefetch(ahead.values + d * stride);
        }
        F8 k[C];
        for (int c = 0; c < C; ++c) k[c] = load(keys + c * kLanes);
        QUIRE_UNROLL
        for (int j = 0; j < N * C; ++j) sums[j] = multiply_add(splat(q[j / C]), k[j % C], sums[j]);
    }
    float* scores = s.scores + column;
    QUIRE_UNROLL
    for (int j = 0; j < N * C; ++j) store(scores + j / C * s.score_stride + j % C * kLanes, sums[j]);
}

// Scores with one block of the span.
template <int N, class T>
void score_block(const State& s, const float* q, const T* keys, int64_t num_slots, int64_t stride, int64_t head_dim,
                 int64_t column, Ahead<T> ahead) {
    constexpr int64_t kWide = kVectors<N> * kLanes;
    int64_t slot = 0;
    for (; slot + kWide <= num_slots; slot += kWide)
        score_slots<N, kVectors<N>>(s, q, keys + slot, stride, head_dim, column + slot, ahead);
    for (; slot < num_slots; slot += kLanes)
        score_slots<N, 1>(s, q, keys + slot, stride, head_dim, column + slot, ahead);
}

// Keys are read from the pages, or where other queries of the tile will read them too, as floats from `s.keys`.
template <int N, class T>
void score(const AttentionTile& t, const State& s, int first, const Span& span, bool shared) {
    const int64_t head_dim = t.pages->head_dim;
    const float* q = s.q + first / kQueriesAtOnce * kQueriesAtOnce * head_dim + first % kQueriesAtOnce;
    const int64_t last_block = t.last[t.num_queries - 1] / span.size;
    const int64_t skipped = span.first_block % attention_span(span.size);  // blocks of the span that nobody here sees
    for (int64_t b = 0; b < span.num_blocks; ++b) {
        const int64_t num_slots = round_up(span.num_slots(b)), column = b * span.padded;
        if (shared) {
            score_block<N>(s, q, s.keys + (skipped + b) * head_dim * span.size, num_slots, span.size, head_dim, column,
                           Ahead<float>{});
            continue;
        }
        const int64_t block = span.first_block + b, next = block < last_block ? block + 1 : last_block;
        const auto page = [&](int64_t at) { return (const T*)t.pages->keys(t.block_table[at], t.layer, t.kv_head); };
        const Ahead<T> ahead{page(next), (const T*)t.pages->values(t.block_table[block], t.layer, t.kv_head)};
        score_block<N>(s, q, page(block), num_slots, span.size, head_dim, column, ahead);
    }
}

// Blocks [first, end) of the span, as floats into `s.keys`.
template <class T>
void convert_keys(const AttentionTile& t, const State& s, int64_t first, int64_t end) {
    const int64_t n = t.pages->head_dim * t.pages->block_size, skipped = first % attention_span(t.pages->block_size);
    float* to = s.keys + skipped * n;
    for (int64_t block = first; block < end; ++block, to += n) {
        const T* keys = (const T*)t.pages->keys(t.block_table[block], t.layer, t.kv_head);
        const int64_t whole = n / kLanes * kLanes;
        for (int64_t i = 0; i < whole; i += kLanes) store(to + i, load(keys + i));
        if (whole < n) store_part(to + whole, load_part(keys + whole, n - whole), n - whole);
    }
}

// Scores of query `first + i` become weights, in place.
template <class T>
void soften(const AttentionTile& t, State& s, int first, int i, const Span& span) {
    const int query = first + i;
    float* scores = s.scores + i * s.score_stride;
    const int64_t num_columns = span.num_blocks * span.padded;
    for (int64_t b = 0; b < span.num_blocks; ++b) {
        const int64_t begin = t.first[query] - span.base(b), end = t.last[query] + 1 - span.base(b);  // slots it sees
        float* block = scores + b * span.padded;
        for (int64_t slot = 0; slot < begin && slot < span.padded; ++slot) block[slot] = -INFINITY;
        for (int64_t slot = end < 0 ? 0 : end < span.size ? end : span.size; slot < span.padded; ++slot)
            block[slot] = -INFINITY;
    }
    F8 most = splat(s.most[query]);
    for (int64_t c = 0; c < num_columns; c += kLanes) most = max(most, load(scores + c));
    const float now = largest(most);
    float correction[kLanes];
    store(correction, exp2(splat(s.most[query] - now)));
    s.most[query] = now;
    s.correction[query] = correction[0];
    F8 weight = s.weight[query] * splat(correction[0]);
    for (int64_t c = 0; c < num_columns; c += kLanes) {
        const F8 p = Weighing<T>::weigh(load(scores + c) - splat(now));
        weight = weight + p;
        store(scores + c, p);
    }
    s.weight[query] = weight;
}

// The weights of N queries, as `accumulate` reads them.
template <int N, class Weight>
void gather(const State& s, const Span& span, Weight* p) {
    F8 rows[kQueriesAtOnce];
    for (int i = N; i < kQueriesAtOnce; ++i) rows[i] = splat(0.0f);
    for (int64_t c = 0; c < span.num_blocks * span.padded; c += kLanes) {
        for (int i = 0; i < N; ++i) rows[i] = load(s.scores + i * s.score_stride + c);
        store_columns(p + c * kQueriesAtOnce, rows);
    }
}

// C vectors of columns from d on: acc = acc * factor + p . values, for up to 64 slots of each block from `begin` on.
// `Whole`: the columns lie within the head.
template <int N, int C, bool Whole, class T>
void accumulate_columns(const AttentionTile& t, const State& s, int first, const Span& span, int64_t begin, int64_t d) {
    using W = Weighing<T>;
    const int64_t head_dim = t.pages->head_dim;
    float* acc = s.acc + first * s.acc_stride + d;
    typename W::Sum sums[N * C];
    QUIRE_UNROLL
    for (int j = 0; j < N * C; ++j) sums[j] = W::zero();
    for (int64_t b = 0; b < span.num_blocks; ++b) {
        const T* values = (const T*)t.pages->values(t.block_table[span.first_block + b], t.layer, t.kv_head);
        const auto* p = (const typename W::Weight*)s.p + (b * span.padded + begin) * kQueriesAtOnce;
        const int64_t end = span.num_slots(b) < begin + kSlotsAtOnce ? span.num_slots(b) : begin + kSlotsAtOnce;
        values += begin * head_dim + d;
        for (int64_t slot = begin; slot < end; ++slot, values += head_dim, p += kQueriesAtOnce) {
            decltype(W::load_values(values)) v[C];
            for (int c = 0; c < C; ++c)
                v[c] = Whole ? W::load_values(values + c * kLanes) : W::load_values(values, head_dim - d);
            const auto weights = W::load_weights(p);
            each<N * C>([&](auto j) { sums[j] = W::template add<j / C>(weights, v[j % C], sums[j]); });
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
    const int64_t head_dim = t.pages->head_dim;
    for (int64_t begin = 0; begin < span.num_slots(0); begin += kSlotsAtOnce) {
        int64_t d = 0;
        for (; d + kWide <= head_dim; d += kWide) accumulate_columns<N, kAtOnce, true, T>(t, s, first, span, begin, d);
        for (; d + kLanes <= head_dim; d += kLanes) accumulate_columns<N, 1, true, T>(t, s, first, span, begin, d);
        if (d < head_dim) accumulate_columns<N, 1, false, T>(t, s, first, span, begin, d);
    }
}

// Queries [first, first + N), which lie in one vector, meet one span.
template <int N, class T>
void visit(const AttentionTile& t, State& s, int first, const Span& span, bool shared) {
    score<N, T>(t, s, first, span, shared);
    for (int i = 0; i < N; ++i) soften<T>(t, s, first, i, span);
    gather<N>(s, span, (typename Weighing<T>::Weight*)s.p);
    accumulate<N, T>(t, s, first, span);
}

// The spans of one part.
template <class T>
void walk(const AttentionTile& t, State& s, int64_t part) {
    using Visit = void (*)(const AttentionTile&, State&, int, const Span&, bool);
    static constexpr Visit kVisit[] = {visit<1, T>, visit<2, T>, visit<3, T>, visit<4, T>,
                                       visit<5, T>, visit<6, T>, visit<7, T>, visit<8, T>};
    const int64_t size = t.pages->block_size, span_size = attention_span(size) * size;
    const int64_t part_size = attention_part(size), part_end = (part + 1) * part_size;
    const int64_t last = t.last[t.num_queries - 1] < part_end ? t.last[t.num_queries - 1] : part_end - 1;
    const int64_t seen = t.first[0] / span_size * span_size;
    // Queries are ordered by token, so those that see something of a span are neighbours.
    int begin = 0, end = 0;
    for (int64_t start = seen > part * part_size ? seen : part * part_size; start <= last; start += span_size) {
        while (t.last[begin] < start) ++begin;
        while (end < t.num_queries && t.first[end] < start + span_size) ++end;
        const bool shared = begin / kQueriesAtOnce < (end - 1) / kQueriesAtOnce;
        const auto first_block = [&](int query) { return (t.first[query] > start ? t.first[query] : start) / size; };
        const auto seen_end = [&](int query) {
            return t.last[query] + 1 < start + span_size ? t.last[query] + 1 : start + span_size;
        };
        if (shared) convert_keys<T>(t, s, first_block(begin), (seen_end(end - 1) + size - 1) / size);
        for (int first = begin; first < end;) {
            const int next = (first / kQueriesAtOnce + 1) * kQueriesAtOnce, stop = next < end ? next : end;
            const int64_t block = first_block(first), end_position = seen_end(stop - 1);
            const Span span{block, (end_position + size - 1) / size - block, end_position, size, round_up(size)};
            kVisit[stop - first - 1](t, s, first, span, shared);
            first = stop;
        }
    }
}

// The queries, and room for what a walk needs; findings_of lie behind it.
State prepare(const AttentionTile& t) {
    const int64_t head_dim = t.pages->head_dim, block_size = t.pages->block_size;
    const int64_t span_blocks = attention_span(block_size);
    State s;
    s.score_stride = span_blocks * round_up(block_size);
    s.q = t.scratch;
    s.scores = s.q + kTileQueries * head_dim;
    s.p = s.scores + kQueriesAtOnce * s.score_stride;
    s.keys = s.scores + 2 * kQueriesAtOnce * s.score_stride;
    for (int i = 0; i < t.num_queries; ++i) {
        float* q = s.q + i / kQueriesAtOnce * kQueriesAtOnce * head_dim + i % kQueriesAtOnce;
        for (int64_t d = 0; d < head_dim; ++d) q[d * kQueriesAtOnce] = t.q[i][d] * (t.scale * kLog2e);
    }
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
    const Findings total{findings_of(t), head_dim};
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
