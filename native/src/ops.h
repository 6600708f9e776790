// Everything in a forward pass that is not a matrix product, and sampling's sum: one row, or one tile of attention, a
// call.
//
// No function here knows how many rows or threads there are, so none can sum in an order that depends on them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "softmax.h"

namespace quire {

constexpr int64_t kMostLanes = 16;  // floats of a vector, on any CPU
constexpr int64_t whole_vectors(int64_t n) { return (n + kMostLanes - 1) / kMostLanes * kMostLanes; }

// How keys and values are kept.
enum class PageType : uint8_t { Float16, Bfloat16, Float32, Int8 };

// The paged cache. A block is, for every layer, the keys of every KV head and then the values of every KV head. Floats:
//   keys   [head_dim, block_size]   of one head, so that the scores of neighbouring tokens lie in neighbouring lanes
//   values [block_size, head_dim]   of one head, so that the columns of a value do
// Int8: the key of one token and head is `columns` codes of -127 .. 127 times an fp32 unit, and so is the value.
//   keys   [columns / 4, block_size, 4], units [block_size]   columns: head_dim and zeros up to a multiple of 16
//   values [block_size / 4, columns, 4], units [block_size]   block_size: a multiple of 16
// Latent: no values, and [block_size, head_dim] instead of keys, whose first `latent` columns are the value. Only
// floats.
struct Pages {
    uint8_t* data;
    int64_t num_blocks, num_layers, num_kv_heads, head_dim, block_size;
    PageType type;
    int64_t latent;  // 0: keys and values

