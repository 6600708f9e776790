// N-gram (prompt) lookup: finds an earlier occurrence of the last few tokens.
#pragma once

#include <cstdint>

namespace quire {

// Matches the last `min_length` to `max_length` tokens with earlier ones. Returns the position behind the longest
// match, the newest among equals, or -1. Only the newest `max_candidates` occurrences of the last token are tried:
// among more there is rarely a longer match.
inline int64_t find_ngram(const int32_t* tokens, int64_t n, int64_t min_length, int64_t max_length,
                          int64_t max_candidates) {
    const int64_t last = n - 1;
    int64_t match_end = -1, longest = min_length - 1;
    for (int64_t position = last - 1; position >= 0 && max_candidates > 0 && longest < max_length; --position) {
        if (tokens[position] != tokens[last]) continue;
        --max_candidates;
        int64_t length = 1;
        while (length < max_length && length <= position && tokens[position - length] == tokens[last - length])
            ++length;
        if (length > longest) longest = length, match_end = position + 1;
    }
    return match_end;
}

}  // namespace quire
