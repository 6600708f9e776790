// How a thread carries out attention over pages: which tiles of queries and parts of contexts it takes.
#pragma once

#include <atomic>
#include <cstdint>

#include "prefetch.h"
#include "tape.h"

namespace quire {

class AttentionWalk {
 public:
    AttentionWalk(Tape& tape, const Step& step, const Team& team)
        : tape_(tape), step_(step), team_(team), kernels_(kernels()) {}

    // The queries of a run that read one KV head, ordered by token and then by head, are cut into tiles. Whoever is
    // free takes the next one; the longest of a run come first. Where there are too few tiles to keep everybody busy,
    // their contexts are cut into parts as well. Beginnings that several runs share are attended to first, together.
    void run(const Attention& op);

    // The keys and values that this thread will attend to first, where one token's context is cut into parts.
    Ahead first_of_mine(const Attention& op) const;

 private:
    // Where every run is one token and there are this many for each thread, who takes one attends to all of its heads,
    // whose pages are neighbours, and fetches where the next one begins.
    static constexpr int64_t kRunsAThread = 8;
    void run_tokens(const Attention& op, int64_t group, std::atomic<int64_t>& counter) const;

    // Neighbouring rows of queries of one sequence: its tokens of this step, or one of few.
    struct Run {
        int64_t seq;
        int64_t start, count;
        int64_t context;  // positions the last of them sees
        const int32_t* block_table;
    };
    Run run_at(const Attention& op, int64_t index) const;
    int64_t num_runs(bool few) const { return few ? step_.num_logits : step_.num_seqs; }
    int64_t group_of(const Attention& op) const {
        return op.q.columns / tape_.pages_.value_dim() / tape_.pages_.num_kv_heads;
    }

    // The last position that a token of a run sees: its own, or the source's last.
    static int64_t last_seen(const Attention& op, const Run& run, int64_t token) {
        return op.of_source ? run.context - 1 : run.context - run.count + token;
    }

    // visit(run, KV head, first query, number of parts) for every tile of the step, in one order.
    template <class Visit>
    void each_tile(const Attention& op, int64_t group, const Visit& visit) const;

    // visit(part, end): the parts [begin, end) of a tile, in pieces. Neighbours go to one thread, which fetches the
    // next one beforehand, while there are enough for all. The last piece, which may be the longest, comes first: to
    // who had time to fetch.
    template <class Visit>
    void each_piece(int64_t begin, int64_t end, const Visit& visit) const;

    // visit(group of sequences, KV head, part), in one order.
    template <class Visit>
    void each_shared_part(const Visit& visit) const;

    // Where the findings of a tile's parts lie, and how many of them are there: none between two ops.
    struct Places {
        float* data;
        int64_t stride;
        std::atomic<int64_t>& num_found;

        float* at(int64_t part) const { return data + part * stride; }
    };
    Places places_alone(int64_t tile) const;
    Places places_of(int64_t seq, int64_t kv_head, int64_t group) const;

    AttentionTile tile_at(const Attention& op, const Run& run, int64_t kv_head, int64_t group, int64_t first) const;

    // `count` more parts of a tile were attended to. Whoever brings the last ones folds them all.
    void fold_if_last(const AttentionTile& tile, const Places& places, int64_t count, int64_t num_parts) const;

    // One walk over a part for the queries of all; what each of them found goes to its own place.
    void attend_together(const Attention& op, int64_t group, const Cascade::Group& shared, int64_t kv_head,
                         int64_t part) const;

    Tape& tape_;
    const Step& step_;
    const Team& team_;
    const Kernels& kernels_;
};

}  // namespace quire
