// Attention over pages: a tile of queries walks the blocks of its sequence once, keeping a running softmax.
//
// For every block:  scores = q . keys;  m' = max(m, scores);  p = 2^(scores - m');
//                   l = l * 2^(m - m') + p;  acc = acc * 2^(m - m') + p . values.   At the end, out = acc / l.
// Scores are in units of log2(e): the queries are multiplied by scale * log2(e) beforehand.
//
// The order of every sum, which depends on the query's own positions alone: a score over head columns in order; l in 8 lanes
// (slot mod 8) over blocks in order, then the lanes; acc over slots in order. Slots a query may not see add an exact 0.

#include "ops.h"

#include <math.h>

#include "vec.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float kLog2e = 1.44269504f;

int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// What is kept of each query between blocks. Columns of `q` and `p` belonging to one head column or slot lie together, so
// that a step of the inner loops reads them from one place.
struct State {
    float* q;       // [head_dim, 8]
    float* acc;     // [8, round_up(head_dim)]
    float* scores;  // [8, round_up(block_size)]
    float* p;       // [block_size, 8]
    int64_t acc_stride, score_stride;
    float most[kTileQueries];
    float correction[kTileQueries];
    F8 weight[kTileQueries];  // l, in lanes
};

// Scores of queries [first, first + N) with slots [0, num_slots).
template <int N, class T>
void score(const State& s, int first, const T* keys, int64_t head_dim, int64_t block_size, int64_t num_slots) {
    for (int64_t slot = 0; slot < num_slots; slot += kLanes) {
        F8 sums[N];
        for (int i = 0; i < N; ++i) sums[i] = splat(0.0f);
        for (int64_t d = 0; d < head_dim; ++d) {
            const F8 k = load(keys + d * block_size + slot);
            const float* q = s.q + d * kTileQueries + first;
            for (int i = 0; i < N; ++i) sums[i] = multiply_add(splat(q[i]), k, sums[i]);
        }
        for (int i = 0; i < N; ++i) store(s.scores + (first + i) * s.score_stride + slot, sums[i]);
    }
}

// acc = acc * correction + p . values, for queries [first, first + N) and slots [0, num_slots).
template <int N, class T>
void accumulate(const State& s, int first, const T* values, int64_t head_dim, int64_t num_slots) {
    for (int64_t d = 0; d < head_dim; d += kLanes) {
        const bool whole = d + kLanes <= head_dim;
        F8 sums[N];
        for (int i = 0; i < N; ++i)
            sums[i] = load(s.acc + (first + i) * s.acc_stride + d) * splat(s.correction[first + i]);
        for (int64_t slot = 0; slot < num_slots; ++slot) {
            const T* row = values + slot * head_dim + d;
            const F8 v = whole ? load(row) : load_part(row, head_dim - d);
            const float* p = s.p + slot * kTileQueries + first;
            for (int i = 0; i < N; ++i) sums[i] = multiply_add(splat(p[i]), v, sums[i]);
        }
        for (int i = 0; i < N; ++i) store(s.acc + (first + i) * s.acc_stride + d, sums[i]);
    }
}

// Scores become weights: query i sees slots [begin, end) of this block.
void soften(State& s, int i, int64_t begin, int64_t end, int64_t num_slots) {
    float* scores = s.scores + i * s.score_stride;
    const int64_t padded = round_up(num_slots);
    for (int64_t slot = 0; slot < begin; ++slot) scores[slot] = -INFINITY;
    for (int64_t slot = end; slot < padded; ++slot) scores[slot] = -INFINITY;
    F8 most = splat(s.most[i]);
    for (int64_t slot = 0; slot < padded; slot += kLanes) most = max(most, load(scores + slot));
    const float now = largest(most);
    float correction[kLanes];
    store(correction, exp2(splat(s.most[i] - now)));
    s.most[i] = now;
    s.correction[i] = correction[0];
    s.weight[i] = s.weight[i] * splat(correction[0]);
    for (int64_t slot = 0; slot < padded; slot += kLanes) {
        const F8 p = exp2(load(scores + slot) - splat(now));
        s.weight[i] = s.weight[i] + p;
        store(scores + slot, p);
    }
    for (int64_t slot = 0; slot < num_slots; ++slot) s.p[slot * kTileQueries + i] = scores[slot];
}

// Queries [first, first + N) meet one block; position `base` is its slot 0.
template <int N, class T>
void visit_block(const AttentionTile& t, State& s, int first, int64_t block, int64_t base) {
    const Pages& pages = *t.pages;
    const int64_t left = t.last[first + N - 1] + 1 - base;
    const int64_t num_slots = left < pages.block_size ? left : pages.block_size;
    score<N>(s, first, (const T*)pages.keys(block, t.layer, t.kv_head), pages.head_dim, pages.block_size, num_slots);
    for (int i = first; i < first + N; ++i) {
        const int64_t begin = t.first[i] > base ? t.first[i] - base : 0;
        const int64_t end = t.last[i] + 1 - base < num_slots ? t.last[i] + 1 - base : num_slots;
        soften(s, i, begin, end, num_slots);
    }
    accumulate<N>(s, first, (const T*)pages.values(block, t.layer, t.kv_head), pages.head_dim, num_slots);
}

template <class T>
void walk(const AttentionTile& t, State& s) {
    using Visit = void (*)(const AttentionTile&, State&, int, int64_t, int64_t);
    static constexpr Visit kVisit[] = {visit_block<1, T>, visit_block<2, T>, visit_block<3, T>, visit_block<4, T>,
                                       visit_block<5, T>, visit_block<6, T>, visit_block<7, T>, visit_block<8, T>};
    const int64_t size = t.pages->block_size;
    // Queries are ordered by token, so those that see something of a block are neighbours.
    int begin = 0, end = 0;
    for (int64_t b = t.first[0] / size; b * size <= t.last[t.num_queries - 1]; ++b) {
        while (begin < t.num_queries && t.last[begin] < b * size) ++begin;
        while (end < t.num_queries && t.first[end] < (b + 1) * size) ++end;
        kVisit[end - begin - 1](t, s, begin, t.block_table[b], b * size);
    }
}

}  // namespace

void attend(const AttentionTile& t);
void attend(const AttentionTile& t) {
    const int64_t head_dim = t.pages->head_dim, block_size = t.pages->block_size;
    State s;
    s.acc_stride = round_up(head_dim);
    s.score_stride = round_up(block_size);
    s.q = t.scratch;
    s.acc = s.q + kTileQueries * head_dim;
    s.scores = s.acc + kTileQueries * s.acc_stride;
    s.p = s.scores + kTileQueries * s.score_stride;
    for (int i = 0; i < t.num_queries; ++i) {
        for (int64_t d = 0; d < head_dim; ++d) s.q[d * kTileQueries + i] = t.q[i][d] * (t.scale * kLog2e);
        for (int64_t d = 0; d < s.acc_stride; ++d) s.acc[i * s.acc_stride + d] = 0.0f;
        s.most[i] = -INFINITY;
        s.weight[i] = splat(0.0f);
    }
    if (t.pages->half)
        walk<Half>(t, s);
    else
        walk<float>(t, s);
    for (int i = 0; i < t.num_queries; ++i) {
        const float factor = 1.0f / sum(s.weight[i]);
        for (int64_t d = 0; d < head_dim; ++d) t.out[i][d] = s.acc[i * s.acc_stride + d] * factor;
    }
}

}  // namespace quire::QUIRE_ISA
