// A recorded forward pass, walked by a team of threads once a step.
//
// Values are columns of matrices with one row a token, in one arena that the recorder has divided among them. Work on
// rows is split among the threads by rows, always in the same way; matrix products and attention into pieces that
// go to whoever is free. A barrier stands between two ops only where one of them is not split by rows.
#pragma once

#include <atomic>
#include <cstdint>
#include <variant>
#include <vector>

#include "buffer.h"
#include "dequantize.h"
#include "kernels.h"
#include "lora.h"
#include "moe.h"
#include "outliers.h"
#include "self_attention.h"
#include "shared_prefix.h"
#include "thread_pool.h"

namespace quire {

// Neighbouring columns of a value: row r starts at arena[offset + r * stride]. Row r belongs to token r, or where
// `few`, to token logit_rows[r]: what only logits depend on is computed for the tokens whose logits are wanted. An op
// does that if its output is such a value; its inputs may be of either kind.
struct View {
    int64_t offset, stride, columns;
    bool few;
};

// A step as flat arrays; see StepBatch in ops/opset.py.
struct Step {
    int64_t num_tokens, num_seqs, num_logits;
    const int32_t *ids, *positions, *slots;    // [num_tokens]
    const int32_t *seq_starts, *context_lens;  // [num_seqs + 1], [num_seqs]
    const int32_t* block_tables;               // [num_seqs, table_width], rows table_stride apart
    int64_t table_width, table_stride;
    const int32_t* source_lens;    // [num_seqs], or null
    const int32_t* source_tables;  // [num_seqs, source_width], rows source_stride apart
    int64_t source_width, source_stride;
    const int32_t* logit_rows;  // [num_logits]
    float* logits;              // [num_logits, vocab]
    const int32_t* adapters;    // [num_tokens] the slot of each token's adapter, or -1; null: nobody has one
};

// A weight matrix: segments stacked along the outputs, each in a layout of its own.
struct Weight {
    std::vector<PackedMatrix> segments;
    const float* bias;  // [num_outputs], or null
    int64_t num_inputs = 0, num_outputs = 0;
    int64_t counters = 0;  // where those of its segments begin among the tape's: Worker::taken of each

    Weight(std::vector<PackedMatrix> segments, const float* bias);
};

struct Embedding {
    bool of_positions;  // rows are looked up by position, else by id
    Storage storage;
    const uint8_t* data;  // [num_rows, row_bytes]
    int64_t num_rows, row_bytes;
    const int32_t* row_order;  // [num_rows], or null
    View out;
};
struct RmsNorm {
    View x;
    const float* weight;
    int64_t size;  // columns that are normed together
    float eps;
    View out;
};
struct LayerNorm {
    View x;
    const float *weight, *bias;      // or null
    int64_t weight_size, bias_size;  // of a group, or of the row
    int64_t size;                    // columns that are normed together
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
    Segments heads;  // a matrix each, all of one shape; floats
    View out;
    int64_t counters;  // where those of its heads begin among the tape's: Worker::taken of each
};
struct Adapt {
    View y, x;  // y is changed in place
    const AdapterSlots* slots;
};
struct RopeAngles {
    const float* inv_freq;
    float scale;
    View out;
};
struct Rope {
    View x, angles;  // x is changed in place
    int64_t head_dim;
};
struct WriteKV {
    View k, v;
    int64_t layer;
};
struct WriteLatent {
    View latent, turned;
    int64_t layer;
};
struct Attention {
    View q, turned;  // turned: the rest of every query where the pages are latent, else nothing
    int64_t layer;
    float scale;
    int64_t window;       // 0: everything before
    float softcap;        // 0: none
    const float* slopes;  // [heads], or null
    const float* sinks;   // likewise
    const float* biases;  // [heads, 2 * reach + 1]: see AttentionTile; or null
    int64_t reach;
    bool of_source;  // every token sees all of its sequence's source, else what stands before it
    View out;
    int64_t counter;  // which of the tape's counters hands out its tiles
};
// Attention of a step's sequences to themselves, in two ops: keys and values are kept, then queries meet them.
struct KeepKV {
    View k, v;
    int64_t num_kv_heads, head_dim;
};
struct SelfAttention {
    View q;
    SelfAttentionShape shape;
    View out;
    int64_t counter;  // as above
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
struct Mixture {
    View x, logits;
    Routing routing;
    Experts gate_up, down;
    Activation kind;
    View out;
};
struct MulSigmoid {
    View x, gate, out;
};
struct Scale {
    View x;
    float factor;
    View out;
};
struct ScaleByPosition {  // in place, by 1 + growth * log(1 + floor(position / length))
    View x;
    float growth, length;
};
struct Clamp {
    View x;
    float most;
    View out;
};
struct Add {
    View x, y, out;
};
struct Logits {
    View x;
    Weight weight;
    float softcap;  // 0: none
};
struct Take {
    View x;  // as it is, in the place of logits
};

using Op = std::variant<Embedding, RmsNorm, LayerNorm, Linear, LinearHeads, Adapt, RopeAngles, Rope, WriteKV,
                        WriteLatent, Attention, KeepKV, SelfAttention, Activate, ActivateAndMul, Mixture, MulSigmoid,
                        Scale, ScaleByPosition, Clamp, Add, Logits, Take>;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// With fewer tiles of attention than that for each thread, the end of the op is a long wait for the last ones.
constexpr int64_t kTilesAThread = 4;

class Tape {
 public:
    // Weights, tables and pages must outlive the tape. The arena has `arena_size` floats.
    Tape(const Pages& pages, int64_t max_tokens, int64_t arena_size, int num_threads);

