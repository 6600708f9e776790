// A tape: a recorded forward pass, run by a thread pool once a step.
//
// Values are columns of matrices with one row per token, in one arena that the recorder has laid out. Element-wise ops
// are divided among the threads by rows, always in the same way. Matmuls and attention are divided into pieces, with
// work stealing. There is a barrier between two ops only if one of them is not divided by rows.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <variant>
#include <vector>

#include "buffer.h"
#include "causal_conv.h"
#include "compressed_pages.h"
#include "delta_rule.h"
#include "dequantize.h"
#include "draft_trees.h"
#include "kernels.h"
#include "lora.h"
#include "mamba.h"
#include "moe.h"
#include "outliers.h"
#include "rank_group.h"
#include "self_attention.h"
#include "shared_prefix.h"
#include "thread_pool.h"
#include "wkv7.h"

namespace quire {

// Consecutive columns of a value: row r starts at arena[offset + r * stride]. Row r belongs to token r or, if
// `logits_only`, to token logit_rows[r]: a value that only logits depend on is computed for the tokens whose logits are
// requested. An op does so if its output is `logits_only`; its inputs may be of either kind. A `shared` value is in the
// arena that ranks have in common: each writes columns (or rows) of it, and reads the others' after a `RankBarrier`.
struct View {
    int64_t offset, stride, columns;
    bool logits_only, shared;
};

// A step as flat arrays; see StepBatch in ops/opset.py.
struct Step {
    int64_t num_tokens, num_seqs, num_logits;
    const int32_t *ids, *positions, *slots;    // [num_tokens]
    const int32_t *seq_starts, *context_lens;  // [num_seqs + 1], [num_seqs]
    const int32_t* block_tables;               // [num_seqs, table_width], rows table_stride apart
    int64_t table_width, table_stride;
    const int32_t* window_slots;   // as `slots`, in the window pages; null: the tape has none
    const int32_t* window_tables;  // as `block_tables`, of window pages
    const int32_t* source_lens;    // [num_seqs], or null
    const int32_t* source_tables;  // [num_seqs, source_width], rows source_stride apart
    int64_t source_width, source_stride;
    const int32_t* logit_rows;   // [num_logits]
    float* logits;               // [num_logits, vocab]
    const int32_t* adapters;     // [num_tokens] the slot of each token's adapter, or -1; null: no token has one
    const uint64_t* ancestors;   // [num_tokens] which places of its sequence's tree a token sees; null: no tree
    const int32_t* hidden_rows;  // [num_tokens] the row of the hidden states that each token reads, or null
    const Segment* segments;     // [num_segments] of the tokens, if the tape has states
    int64_t num_segments;
};

// A weight matrix: segments stacked along the outputs, each with its own layout.
struct Weight {
    std::vector<PackedMatrix> segments;
    const float* bias;  // [num_outputs], or null
    int64_t num_inputs = 0, num_outputs = 0;
    int64_t counters = 0;      // the first of the tape's counters for its segments: Worker::taken of each
    bool reads_groups = true;  // and nothing else: all its inputs are quantized, in one order

