// Attention of a step's sequences to themselves: no cache, every sequence is there with all of its tokens.
//
// The keys and values of the op under way are kept in pages of its own, block after block in the order of the
// sequences, so that the kernels of attention over pages do the work.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "moe.h"
#include "thread_pool.h"

namespace quire {

struct SelfAttentionShape {
    int64_t num_kv_heads, group, head_dim;  // group: query heads of a KV head
    float scale;
    bool causal;
    int64_t window;       // positions less far away are seen; 0: all
    const float* biases;  // [heads, 2 * reach + 1]: see AttentionTile; or null
    int64_t reach;
};

// One object serves all attention of a tape, op after op. Threads call `keep` and then, when all have, `attend`.
class SelfAttentionRunner {
 public:
    explicit SelfAttentionRunner(PageType type) : type_(type) {}

    void reserve(int64_t num_kv_heads, int64_t head_dim, int num_threads);

    // Before a step: seq_starts [num_seqs + 1], and the tokens whose outputs are wanted where not all are.
    void begin(const int32_t* seq_starts, int64_t num_seqs, const int32_t* logit_rows, int64_t num_logits);

    // The keys and values of tokens `tokens`: k and v [num_kv_heads * head_dim] each.
    void keep(int64_t num_kv_heads, int64_t head_dim, Rows k, Rows v, Range tokens);

    // out[r] for all tokens, or where `few`, for the tokens logit_rows[r]; q.at(r) is the query of out[r]. Whoever is
    // free takes the next tile from `counter`.
    void attend(const SelfAttentionShape& shape, Rows q, Rows out, bool few, const Team& team,
                std::atomic<int64_t>& counter);

 private:
    // Neighbouring rows of one sequence.
    struct Run {
        int64_t seq, first, count;
    };

    Pages pages(int64_t num_kv_heads, int64_t head_dim) const;

    PageType type_;
    size_t block_bytes_ = 0;        // of the widest keys and values; 0: no op of this kind is on the tape
    Buffer<uint8_t> data_;          // pages of one layer
    Buffer<float> scratch_;         // of each thread
    std::vector<int32_t> blocks_;   // 0, 1, 2, ...: a block table that serves every sequence, from its first block on
    std::vector<int32_t> first_;    // [num_seqs] the sequence's first block
    std::vector<int32_t> lengths_;  // [num_seqs]
    std::vector<int32_t> seqs_;     // [num_tokens] whose the token is
    std::vector<int32_t> places_;   // [num_tokens] its position
    std::vector<int32_t> wanted_;   // [num_logits] logit_rows
    std::vector<Run> all_, few_;    // of all tokens, and of those whose outputs are wanted
};

}  // namespace quire
