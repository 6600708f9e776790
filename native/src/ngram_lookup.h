// Prompt lookup: where the last few tokens stood before.
#pragma once

#include <cstdint>

namespace quire {

// The end of the longest match of the last tokens, up to `most` of them and `least` at least, with tokens before them:
// the place behind it, the newest of several; or -1. Of the places where the last token stood, the newest `looked_at`
// are looked at: among more there is rarely a longer match.
inline int64_t find_repetition(const int32_t* tokens, int64_t n, int64_t least, int64_t most, int64_t looked_at) {
    const int64_t last = n - 1;
    int64_t found = -1, longest = least - 1;
    for (int64_t place = last - 1; place >= 0 && looked_at > 0 && longest < most; --place) {
        if (tokens[place] != tokens[last]) continue;
        --looked_at;
        int64_t length = 1;
        while (length < most && length <= place && tokens[place - length] == tokens[last - length]) ++length;
        if (length > longest) longest = length, found = place + 1;
    }
    return found;
}

}  // namespace quire