    Weight(std::vector<PackedMatrix> segments, const float* bias);
};

struct Embedding {
    bool of_positions;  // rows are looked up by position, else by id
    Storage storage;
    const uint8_t* data;  // [num_rows, row_bytes]
    int64_t num_rows, row_bytes;
    const int32_t* row_order;  // [num_rows], or null
    View out;
    int64_t first_row, total_rows;  // the table has these rows of all; the others' outputs are left to their ranks
};
// Hidden states that another tape has kept: rows of a table outside the arena.
struct HiddenRows {
    const float* data;  // [num_rows, out.columns]
    int64_t num_rows;
    View out;
};
struct RmsNorm {
    View x;
    const float* weight;
    int64_t weight_size;
    int64_t size;  // columns that are normalized together
    float eps;
    View out;
};
struct LayerNorm {
    View x;
    const float *weight, *bias;      // or null
    int64_t weight_size, bias_size;  // `size`, or all columns
    int64_t size;                    // columns that are normalized together
    float eps;
    View out;
};
struct Linear {
    View x;
    Weight weight;
    View out;
};
struct LinearHeads {
    View x;
    Segments heads;  // one float matrix per head, all of one shape
    View out;
    int64_t counters;  // the first of the tape's counters for its heads: Worker::taken of each
};
struct Adapt {
    View y, x;  // y is changed in place
    const AdapterSlots* slots;
};
struct RopeAngles {
    const float* inv_freq;
    float scale;
    int64_t group;  // positions are rounded down to a multiple of it
    View out;
};
struct Rope {
    View x, angles;  // x is changed in place
    int64_t head_dim;
};
struct WriteKV {
    View k, v;
    int64_t layer;
    bool windowed;  // the layer is one of the window pages'
};
struct WriteLatent {
    View latent, k_rope;
    int64_t layer;
};
struct Attention {
    View q, q_rope;  // q_rope: the rope part of every query if the pages are latent, else empty
    int64_t layer;
    float scale;
    int64_t window;       // 0: all positions before; below zero: those of the position's chunk of -window
    float softcap;        // 0: none
    const float* slopes;  // [heads], or null
    const float* sinks;   // [heads], or null
    const float* biases;  // [heads, 2 * reach + 1], see AttentionTile; or null
    int64_t reach;
    bool of_source;  // cross-attention: a token sees the whole source of its sequence, else the positions before it
    View out;
    int64_t counter;  // index of the tape's counter that hands out its tiles
    // `group` query heads share a KV head; 0: all alike. Another rank may have the first ones of the first KV head,
    // `skipped` of them, and the last ones of the last.
    int64_t group, skipped;
    bool windowed;  // as in WriteKV
};
// Sparse attention over latent pages, in three ops: the indexer's key of a token is written to pages of its own; the
// positions whose keys score best are chosen; queries attend to these.
struct WriteIndexKey {
    View k;
    int64_t layer;
};
struct TopPositions {
    View q, weights;  // [heads * dim], [heads]
    int64_t layer;
    View out;         // [top_k] positions as floats, in ascending order; -1 where there are fewer
    int64_t counter;  // as in Attention
};
struct SparseMla {
    View q, q_rope;
    View chosen;  // the output of TopPositions
    int64_t layer;
    float scale;
    View out;
    int64_t counter;  // as in Attention
};
// Compressed attention, in five ops: what a layer keeps of tokens is written; groups are pooled; what becomes of these
// is written as entries; the entries whose keys score best are chosen; queries attend to tokens and entries.
struct WriteTokens {
    View x;
    int64_t layer, first;  // into the columns from `first` on
};
struct PoolGroup {
    int64_t layer, first;
    const float* bias;  // [group, columns of a token]
    bool overlap;
    View out;
};
struct WriteEntry {
    View x;
    int64_t layer;
    int part;
};
struct TopEntries {
    View q, weights;  // as in TopPositions
    int64_t layer;
    View out;
    int64_t counter;
};
struct AttendCompressed {
    View q;
    View chosen;  // the output of TopEntries; empty: all entries
    int64_t layer;
    float scale;
    int64_t window;
    const float* sinks;  // [heads]
    View out;
    int64_t counter;
};
// Hyper-connections; see OpSet.stream_weights and those after it.
struct StreamWeights {
    View x;
    const float *scale, *base;  // [3], [x.columns]
    int64_t streams;
    float eps;
    int64_t iterations;
    View out;
};
struct MergeStreams {
    View x, weights, out;
};
struct UpdateStreams {
    View x, y, post, mixing, out;
};
// Self-attention without a cache, in two ops: keys and values are written to private pages, then queries attend to
// them.
struct KeepKV {
    View k, v;
    int64_t num_kv_heads, head_dim;
};
struct SelfAttention {
    View q;
    SelfAttentionShape shape;
    View out;
    int64_t counter;            // as in Attention
    View by_query{}, by_key{};  // see DistanceScores
    const int32_t* rows = nullptr;
    int64_t reach = 0;
};
struct Activate {
    View x;
    Activation kind;
    View out;
};
struct ActivateAndMul {
    View x;
    Activation kind;
    View out;
};
struct Moe {
    View x, logits;
    Routing routing;
    Experts gate_up, down;
    Activation kind;
    View out;
    View hidden;           // shared, with top_k * down.num_inputs columns; or empty: `gate_up` has all of them
    int64_t first_hidden;  // `gate_up` gives these columns of the hidden values, from here on
    View outputs;          // shared, with top_k * down.num_outputs columns; or empty: all experts are here
    View chosen;           // [top_k] experts as floats; or empty: those with the best scores
};
struct MulSigmoid {
    View x, gate, out;
};
struct Scale {
    View x;
    float factor;
    View out;
};
struct ScaleByPosition {  // in place, by 1 + growth * log(1 + floor((position + offset) / length))
    View x;
    float growth, length, offset;
};
struct Clamp {
    View x;
    float limit;
    View out;
};
struct Add {
    View x, y, out;
};
struct Mul {
    View x, y, out;
};
struct CausalConv {
    View x;
    ConvWeights weights;
    int64_t layer;  // among the convolutions
    View out;
};
struct Mamba2Scan {
    View x, dt, b, c;
    Mamba2Weights weights;
    int64_t groups;
    int64_t layer;  // among those with states
    View out;
};
struct MambaScan {
    View x, dt, b, c;
    MambaWeights weights;
    int64_t layer;
    View out;
};
struct Decay {
    View x;
    const float *bias, *rate;  // [columns]
    View out;
};
struct DeltaRule {
    View q, k, v;
    View decay;           // [heads], or [heads * key_dim]; empty: `decays` [heads] for all tokens
    const float* decays;  // or null
    View beta;            // [heads]; empty: values are added as they are
    int64_t heads, key_dim;
    bool tiled;     // heads take the key heads in turn; else neighbours share one
    int64_t layer;  // among those with states
    View out;
};
struct Wkv7 {
    View r, w, k, v, a;
    Wkv7Weights weights;
    int64_t layer;  // among those with states
    View out;
};
struct Logits {
    View x;
    Weight weight;
    float softcap;                      // 0: none
    int64_t first_column, num_columns;  // `weight` gives these columns of all, from here on
};
struct TakeRows {
    View x;  // returned as it is, instead of logits
};
struct Keep {
    View x;
    float* to;  // row r is copied to `to + r * x.columns`
};
struct CopyColumns {
    View x, out;  // out is this rank's columns of a shared value
};
struct RankBarrier {};  // all ranks wait for each other

using Op =
    std::variant<Embedding, HiddenRows, RmsNorm, LayerNorm, Linear, LinearHeads, Adapt, RopeAngles, Rope, WriteKV,
                 WriteLatent, Attention, WriteIndexKey, TopPositions, SparseMla, WriteTokens, PoolGroup, WriteEntry,
                 TopEntries, AttendCompressed, StreamWeights, MergeStreams, UpdateStreams, KeepKV, SelfAttention,
                 Activate, ActivateAndMul, Moe, MulSigmoid, Scale, ScaleByPosition, Clamp, Add, Mul, CausalConv,
                 Mamba2Scan, MambaScan, Decay, DeltaRule, Wkv7, Logits, TakeRows, Keep, CopyColumns, RankBarrier>;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// With fewer attention tiles per thread than this, threads would wait long for the last tiles of the op.
constexpr int64_t kTilesPerThread = 4;

struct RankLost : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Tape {
 public:
    // Weights, embedding tables, pages, group and shared memory must outlive the tape. Its own arena has `arena_size`
    // floats. Without other ranks, `group`, `shared` and `shared_groups` are null.
    Tape(const Pages& pages, int64_t max_tokens, int64_t arena_size, int num_threads, RankGroup* group = nullptr,
         float* shared = nullptr, QuantizedGroup* shared_groups = nullptr, int64_t num_shared_groups = 0);

