// Texts that were seen, found again by the tokens they end with: the `suffix` method of speculative decoding.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace quire {

// A place in a history where the last `length` tokens of some text stood before; `next` is the position behind them.
struct Match {
    int64_t next;
    int64_t length;
};

// The last `capacity` tokens of one text or of several. Positions where the same two tokens stood are chained from the
// newest to the oldest, as compressors of the LZ77 family do: 12 bytes a token and constant time to append one, where a
// suffix tree of depth d has up to d nodes a token.
class TokenHistory {
 public:
    static constexpr int32_t kBorder = -1;  // between texts: nothing matches or continues across it

    explicit TokenHistory(int64_t capacity);

    void append(const int32_t* tokens, int64_t n);
    void forget_before(int64_t position) { first_ = position; }
    int64_t size() const { return end_; }  // tokens that were appended
    int64_t num_bytes() const;

    // The token at a position, kBorder where there is none (any more, or yet).
    int32_t at(int64_t position) const {
        return position < end_ && position >= begin() ? tokens_[size_t(position & mask())] : kBorder;
    }

    // Where the last two to `max_length` of the n tokens stood before, the newest first, at most `max_matches`.
    // A place at the end of the history is left out: nothing followed yet.
    std::vector<Match> find(const int32_t* tokens, int64_t n, int64_t max_length, int64_t max_matches) const;

 private:
    int64_t begin() const { return std::max(first_, end_ - int64_t(tokens_.size())); }
    int64_t mask() const { return int64_t(tokens_.size()) - 1; }
    size_t bucket(int32_t before, int32_t last) const;
    void chain(int64_t position);
    void grow();

    int64_t capacity_;
    int64_t first_ = 0;  // positions before it are forgotten
    int64_t end_ = 0;
    std::vector<int32_t> tokens_;     // a ring
    std::vector<uint32_t> distance_;  // from a position to the one before it in its chain; 0: the oldest
    std::vector<int64_t> newest_;     // of each chain, plus one; 0: none
};

struct DraftRules {
    int64_t max_tokens;       // drafts at most
    int64_t max_length;       // of a match
    double drafts_per_token;  // of a match
    double min_probability;   // of a draft: the share of the matches that go on with it and with those before it
};

// The likeliest continuation of the own text, by what followed its last tokens earlier in it or in `shared` (may be
// null). A continuation's score is the expected number of its drafts that are right, if matches go on as they did.
std::vector<int32_t> suffix_drafts(const TokenHistory& own, const TokenHistory* shared, const DraftRules& rules);

// A tree of continuations, the likeliest nodes first (core/draft_tree.py).
struct SuffixTree {
    std::vector<int32_t> tokens;
    std::vector<int32_t> parents;     // an earlier node, or -1
    std::vector<double> confidences;  // the share of the matches at the parent that go on with the node
};

// The same as a tree of at most `max_nodes`: `max_tokens` is its depth, and all continuations are kept that are likely
// enough.
SuffixTree suffix_tree(const TokenHistory& own, const TokenHistory* shared, int64_t max_nodes, const DraftRules& rules);

}  // namespace quire
