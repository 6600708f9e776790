// Paged attention: how the tiles of queries and the splits of contexts are divided among the threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "prefetch.h"
#include "tape.h"

namespace quire {

class PagedAttention {
 public:
    PagedAttention(Tape& tape, const Step& step, const ThreadPool& pool)
        : tape_(tape), step_(step), pool_(pool), kernels_(kernels()) {}

    // The queries of a run that read one KV head, ordered by token and then by head, are divided into tiles. A free
    // thread takes the next tile; the tiles of a run with the longest context come first. If there are too few tiles to
    // keep all threads busy, contexts are divided into splits too. The splits of shared prefixes come first.
    void run(const Attention& op);

    // The keys and values that this thread will read first, if the context of one token is divided into splits.
    KVPrefetch first_prefetch(const Attention& op) const;

 private:
    // If every run is one token, and each thread has at least this many, a thread takes whole tokens: it attends with
    // all heads of a token, whose pages are adjacent, and prefetches the start of the next one.
    static constexpr int64_t kRunsPerThread = 8;
    void run_tokens(const Attention& op, std::atomic<int64_t>& counter) const;

    // Consecutive rows of queries of one sequence: its tokens of this step or, if only logits are wanted, one of them.
    struct Run {
        int64_t seq;
        int64_t start, count;
        int64_t context;  // positions that the last of them sees
        const int32_t* block_table;
        const DraftTrees::Branch* branch = nullptr;  // where the last of them has positions elsewhere
    };
    Run run_at(const Attention& op, int64_t index) const;
    const int32_t* block_table(const Attention& op, int64_t seq) const {
        return (op.windowed ? step_.window_tables : step_.block_tables) + seq * step_.table_stride;
    }
    int64_t num_runs(const Attention& op) const {
        if (op.out.logits_only) return step_.num_logits;
        return has_trees(op) ? tape_.draft_trees_.num_runs() : step_.num_seqs;
    }
    bool has_trees(const Attention& op) const { return step_.ancestors && !op.of_source; }

    // The query heads that share a KV head.
    struct Heads {
        int64_t first, count;
    };
    Heads heads_of(const Attention& op, int64_t kv_head) const {
        const int64_t num_heads = op.q.columns / tape_.pages_.value_dim();
        const int64_t first = std::max<int64_t>(0, kv_head * op.group - op.skipped);
        return {first, std::min((kv_head + 1) * op.group - op.skipped, num_heads) - first};
    }

    // The last position that a token of a run sees: its own, or the last one of the source.
    static int64_t last_seen(const Attention& op, const Run& run, int64_t token) {
        return op.of_source ? run.context - 1 : run.context - run.count + token;
    }

    // The first position that a token at `position` sees.
    static int64_t first_seen(const Attention& op, int64_t position) {
        if (op.window < 0) return position - position % -op.window;
        return op.window ? std::max<int64_t>(0, position - op.window + 1) : 0;
    }

    // visit(run, KV head, first query, number of splits) for every tile of the step, in the same order in all threads.
    template <class Visit>
    void each_tile(const Attention& op, const Visit& visit) const;

    // visit(first, end) for pieces of the splits [begin, end) of a tile. A piece is several consecutive splits, which
    // one thread prefetches one after the other, as long as there are enough pieces for all threads. The last piece,
    // which may be the longest, comes first: its thread has had time to prefetch.
    template <class Visit>
    void each_piece(int64_t begin, int64_t end, const Visit& visit) const;

    // visit(group of sequences, KV head, split), in the same order in all threads.
    template <class Visit>
    void each_shared_split(const Visit& visit) const;

    // The partial softmaxes of the splits of a tile, and how many of them are done: none between two ops.
    struct PartialSlots {
        float* data;
        int64_t stride;
        std::atomic<int64_t>& num_done;

        float* at(int64_t split) const { return data + split * stride; }
    };
    PartialSlots partials_of_tile(int64_t tile) const;
    PartialSlots partials_of_seq(const Attention& op, int64_t seq, int64_t kv_head) const;

    AttentionTile tile_at(const Attention& op, const Run& run, int64_t kv_head, int64_t first) const;

    // Notes that `count` more splits of a tile are done. The thread that finishes the last one merges them all.
    void merge_if_last(const AttentionTile& tile, const PartialSlots& partials, int64_t count,
                       int64_t num_splits) const;

    // One pass over a shared split for the queries of all sequences of a group. Copies each partial softmax to the slot
    // of its sequence.
    void attend_shared_split(const Attention& op, const SharedPrefixes::Group& shared, int64_t kv_head,
                             int64_t split) const;

    Tape& tape_;
    const Step& step_;
    const ThreadPool& pool_;
    const Kernels& kernels_;
};

}  // namespace quire
