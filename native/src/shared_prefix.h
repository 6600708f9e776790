// Shared-prefix groups: decoding sequences of a step whose contexts start with the same KV blocks.
//
// Sequences served from the prefix cache have the same blocks at the start of their block tables. One pass over those
// blocks serves the queries of the whole group, so their keys and values are read once. The partial softmax of a query
// does not depend on the other queries of its tile, so grouping changes no bit.
#pragma once

#include <cstdint>
#include <vector>

namespace quire {

struct Step;

class SharedPrefixes {
 public:
    struct Group {
        std::vector<int32_t> seqs;  // each has one token in this step
        int64_t num_splits;         // shared by all of them, from position 0
    };

    // Groups have at most `max_seqs` sequences. A split is `split_blocks` blocks of `block_size` tokens.
    void find(const Step& step, int64_t split_blocks, int64_t block_size, int64_t max_seqs);

    const std::vector<Group>& groups() const { return groups_; }
    int64_t num_members() const { return num_members_; }
    // The sequence's index among the members of all groups, or -1. And the number of its shared splits.
    int64_t member(int64_t seq) const { return groups_.empty() ? -1 : member_[seq]; }
    int64_t shared_splits(int64_t seq) const { return groups_.empty() ? 0 : shared_[seq]; }

 private:
    std::vector<Group> groups_;
    std::vector<int64_t> member_, shared_;  // [num_seqs]
    std::vector<int32_t> order_;            // candidate sequences, sorted by their first block
    int64_t num_members_ = 0;
};

}  // namespace quire
