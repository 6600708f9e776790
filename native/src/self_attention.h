// Self-attention without a KV cache (encoders): every sequence is in the step with all of its tokens.
//
// The keys and values of the running op are written into private pages, block after block in the order of the
// sequences, so that the paged attention kernels can be used.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "moe.h"
#include "thread_pool.h"

namespace quire {

struct SelfAttentionShape {
    int64_t num_kv_heads, group, head_dim;  // group: query heads per KV head
    float scale;
    bool causal;
    int64_t window;       // a query sees positions at distances below this; 0: all
    const float* biases;  // [heads, 2 * reach + 1], see AttentionTile; or null
    int64_t reach;
};

// Disentangled attention (DeBERTa): of query i and key j, (by_query[i][row] + by_key[j][row]) * scale is added to
// scores, where row = rows[reach + i - j].
struct DistanceScores {
    Rows by_query, by_key;  // [heads * count] each; by_query has the rows of q, by_key those of all tokens
    const int32_t* rows;    // [2 * reach + 1], or null: scores do not read distances
    int64_t reach, count;
};

// One object serves all self-attention ops of a tape, one after the other. Threads call `keep`, wait for each other,
// and call `attend`.
class SelfAttentionRunner {
 public:
    explicit SelfAttentionRunner(PageType type) : type_(type) {}

    void reserve(int64_t num_kv_heads, int64_t head_dim, int num_threads);

    // Called before a step. seq_starts [num_seqs + 1]; logit_rows: the tokens whose logits the step returns.
    void begin(const int32_t* seq_starts, int64_t num_seqs, const int32_t* logit_rows, int64_t num_logits);

    // Writes the keys and values of a range of tokens. k and v: [num_kv_heads * head_dim] each.
    void keep(int64_t num_kv_heads, int64_t head_dim, Rows k, Rows v, Range tokens);

    // out[r] for all tokens or, if `logits_only`, for the tokens logit_rows[r]; q.at(r) is the query of out[r]. Threads
    // take the next tile from `counter`.
    void attend(const SelfAttentionShape& shape, const DistanceScores& distances, Rows q, Rows out, bool logits_only,
                const ThreadPool& pool, std::atomic<int64_t>& counter);

    // Some op reads distances, at most as far as this.
    void read_distances(int64_t reach) { reach_ = reach_ ? std::min(reach_, reach) : reach; }

 private:
    // Consecutive rows of one sequence.
    struct Run {
        int64_t seq, first, count;
    };

    Pages pages(int64_t num_kv_heads, int64_t head_dim) const;

    // What distances add to the scores of a query of this head: out[j - position], of every key j of its sequence.
    void add_distances(const DistanceScores& distances, float scale, const float* by_query, int64_t first_token,
                       int64_t head, int64_t position, int64_t length, float* out) const;

    PageType type_;
    int num_threads_ = 0;
    int64_t reach_ = 0, longest_ = 0;         // of distances, 0: no op reads them; of the sequences of the step
    Buffer<float> added_;                     // [threads, kTileQueries, 2 * longest_ + 1] scores of distances
    size_t block_bytes_ = 0;                  // of the widest keys and values; 0: the tape has no op of this kind
    Buffer<uint8_t> data_;                    // pages of one layer
    Buffer<float> scratch_;                   // of each thread
    std::vector<int32_t> blocks_;             // 0, 1, 2, ...: from its first block on, the block table of any sequence
    std::vector<int32_t> first_;              // [num_seqs] the sequence's first block
    std::vector<int32_t> lengths_;            // [num_seqs]
    std::vector<int32_t> seqs_;               // [num_tokens] the sequence of the token
    std::vector<int32_t> positions_;          // [num_tokens] the position of the token in its sequence
    std::vector<int32_t> logit_rows_;         // [num_logits]
    std::vector<Run> all_runs_, logit_runs_;  // of all tokens, and of logit_rows_
};

}  // namespace quire