    void add(Op op);

    // Throws std::invalid_argument if the step names anything that is not there.
    void run(const Step& step);

 private:
    friend class Walk;
    friend class AttentionWalk;

    void check(const Step& step) const;
    void find_shared(const Step& step);
    void walk(const Step& step, const Team& team);  // what one thread does: tape_executor.cpp
    int64_t add_counters(size_t count);             // returns the first one's index

    float* row(const View& v, int64_t r) const { return arena_.get() + v.offset + r * v.stride; }
    // Where an op with this output finds the input of its row r.
    const float* input(const View& v, const View& out, int64_t r, const Step& step) const {
        return row(v, out.few && !v.few ? step.logit_rows[r] : r);
    }

    Pages pages_;
    int64_t max_tokens_;
    int num_threads_;
    std::vector<Op> ops_;
    int64_t num_ids_ = INT32_MAX, num_positions_ = INT32_MAX;  // rows of the smallest table looked up by them
    int64_t num_adapters_ = INT32_MAX;                         // slots of the layer that has fewest
    Buffer<float> arena_;
    // Of the matrix product under way: its inputs, quantized or as halves; those of few rows, gathered.
    Buffer<QuantizedGroup> groups_;
    Buffer<HalfGroup> halves_;
    Buffer<float> gathered_;
    Outliers outliers_;
    Buffer<uint8_t> panels_;  // kPanelBytes for each thread
    MixtureRunner mixtures_;
    LowRankRunner low_rank_;
    SelfAttentionRunner self_attention_;
    Buffer<float> attention_scratch_;
    Buffer<float> findings_;                      // of the parts of contexts, where these are shared among threads
    bool reads_sources_ = false;                  // an op attends to sources
    int64_t max_parts_ = 0;                       // of the step under way
    std::vector<std::atomic<int64_t>> counters_;  // what is taken of the ops' work in the step under way
    // Parts that are attended to, of every tile of the attention under way: those that share nothing, then the others.
    std::vector<std::atomic<int64_t>> num_found_;
    Cascade cascade_;                  // who shares a beginning in the step under way
    int64_t group_ = 1;                // query heads of a KV head, at most
    Buffer<float> shared_findings_;    // [members, KV heads, parts, group] of those who share
    Buffer<float> tile_findings_;      // of each thread: what is found together
    std::vector<int32_t> seq_logits_;  // [num_seqs] the sequence's row of logits, or -1
    std::vector<int32_t> logit_seqs_;  // [num_logits] whose token a logit row is, in the step under way
};

}  // namespace quire