    // Groups of `max_tokens` quantized rows.
    static int64_t num_groups(int64_t max_tokens, int64_t num_inputs) {
        return GroupOrder(max_tokens, kernels().matrix.row_block, num_inputs).size(max_tokens);
    }

    void add(Op op);

    // Layers with a sliding window have pages of their own there. -> bytes of these
    size_t use_window_pages(uint8_t* data, int64_t num_pages, int64_t num_layers);

    // Recurrent states are there, from now on.
    void use_states(const States& states) { states_ = states; }

    // The keys of indexers, [columns] for each token and layer, are in pages of their own, from now on.
    void use_index(uint8_t* data, size_t size, int64_t columns);

    // Layers of compressed attention keep entries in blocks, and what tokens have in `pages`, or behind the entries if
    // that is null, from now on.
    void use_compressed(std::vector<CompressedLayer> layers, uint8_t* blocks, size_t num_bytes, uint8_t* pages,
                        size_t num_page_bytes);

    // Throws std::invalid_argument if the step refers to a token, slot or block that does not exist, and RankLost if
    // another rank is gone.
    void run(const Step& step);

 private:
    friend class TapeExecutor;
    friend class PagedAttention;
    friend class SparseAttention;
    friend class CompressedAttention;

    void check(const Step& step) const;
    void check_segments(const Step& step) const;
    void find_shared_prefixes(const Step& step);
    void reserve_index();
    void reserve_gathered(int64_t num_keys);
    void execute(const Step& step, const ThreadPool& pool);  // runs in every thread: tape_executor.cpp
    int64_t add_counters(size_t count);                      // returns the first one's index

