// Sequences that share their beginning: what a step's decoding tokens attend to together.
//
// A block table names pages; sequences served from the prefix cache name the same ones. Where the first parts of
// several contexts are the same pages, one walk over them serves the queries of all, and keys and values are read once.
// What a query finds in a part does not depend on the other queries of its tile, so this changes no bit.
#pragma once

#include <cstdint>
#include <vector>

namespace quire {

struct Step;

class Cascade {
 public:
    struct Group {
        std::vector<int32_t> seqs;  // each with one token in this step
        int64_t num_parts;          // that all of them share, from the start
    };

    // Groups of at most `most` sequences; a part is `part_blocks` blocks of `block_size` tokens.
    void find(const Step& step, int64_t part_blocks, int64_t block_size, int64_t most);

    const std::vector<Group>& groups() const { return groups_; }
    int64_t num_members() const { return num_members_; }
    // The sequence's place among all that share, or -1; and how many of its parts are shared.
    int64_t member(int64_t seq) const { return groups_.empty() ? -1 : member_[seq]; }
    int64_t shared_parts(int64_t seq) const { return groups_.empty() ? 0 : shared_[seq]; }

 private:
    std::vector<Group> groups_;
    std::vector<int64_t> member_, shared_;  // [num_seqs]
    std::vector<int32_t> order_;            // sequences that may share, by their first block
    int64_t num_members_ = 0;
};

}  // namespace quire
