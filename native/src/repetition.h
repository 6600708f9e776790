// Penalties and bans of what was said before. Spec: ops/reference/repetition.py
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace quire {

struct DryParams {
    double multiplier = 0.0;  // 0: no penalty
    double base = 1.75;
    int64_t allowed_length = 2;
    int64_t last_n = -1;                                                   // tokens to look back; -1: all
    std::unordered_map<int32_t, std::vector<std::vector<int32_t>>> tails;  // of breakers, by their first token
};

// Calls ban(token) for each token that would complete an n-gram of `size` tokens that is there already.
template <class Ban>
void for_each_ngram_end(const std::vector<int32_t>& tokens, int64_t size, const Ban& ban) {
    const int64_t end = int64_t(tokens.size()) - size + 1, before = size - 1;  // the suffix begins at `end`
    for (int64_t i = 0; i < end; ++i) {
        int64_t length = 0;
        while (length < before && tokens[i + length] == tokens[end + length]) ++length;
        if (length == before) ban(tokens[i + before]);
    }
}

// What to subtract from the logit of each token that would go on repeating, without the others.
std::unordered_map<int32_t, float> dry_penalties(const DryParams& dry, const std::vector<int32_t>& tokens);

}  // namespace quire