    float* row(const View& v, int64_t r) const { return (v.shared ? shared_ : arena_.get()) + v.offset + r * v.stride; }
    // Row r of an input, for an op with this output.
    const float* input(const View& v, const View& out, int64_t r, const Step& step) const {
        return row(v, out.logits_only && !v.logits_only ? step.logit_rows[r] : r);
    }

    const Pages& pages(bool windowed) const { return windowed ? window_pages_ : pages_; }

    Pages pages_;
    Pages window_pages_{};
    States states_;
    Pages index_{};  // latent: one vector a token
    CompressedPages compressed_;
    int64_t max_tokens_;
    int num_threads_;
    RankGroup* const ranks_;
    float* const shared_;
    // Inputs of matmuls that ranks quantize together, each some rows: two buffers of `num_shared_groups_`, by turns.
    QuantizedGroup* const shared_groups_;
    const int64_t num_shared_groups_;
    std::vector<Op> ops_;
    int64_t num_ids_ = INT32_MAX, num_positions_ = INT32_MAX;  // rows of the smallest embedding table indexed by them
    int64_t num_adapters_ = INT32_MAX;                         // slots of the layer that has the fewest
    int64_t num_hidden_ = INT32_MAX;                           // rows of hidden states that are read
    bool reads_hidden_ = false;
    Buffer<float> arena_;
    // Inputs of the running matmul: quantized, in fp16, and gathered or reordered.
    Buffer<QuantizedGroup> groups_;
    Buffer<Fp16Group> fp16_groups_;
    Buffer<float> gathered_;
    Outliers outliers_;
    Buffer<uint8_t> panels_;  // kPanelBytes for each thread
    MoeRunner moe_;
    LoraRunner lora_;
    SelfAttentionRunner self_attention_;
    Buffer<float> attention_scratch_;
    Buffer<float> partials_;                      // partial softmaxes of the splits of contexts
    bool reads_sources_ = false;                  // an op is cross-attention
    int64_t longest_ = 0;                         // context of the running step
    int64_t max_splits_ = 0;                      // of a context of the running step
    std::vector<std::atomic<int64_t>> counters_;  // work of each op that is handed out in the running step
    // Splits done of every tile of the running attention: tiles without a shared prefix, then the others.
    std::vector<std::atomic<int64_t>> splits_done_;
    DraftTrees draft_trees_;          // of the running step
    SharedPrefixes shared_prefixes_;  // of the running step
    int64_t group_ = 1;               // the most query heads per KV head
    Buffer<float> shared_partials_;   // [members, KV heads, splits, group] of shared-prefix groups
    Buffer<float> tile_partials_;     // [threads] the partials of a tile of a shared-prefix group
    int64_t top_k_ = 0;               // the most positions that an indexer chooses; 0: there is none
    bool chooses_entries_ = false;    // an op is TopEntries
    int64_t window_ = 0;              // the largest of compressed attention; 0: there is none
    Buffer<float> index_scores_;      // [threads, longest_]
    Buffer<uint64_t> index_order_;    // [threads, longest_]
    Buffer<uint8_t>
        gathered_keys_;  // [threads, gathered_stride_]: vectors of chosen positions, or of entries, as blocks
    size_t gathered_stride_ = 0;
    std::vector<int32_t> consecutive_;  // the block table of gathered keys
    std::vector<int32_t> seq_logits_;   // [num_seqs] the row of logits of the sequence, or -1
    std::vector<int32_t> logit_seqs_;   // [num_logits] the sequence of a row of logits
};

}  // namespace quire
