// Passes over one row of logits, [vocab] floats. NaN counts as -inf: not above any logit, and of weight 0.
#pragma once

#include <cstdint>
#include <vector>

#include "race.h"
#include "softmax.h"

namespace quire {

// A mask has a bit for every token: token t is bit t % 32 of word t / 32.
inline bool has_bit(const uint32_t* mask, int64_t id) { return mask[id / 32] >> (id % 32) & 1; }

// out[i] = x[i], or -inf where the mask has no bit.
void copy_masked(const float* x, int64_t vocab, const uint32_t* mask, float* out);

struct MaxLogit {
    float logit;
    int32_t id;  // -1: no logit is above -inf
};

// The greatest logit; among equals the lowest id.
MaxLogit find_max(const float* x, int64_t vocab);

// How many logits are strictly greater than `bound`.
int64_t count_greater(const float* x, int64_t vocab, float bound);

// The id that wins the race. max_weight, above 0, is the greatest weight.
int32_t pick_winner(const float* x, int64_t vocab, const Softmax& softmax, int64_t max_weight, const Race& race);

// A candidate token. Candidates are ordered by (key, id).
struct Candidate {
    double key;  // minus the logit: the most likely first
    int64_t weight;
    int32_t id;

    bool operator<(const Candidate& other) const { return key < other.key || (key == other.key && id < other.id); }
};

// Replaces `out` by the tokens whose logit is above `bound`, without weights.
void collect_above(const float* x, int64_t vocab, float bound, std::vector<Candidate>& out);

// Replaces `out` by the first `count` candidates, unordered and without weights. Tokens at -inf are left out.
void select_greatest(const float* x, int64_t vocab, int64_t count, std::vector<Candidate>& out);

// Reorders candidates so that the smallest prefix, in candidate order, whose weights reach `need` comes first. Returns
// its length. need <= the sum of all weights. Linear in the number of candidates.
size_t select_mass(std::vector<Candidate>& candidates, int64_t need);

}  // namespace quire
