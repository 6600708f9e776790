// The kernels that are not matmuls. A call does one row, or one tile of attention.
//
// No function here knows the number of rows or threads, so no order of summation depends on them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "race.h"
#include "softmax.h"

namespace quire {

constexpr int64_t kMaxLanes = 16;  // floats in a vector, of the widest ISA
constexpr int64_t whole_vectors(int64_t n) { return (n + kMaxLanes - 1) / kMaxLanes * kMaxLanes; }

// The type of keys and values in the cache.
enum class PageType : uint8_t { Float16, Bfloat16, Float32, Int8 };

// The paged KV cache. A block has, for every layer, the keys of every KV head and then the values of every KV head.
// Floats, for one head:
//   keys   [head_dim, block_size]   scores of consecutive tokens are in consecutive lanes
//   values [block_size, head_dim]   columns of a value are in consecutive lanes
// Int8: a key, or value, of one token and head is `columns` quantized values in -127 .. 127 and an fp32 scale.
//   keys   [columns / 4, block_size, 4], scales [block_size]   columns: head_dim, padded with zeros to a multiple of 16
//   values [block_size / 4, columns, 4], scales [block_size]   block_size: a multiple of 16
// Latent (MLA): [block_size, head_dim] instead of keys, and no values. The first `latent` columns (the nope part) serve
// as the value too; the others are the rope part. Only floats.
// Behind the layers, a block has the state of each causal convolution after the last token written to the block:
//   [conv_rows, conv_channels] fp32, the last inputs of the convolution, the oldest first
struct Pages {
    uint8_t* data;
    int64_t num_blocks, num_layers, num_kv_heads, head_dim, block_size;
    PageType type;
    int64_t latent;  // columns of the latent; 0: the cache has keys and values
    int64_t conv_layers = 0, conv_rows = 0, conv_channels = 0;

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
    size_t conv_bytes() const { return sizeof(float) * conv_rows * conv_channels; }
    size_t block_bytes() const { return layer_bytes() * num_layers + conv_bytes() * conv_layers; }
    float* conv_state(int64_t block, int64_t layer) const {
        return reinterpret_cast<float*>(data + block * block_bytes() + layer_bytes() * num_layers +
                                        layer * conv_bytes());
    }
    uint8_t* keys(int64_t block, int64_t layer, int64_t kv_head) const {
        return data + block * block_bytes() + layer * layer_bytes() + kv_head * head_bytes();
    }
    uint8_t* values(int64_t block, int64_t layer, int64_t kv_head) const {
        return keys(block, layer, kv_head) + (latent ? 0 : head_bytes() * num_kv_heads);
    }
    // A copy of the keys and values of one block, layer and head: as far apart as they are in a block.
    size_t value_offset() const { return latent ? 0 : head_bytes() * num_kv_heads; }
    size_t tail_bytes() const { return value_offset() + head_bytes(); }
    // Int8: the scales behind the `keys` or `values` of a head.
    float* scales(uint8_t* head) const { return reinterpret_cast<float*>(head + stored_columns() * block_size); }
    const float* scales(const uint8_t* head) const {
        return reinterpret_cast<const float*>(head + stored_columns() * block_size);
    }
};

// Int8: the most columns, and slots of a block, over which dot products fit 32 bits.
constexpr int64_t kMaxInt8Depth = 1024;

// Loads of keys reach up to this many bytes past the last block.
constexpr size_t kPagesSlack = 64;

// The most queries that share one pass over a sequence's keys and values, and how many of them are in registers at
// once.
constexpr int kTileQueries = 32, kQueriesAtOnce = 8;

// Queries of one sequence that read the same KV head, ordered by token. Query i sees positions first[i] .. last[i].
struct AttentionTile {
    const Pages* pages;
    int64_t layer, kv_head;
    const int32_t* block_table;
    // Blocks from index tail_block on are read from `tail` instead, tail_bytes() apart. See DraftTrees.
    const uint8_t* tail = nullptr;
    int64_t tail_block = INT64_MAX;
    int num_queries;
    const float* q[kTileQueries];       // [value_dim] each
    const float* q_rope[kTileQueries];  // [head_dim - value_dim] each: the rope part of q, if the pages are latent
    float* out[kTileQueries];           // [value_dim] each
    int32_t first[kTileQueries], last[kTileQueries];
    float scale;
    float softcap;                   // scores become softcap * tanh(scores / softcap); 0: no cap
    bool has_slopes;                 // ALiBi: slope * (position of the key - position of the query) is added to scores
    float slope[kTileQueries];       // if has_slopes
    int32_t position[kTileQueries];  // of the query, if has_slopes or reach
    bool has_sinks;                  // exp(sink) is added to the softmax denominator
    float sink[kTileQueries];        // if has_sinks
    int64_t reach;                   // 0: no biases; else bias[position of the key - position of the query] is added to
    const float* bias[kTileQueries];  // scores, with the distance clamped to -reach .. reach
    float* scratch;                   // attention_scratch floats, private to the thread
};

// Blocks of a span, whose scores are exponentiated together: about 64 slots, counted from the start of the sequence.
constexpr int64_t attention_span(int64_t block_size) { return block_size < 64 ? 64 / block_size : 1; }

// Positions of a split: about 256, counted from the start of the sequence. The partial softmax of a split is merged
// with that of the splits before it, so several threads can share a long context.
constexpr int64_t attention_split(int64_t block_size) {
    const int64_t span = attention_span(block_size) * block_size;
    return span < 256 ? 256 / span * span : span;
}

// Floats of a partial softmax: of one query (acc, rounded up to whole vectors, m and l), and of a tile.
constexpr int64_t partial_floats(int64_t value_dim) { return whole_vectors(value_dim) + kMaxLanes; }
constexpr int64_t tile_partial_floats(int64_t value_dim) { return kTileQueries * partial_floats(value_dim); }

// Floats: the queries, the partials of a split and of all merged so far; the keys, scores and weights of one span.
constexpr int64_t attention_scratch(int64_t head_dim, int64_t block_size) {
    const int64_t span_slots = attention_span(block_size) * (block_size + kMaxLanes);
    return kTileQueries * (head_dim + kMaxLanes) + 2 * tile_partial_floats(head_dim) +
           span_slots * (head_dim + 2 * kQueriesAtOnce) + 64;
}

// As in ops/opset.py.
enum class Activation : int {
    Silu,
    Gelu,
    GeluTanh,
    Relu,
    ReluSquared,
    QuickGelu,
    Tanh,
    ClampedSwiglu,
    Elu,
    Sigmoid,
    Softplus
};
constexpr int kNumActivations = int(Activation::Softplus) + 1;

constexpr int64_t kMaxTaps = 16;  // of a causal convolution

// A token may win a race if half of its upper bits is at most scale * exp(distance) + offset.
struct RaceBounds {
    Race race;
    float max_logit, inverse_temperature;  // of its Softmax
    float scale, offset;
};

struct OpKernels {
    // out = x / sqrt(mean(x * x) + eps) * weight, [n] each. Squares are summed in lanes (column mod kLanes), then the
    // lanes.
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
    // out = (x - mean) / sqrt(variance + eps) * weight + bias, [n] each. Both sums are taken in lanes as above. weight
    // and bias may be null.
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* out);
    // out [2 * half] = cos, then sin, of position * inv_freq [half], times scale.
    void (*rope_angles)(int32_t position, const float* inv_freq, float scale, int64_t half, float* out);
    // Every head of x [num_heads, head_dim], in place: columns i and half + i are rotated by angle i.
    void (*rope)(float* x, const float* angles, int64_t half, int64_t num_heads, int64_t head_dim);
    // x [n] -> out [n], element by element; out may be x.
    void (*activate)(Activation kind, const float* x, int64_t n, float* out);
    // x [2 * n] -> out [n] = activate(x[:n]) * x[n:]; out may be x.
    void (*activate_and_mul)(Activation kind, const float* x, int64_t n, float* out);
    // out = x + y, [n] each; out may be x or y.
    void (*add)(const float* x, const float* y, int64_t n, float* out);
    // out = x * y, [n] each; out may be x or y.
    void (*mul)(const float* x, const float* y, int64_t n, float* out);
    // out = x * factor, [n] each; out may be x.
    void (*scale)(const float* x, float factor, int64_t n, float* out);
    // out = x, clamped to -limit .. limit, [n] each; out may be x.
    void (*clamp)(const float* x, float limit, int64_t n, float* out);
    // out += x * factor, [n] each.
    void (*add_scaled)(const float* x, float factor, int64_t n, float* out);
    // x = cap * tanh(x / cap) [n], in place.
    void (*soft_cap)(float* x, float cap, int64_t n);
    // out [n] = bias + the sum over taps of weight[tap] * inputs[tap], the oldest tap first. A null input is zeros, and
    // so is a null bias. The weights of consecutive taps are weight_stride floats apart.
    void (*causal_conv)(const float* const* inputs, const float* weight, int64_t weight_stride, const float* bias,
                        int64_t taps, int64_t n, float* out);
    // Writes k and v [num_kv_heads, head_dim] of `count` tokens into a layer: from `slot` on, all in one block.
    void (*write_kv)(const Pages& pages, int64_t layer, int32_t slot, int64_t count, const float* k, int64_t k_stride,
                     const float* v, int64_t v_stride);
    // Writes one token into a layer of latent pages: latent [pages.latent], and behind it the rope part.
    void (*write_latent)(const Pages& pages, int64_t layer, int32_t slot, const float* latent, const float* k_rope);
    // softmax(q . keys * scale, with softcap, slopes and biases) . values, for every query of the tile. A query's sums
    // run over the blocks of its sequence in order, whatever the other queries of the tile are.
    void (*attend)(const AttentionTile& tile);
    // The same in two steps, with the same bits: the partial softmax of each split, here of [first, end), and then the
    // merge of all splits. The partials of consecutive splits are split_stride floats apart.
    void (*attend_splits)(const AttentionTile& tile, int64_t first, int64_t end, float* partials, int64_t split_stride);
    void (*merge_splits)(const AttentionTile& tile, float* partials, int64_t num_splits, int64_t split_stride);
    // The sum of softmax.weight over x [n]. The same in every table.
    int64_t (*total_weight)(const float* x, int64_t n, const Softmax& softmax);
    // Writes the tokens [first, end) of x that may win a race, and some others, to `ids`. Returns how many.
    int64_t (*find_racers)(const float* x, int64_t first, int64_t end, const RaceBounds& bounds, int32_t* ids);
};

}  // namespace quire
