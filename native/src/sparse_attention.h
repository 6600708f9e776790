// Sparse attention (DSA): an indexer chooses the positions that a token attends to, and no others are read.
#pragma once

#include <cstdint>

#include "tape.h"

namespace quire {

// The numbers of the `top_k` best of `count` scores, the lower one of equals, in ascending order; then -1. `order`:
// memory for `count` numbers.
void choose_best(const float* scores, int64_t count, int64_t top_k, uint64_t* order, float* out);

class SparseAttention {
 public:
    SparseAttention(Tape& tape, const Step& step, const ThreadPool& pool)
        : tape_(tape), step_(step), pool_(pool), kernels_(kernels()) {}

    // Threads take rows. If there are fewer rows than threads, they share the context of each.
    void choose(const TopPositions& op) const;

    // A free thread takes the next tile of heads of a row. It copies the chosen vectors to memory of its own, in order,
    // and attends to the copy: to all positions of a short context with the bits of dense attention.
    void attend(const SparseMla& op) const;

 private:
    // What the token of a row sees: `count` positions of a sequence, up to its own.
    struct Seen {
        int64_t count;
        const int32_t* block_table;
    };
    Seen seen_by(const View& out, int64_t r) const;
    int64_t num_rows(const View& out) const { return out.logits_only ? step_.num_logits : step_.num_tokens; }

    // The scores of the blocks [first, end) of what the token of a row sees.
    void score(const TopPositions& op, int64_t r, int64_t first, int64_t end, float* scores) const;
    // The positions of the `op.out.columns` best scores, the lower one of equals, in ascending order; then -1.
    void select(const TopPositions& op, int64_t r, const float* scores) const;
    // Copies the vectors at these positions, one behind the other, to this thread's memory.
    Pages gather(int64_t layer, const Seen& seen, const float* positions, int64_t count) const;

    Tape& tape_;
    const Step& step_;
    const ThreadPool& pool_;
    const Kernels& kernels_;
};

}  // namespace quire
