#include "repetition.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace quire {

namespace {

// The last tokens of a sequence, the last one first.
struct Window {
    const int32_t* last;
    int64_t size;

    int32_t operator[](int64_t back) const { return *(last - back); }
};

// How many of the last tokens follow the last sequence breaker. Of those that begin with one token, the longest counts.
int64_t repeat_limit(const DryParams& dry, const Window& window) {
    if (dry.tails.empty()) return window.size;
    for (int64_t back = 0; back < window.size; ++back) {
        const auto tails = dry.tails.find(window[back]);
        if (tails == dry.tails.end()) continue;
        int64_t longest = -1;
        for (const std::vector<int32_t>& tail : tails->second) {
            const int64_t length = int64_t(tail.size());
            if (length <= longest || length > back) continue;
            int64_t i = 0;
            while (i < length && tail[i] == window[back - i - 1]) ++i;
            if (i == length) longest = length;
        }
        if (longest >= 0) return back - longest;
    }
    return window.size;
}

bool breaks(const DryParams& dry, int32_t token) {
    const auto tails = dry.tails.find(token);
    return tails != dry.tails.end() && std::any_of(tails->second.begin(), tails->second.end(),
                                                   [](const std::vector<int32_t>& tail) { return tail.empty(); });
}

float penalty(const DryParams& dry, int64_t length) {
    int64_t exponent = length - dry.allowed_length;
    if (dry.base > 1.000001) exponent = std::min(exponent, int64_t(88.7228391 / std::log(dry.base)));
    return float(
        std::min(dry.multiplier * std::pow(dry.base, double(exponent)), double(std::numeric_limits<float>::max())));
}

}  // namespace

std::unordered_map<int32_t, float> dry_penalties(const DryParams& dry, const std::vector<int32_t>& tokens) {
    std::unordered_map<int32_t, float> penalties;
    const int64_t known = int64_t(tokens.size());
    const Window window{tokens.data() + known - 1, dry.last_n < 0 ? known : std::min(known, dry.last_n)};
    if (window.size <= dry.allowed_length) return penalties;
    const int64_t limit = repeat_limit(dry, window);
    if (limit < dry.allowed_length) return penalties;

    // The Z-algorithm, backwards: matched[k] tokens before position k from the end are the last ones of the window.
    // Only the tokens up to `right` have been compared, from `left` on.
    std::vector<int32_t> matched(window.size);
    std::unordered_map<int32_t, int64_t> longest;
    for (int64_t k = 1, left = 0, right = 0; k < window.size; ++k) {
        int64_t length = k < right ? std::min<int64_t>(right - k, matched[k - left]) : 0;
        while (k + length < window.size && window[length] == window[k + length]) ++length;
        if (k + length > right) {
            left = k;
            right = k + length;
        }
        matched[k] = int32_t(length);
        length = std::min(length, limit);
        if (length < dry.allowed_length) continue;
        int64_t& of_token = longest[window[k - 1]];
        of_token = std::max(of_token, length);
    }
    for (const auto& [token, length] : longest)
        if (!breaks(dry, token)) penalties[token] = penalty(dry, length);
    return penalties;
}

}  // namespace quire