    int64_t value_dim() const { return latent ? latent : head_dim; }
    int64_t stored_columns() const { return type == PageType::Int8 ? whole_vectors(head_dim) : head_dim; }
    size_t head_bytes() const {
        const size_t numbers = size_t(stored_columns()) * block_size;
        switch (type) {
            case PageType::Int8: return numbers + block_size * sizeof(float);
            case PageType::Float32: return 4 * numbers;
            default: return 2 * numbers;
        }
    }
    size_t layer_bytes() const { return (latent ? 1 : 2) * head_bytes() * num_kv_heads; }
    size_t block_bytes() const { return layer_bytes() * num_layers; }
    uint8_t* keys(int64_t block, int64_t layer, int64_t kv_head) const {
        return data + block * block_bytes() + layer * layer_bytes() + kv_head * head_bytes();
    }
    uint8_t* values(int64_t block, int64_t layer, int64_t kv_head) const {
        return keys(block, layer, kv_head) + (latent ? 0 : head_bytes() * num_kv_heads);
    }
    // Int8: of `keys` or `values` of a head.
    float* units(uint8_t* head) const { return reinterpret_cast<float*>(head + stored_columns() * block_size); }
    const float* units(const uint8_t* head) const {
        return reinterpret_cast<const float*>(head + stored_columns() * block_size);
    }
};

// Int8: products are summed in 32 bits up to that many columns, and up to that many slots of a block.
constexpr int64_t kMostInt8 = 1024;

// Loads of keys reach up to that many bytes past the last block.
constexpr size_t kPagesSlack = 64;

// Up to that many queries share one walk over a sequence's keys and values. Registers hold 8 of them at a
// time.
constexpr int kTileQueries = 32, kQueriesAtOnce = 8;

// Queries of one sequence that read the same KV head, ordered by token. Query i sees positions first[i] .. last[i].
struct AttentionTile {
    const Pages* pages;
    int64_t layer, kv_head;
    const int32_t* block_table;
    int num_queries;
    const float* q[kTileQueries];       // [value_dim] each
    const float* turned[kTileQueries];  // [head_dim - value_dim] each: the rest of q, where the pages are latent
    float* out[kTileQueries];           // [value_dim] each
    int32_t first[kTileQueries], last[kTileQueries];
    float scale;
    float softcap;                    // scores become softcap * tanh(scores / softcap); 0: they stay
    bool has_slopes;                  // then scores gain slope * (position of the key - position of the query)
    float slope[kTileQueries];        // where there are slopes, and likewise
    int32_t position[kTileQueries];   // of the query
    bool has_sinks;                   // then the weights of a query sum to less than 1: exp(sink) is in their divisor
    float sink[kTileQueries];         // where there are sinks
    int64_t reach;                    // 0: none; else scores gain bias[position of the key - position of the query],
    const float* bias[kTileQueries];  // at indices -reach .. reach: what is further away gains what stands there
    float* scratch;                   // attention_scratch floats of this thread
};

// Blocks whose scores are softened together: about 64 slots, always counted from the sequence's start.
constexpr int64_t attention_span(int64_t block_size) { return block_size < 64 ? 64 / block_size : 1; }

// Positions that are attended to by themselves, about 256, always counted from the sequence's start. What is found in
// one part is folded with what was found before it, so several threads can share a long context.
constexpr int64_t attention_part(int64_t block_size) {
    const int64_t span = attention_span(block_size) * block_size;
    return span < 256 ? 256 / span * span : span;
}

// Floats: what a query finds in one part, or in all of them (its columns rounded up, and two numbers); and what a tile
// does.
constexpr int64_t query_findings(int64_t value_dim) { return whole_vectors(value_dim) + kMostLanes; }
constexpr int64_t attention_findings(int64_t value_dim) { return kTileQueries * query_findings(value_dim); }

// Floats: queries, findings of a part and of all; the keys, scores and weights of one span.
constexpr int64_t attention_scratch(int64_t head_dim, int64_t block_size) {
    const int64_t span_slots = attention_span(block_size) * (block_size + kMostLanes);
    return kTileQueries * (head_dim + kMostLanes) + 2 * attention_findings(head_dim) +
           span_slots * (head_dim + 2 * kQueriesAtOnce) + 64;
}

// As in ops/opset.py.
enum class Activation : int { Silu, Gelu, GeluTanh, Relu, ReluSquared, QuickGelu, Tanh, ClampedSwiglu, Elu };
constexpr int kNumActivations = int(Activation::Elu) + 1;

struct OpKernels {
    // out = x / sqrt(mean(x * x) + eps) * weight. The squares are summed in 8 lanes (column mod 8), then the lanes. [n]
    // each.
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
    // out = (x - mean) / sqrt(variance + eps) * weight + bias, both sums taken in lanes as above. [n] each; weight and
    // bias may be null.
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* out);
    // out [2 * half] = cos, then sin, of position * inv_freq [half], times scale.
    void (*rope_angles)(int32_t position, const float* inv_freq, float scale, int64_t half, float* out);
    // Every head of x [num_heads, head_dim], in place: columns i and half + i are turned by angle i.
    void (*rope)(float* x, const float* angles, int64_t half, int64_t num_heads, int64_t head_dim);
    // Of every number of x [n]; out may be x.
    void (*activate)(Activation kind, const float* x, int64_t n, float* out);
    // x [2 * n] -> out [n] = activate(x[:n]) * x[n:]; out may be x.
    void (*activate_and_mul)(Activation kind, const float* x, int64_t n, float* out);
    // out = x + y, [n] each; out may be x or y.
    void (*add)(const float* x, const float* y, int64_t n, float* out);
    // out = x * factor, [n] each; out may be x.
    void (*scale)(const float* x, float factor, int64_t n, float* out);
    // out = x, kept in -most .. most, [n] each; out may be x.
    void (*clamp)(const float* x, float most, int64_t n, float* out);
    // out += x * factor, [n] each.
    void (*add_scaled)(const float* x, float factor, int64_t n, float* out);
    // x = cap * tanh(x / cap) [n], in place.
    void (*soft_cap)(float* x, float cap, int64_t n);
    // The k and v [num_kv_heads, head_dim] of `count` tokens into the layer's pages: from `slot` on, in one block.
    void (*write_kv)(const Pages& pages, int64_t layer, int32_t slot, int64_t count, const float* k, int64_t k_stride,
                     const float* v, int64_t v_stride);
    // One token's vector into the layer's latent pages: latent [pages.latent], and behind it turned.
    void (*write_latent)(const Pages& pages, int64_t layer, int32_t slot, const float* latent, const float* turned);
    // softmax(q . keys * scale, capped, sloped and biased) . values for every query of the tile. A query's sums run
    // over the blocks of its sequence in order, whatever the other queries of the tile are.
    void (*attend)(const AttentionTile& tile);
    // The same in two steps, to the same bits: every part alone, here those of [first, end), then all of them together.
    // `findings` of each part lie part_stride floats behind those of the part before.
    void (*attend_parts)(const AttentionTile& tile, int64_t first, int64_t end, float* findings, int64_t part_stride);
    void (*fold_parts)(const AttentionTile& tile, float* findings, int64_t num_parts, int64_t part_stride);
    // The sum of softmax.weight over x [n]. The same number in every table.
    int64_t (*total_weight)(const float* x, int64_t n, const Softmax& softmax);
};

}  // namespace quire
