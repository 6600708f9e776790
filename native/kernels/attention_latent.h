// Attention over latent pages (MLA, see Pages in ops.h): one vector per token, read as key and as value.
//
// Values are read from the pages. Scores need consecutive slots of keys in a vector, so the keys of a span are
// transposed once for all queries of a tile. For a tile of 32 queries, this takes 2 % of the time.
#pragma once

#include "attention_float.h"

namespace quire::QUIRE_ISA {
namespace {

template <class T>
struct LatentPages {
    using Key = typename QkMath<T>::Query;  // of s.keys [blocks of a span, head_dim, block_size]
    static constexpr bool kAlwaysSharesKeys = true;

    static void load_queries(const AttentionTile& t, State& s) {
        const int64_t latent = t.pages->latent;
        for (int first = 0; first < t.num_queries; first += kQueriesAtOnce) {
            load_query_columns<T>(t, s, first, t.q, latent, 0);
            load_query_columns<T>(t, s, first, t.q_rope, t.pages->head_dim - latent, latent);
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
                transpose(rows + slot * head_dim, size - slot < kLanes ? size - slot : kLanes, head_dim,
                          keys_of(t, s, block) + slot, size);
        }
    }

    // rows [count, head_dim] -> to [head_dim, count], `stride` apart.
    static void transpose(const T* rows, int64_t count, int64_t head_dim, Key* to, int64_t stride) {
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
                if (count == kLanes)  // a constant size
                    memcpy(column, columns + j * kLanes, kLanes * sizeof(Key));
                else
                    memcpy(column, columns + j * kLanes, count * sizeof(Key));
            }
        }
    }

    template <int N>
    static void attend_queries(const AttentionTile& t, State& s, int first, const Span& span) {
        const int64_t head_dim = t.pages->head_dim;
        const Key* q = QkMath<T>::query_at(s.q, first, head_dim);
        for (int64_t b = 0; b < span.num_blocks; ++b) {
            const Key* keys = (const Key*)keys_of(t, s, span.first_block + b);
            score_block<N>(s, q, keys, round_up(span.num_slots(b)), span.size, head_dim, b * span.padded,
                           {kAlwaysPrefetches<N, Key> ? keys : nullptr});
        }
        softmax_and_accumulate<N, T>(t, s, first, span);
    }

    static void attend_span(const AttentionTile& t, State& s, int first, int stop, const Span& span, bool) {
        if constexpr (kMaxQueries<T> < kQueriesAtOnce) {
            constexpr int kCount = kMaxQueries<T>;
            for (; first + kCount <= stop; first += kCount) attend_queries<kCount>(t, s, first, span);
            for (; first < stop; ++first) attend_queries<1>(t, s, first, span);
        } else {
            using Attend = void (*)(const AttentionTile&, State&, int, const Span&);
            static constexpr Attend kAttend[] = {attend_queries<1>, attend_queries<2>, attend_queries<3>,
                                                 attend_queries<4>, attend_queries<5>, attend_queries<6>,
                                                 attend_queries<7>, attend_queries<8>};
            kAttend[stop - first - 1](t, s, first, span);
        }
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
