// Trees of draft tokens: a token sees its ancestors among the tokens of its sequence's tree, of this step and of steps
// before it (StepBatch, ops/opset.py).
//
// Keys and values of a tree lie in the order of its tokens, so those of a token's ancestors lie apart, and elsewhere
// than in a chain. Sums over positions would have another order, and a token other bits. So a thread copies the blocks
// in which positions begin to differ into memory of its own, in the order of a chain, and attends to the copy.
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "ops.h"

namespace quire {

struct Step;

constexpr int64_t kMaxTreeTokens = 64;  // bits of a word

class DraftTrees {
 public:
    // Consecutive tokens of a sequence, each the parent of the next.
    struct Branch {
        int64_t seq, start, count;
        int64_t context;     // positions that the last token sees
        int64_t num_before;  // places before the tree
        uint64_t word;       // the places of the tree that the last token sees; 0: those before it

        // Whether some position is not at the place of a chain.
        bool moves() const { return (word & (word + 1)) != 0; }
    };

    // Throws std::invalid_argument unless each word of the sequence is a parent's and the token itself.
    static void check(const Step& step, int64_t seq);

    void find(const Step& step, const Pages& pages, int num_threads);

    int64_t num_runs() const { return int64_t(runs_.size()); }
    const Branch& run(int64_t index) const { return runs_[index]; }
    const Branch& of_token(int64_t token) const { return tokens_[token]; }

    // Lets a tile read the last blocks of a branch from a copy, in the order of its positions.
    void read_tail(const Branch& branch, const int32_t* block_table, int thread, AttentionTile& tile) const;

 private:
    std::vector<Branch> runs_;    // all tokens of the step, as few branches as possible
    std::vector<Branch> tokens_;  // [num_tokens] every token as a branch of its own
    Buffer<uint8_t> tails_;       // [threads, tail_stride_]
    size_t tail_stride_ = 0;
};

}  // namespace quire
