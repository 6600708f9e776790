// Attention to latent pages (see Pages in ops.h): one vector a token, read as key and as value.
//
// Values are read from the pages. Keys want their slots side by side, so those of a span are turned once for all
// queries of a tile: many heads share them, and turning costs a fiftieth of what a tile of 32 queries then does with
// them.
#pragma once

#include "attention_float.h"

namespace quire::QUIRE_ISA {
namespace {

template <class T>
struct LatentPages {
    using Key = typename Scoring<T>::Query;  // as keys lie in `s.keys`: [blocks of a span, head_dim, block_size]
    static constexpr bool kMustShare = true;

    static void load_queries(const AttentionTile& t, State& s) {
        const int64_t latent = t.pages->latent;
        for (int first = 0; first < t.num_queries; first += kQueriesAtOnce) {
            load_query_columns<T>(t, s, first, t.q, latent, 0);
            load_query_columns<T>(t, s, first, t.turned, t.pages->head_dim - latent, latent);
        }
    }

    static Key* keys_of(const AttentionTile& t, const State& s, int64_t block) {
        const int64_t size = t.pages->block_size;
        return (Key*)s.keys + block % attention_span(size) * t.pages->head_dim * size;
    }

    static void share_keys(const AttentionTile& t, const State& s, int64_t first_block, int64_t end_block) {
        const int64_t head_dim = t.pages->head_dim, size = t.pages->block_size;
        for (int64_t block = first_block; block < end_block; ++block) {
            const T* rows = (const T*)s.keys_at(block);
            for (int64_t slot = 0; slot < size; slot += kLanes)
                turn(rows + slot * head_dim, size - slot < kLanes ? size - slot : kLanes, head_dim,
                     keys_of(t, s, block) + slot, size);
        }
    }

    // rows [count, head_dim] -> to [head_dim, count], `stride` apart.
    static void turn(const T* rows, int64_t count, int64_t head_dim, Key* to, int64_t stride) {
        for (int64_t d = 0; d < head_dim; d += kLanes) {
            const int64_t n = head_dim - d < kLanes ? head_dim - d : kLanes;
            Floats from[kLanes] = {};
            for (int64_t i = 0; i < count; ++i) {
                const T* row = rows + i * head_dim + d;
                from[i] = n == kLanes ? load(row) : load_part(row, n);
            }
            Key columns[kLanes * kLanes];
            store_columns(columns, from);
            for (int64_t j = 0; j < n; ++j) {
                Key* column = to + (d + j) * stride;
                if (count == kLanes)  // a size that the compiler knows
                    memcpy(column, columns + j * kLanes, kLanes * sizeof(Key));
                else
                    memcpy(column, columns + j * kLanes, count * sizeof(Key));
            }
        }
    }

    template <int N>
    static void meet(const AttentionTile& t, State& s, int first, const Span& span) {
        const int64_t head_dim = t.pages->head_dim;
        const Key* q = Scoring<T>::query_at(s.q, first, head_dim);
        for (int64_t b = 0; b < span.num_blocks; ++b) {
            const Key* keys = (const Key*)keys_of(t, s, span.first_block + b);
            score_block<N>(s, q, keys, round_up(span.num_slots(b)), span.size, head_dim, b * span.padded,
                           {kAlwaysFetches<N, Key> ? keys : nullptr});
        }
        take_values<N, T>(t, s, first, span);
    }

    static void visit(const AttentionTile& t, State& s, int first, int stop, const Span& span, bool) {
        using Visit = void (*)(const AttentionTile&, State&, int, const Span&);
        static constexpr Visit kVisit[] = {meet<1>, meet<2>, meet<3>, meet<4>, meet<5>, meet<6>, meet<7>, meet<8>};
        kVisit[stop - first - 1](t, s, first, span);
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
