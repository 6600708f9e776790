#include "token_history.h"

#include <algorithm>
#include <queue>

namespace quire {

namespace {

constexpr int64_t kFirstSize = 256;   // tokens; the ring doubles until it has its capacity
constexpr int64_t kMaxMatches = 48;   // the newest that are looked at
constexpr double kTie = 1e-9;         // scores that differ by less are equal
constexpr int64_t kMaxVisited = 256;  // of a chain, which holds other pairs of tokens as well

int64_t power_of_two(int64_t least) {
    int64_t size = 1;
    while (size < least) size *= 2;
    return size;
}

struct Drafts : SuffixTree {
    double score = 0;  // the sum of the probabilities
};

// What the first `count` matches continue with: at each position what most of them have there, as long as enough agree.
// Behind the end of the own text stand the drafts themselves: what repeats goes on repeating.
Drafts follow(const TokenHistory& history, const std::vector<Match>& matches, size_t count, bool own, int64_t limit,
              double min_probability) {
    Drafts drafts;
    std::vector<int64_t> alive(count);
    for (size_t i = 0; i < count; ++i) alive[i] = matches[i].next;
    double probability = 1;
    while (int64_t(drafts.tokens.size()) < limit) {
        auto token_at = [&](int64_t position) {
            const int64_t ahead = position - history.size();
            if (!own || ahead < 0) return history.at(position);
            return size_t(ahead) < drafts.tokens.size() ? drafts.tokens[size_t(ahead)] : TokenHistory::kBorder;
        };
        int32_t chosen = TokenHistory::kBorder;
        size_t most = 0;
        for (size_t i = 0; i < alive.size() && alive.size() - i > most; ++i) {
            const int32_t token = token_at(alive[i]);
            if (token == TokenHistory::kBorder || token == chosen) continue;
            size_t votes = 1;
            for (size_t j = i + 1; j < alive.size(); ++j) votes += token_at(alive[j]) == token;
            if (votes > most) most = votes, chosen = token;
        }
        if (most == 0) break;
        probability *= double(most) / double(alive.size());
        if (probability < min_probability) break;
        size_t left = 0;
        for (const int64_t position : alive)
            if (token_at(position) == chosen) alive[left++] = position + 1;
        alive.resize(left);
        drafts.tokens.push_back(chosen);
        drafts.score += probability;
    }
    return drafts;
}

// Matches that go on alike.
struct Branch {
    std::vector<int64_t> alive;  // their next positions
    std::vector<int32_t> path;   // their tokens from the root on
    int32_t parent = -1;
    double confidence = 1, probability = 1;
    int64_t number = 0;  // of equally likely branches the one met first is taken

    bool operator<(const Branch& other) const {
        return probability != other.probability ? probability < other.probability : number > other.number;
    }
};

// One more token: a branch for each that matches go on with. Behind the end of the own text stands the path itself.
std::vector<Branch> branches_behind(const TokenHistory& history, const Branch& at, bool own) {
    std::vector<Branch> branches;
    for (const int64_t position : at.alive) {
        const int64_t ahead = position - history.size();
        int32_t token = TokenHistory::kBorder;
        if (!own || ahead < 0)
            token = history.at(position);
        else if (size_t(ahead) < at.path.size())
            token = at.path[size_t(ahead)];
        if (token == TokenHistory::kBorder) continue;
        size_t i = 0;
        while (i < branches.size() && branches[i].path.back() != token) ++i;
        if (i == branches.size()) {
            branches.emplace_back();
            branches[i].path = at.path;
            branches[i].path.push_back(token);
        }
        branches[i].alive.push_back(position + 1);
    }
    for (Branch& branch : branches) {
        branch.confidence = double(branch.alive.size()) / double(at.alive.size());
        branch.probability = at.probability * branch.confidence;
    }
    return branches;
}

// All that the first `count` matches continue with, the likeliest first, up to a depth of `limit`.
Drafts grow(const TokenHistory& history, const std::vector<Match>& matches, size_t count, bool own, int64_t limit,
            double min_probability, int64_t max_nodes) {
    Drafts drafts;
    std::priority_queue<Branch> waiting;
    int64_t number = 0;
    const auto extend = [&](const Branch& at, int32_t node) {
        for (Branch& branch : branches_behind(history, at, own)) {
            if (branch.probability < min_probability) continue;
            branch.parent = node;
            branch.number = number++;
            waiting.push(std::move(branch));
        }
    };
    Branch root;
    for (size_t i = 0; i < count; ++i) root.alive.push_back(matches[i].next);
    extend(root, -1);
    while (!waiting.empty() && int64_t(drafts.tokens.size()) < max_nodes) {
        const Branch branch = waiting.top();
        waiting.pop();
        drafts.tokens.push_back(branch.path.back());
        drafts.parents.push_back(branch.parent);
        drafts.confidences.push_back(branch.confidence);
        drafts.score += branch.probability;
        if (int64_t(branch.path.size()) < limit) extend(branch, int32_t(drafts.tokens.size()) - 1);
    }
    return drafts;
}

// Of all lengths that matches have: a longer match is surer, and a shorter one has more to count. A tree if it may have
// nodes.
Drafts best_drafts(const TokenHistory& history, std::vector<Match> matches, bool own, const DraftRules& rules,
                   int64_t max_nodes) {
    std::stable_sort(matches.begin(), matches.end(),
                     [](const Match& a, const Match& b) { return a.length > b.length; });
    Drafts best;
    for (size_t count = 1; count <= matches.size(); ++count) {
        const int64_t length = matches[count - 1].length;
        if (count < matches.size() && matches[count].length == length) continue;
        const int64_t allowed = std::max<int64_t>(1, int64_t(rules.drafts_per_token * double(length)));
        const int64_t limit = std::min(rules.max_tokens, allowed);
        Drafts found = max_nodes ? grow(history, matches, count, own, limit, rules.min_probability, max_nodes)
                                 : follow(history, matches, count, own, limit, rules.min_probability);
        if (found.score > best.score + kTie) best = std::move(found);
    }
    return best;
}

Drafts drafts_behind(const TokenHistory& own, const TokenHistory* shared, const DraftRules& rules, int64_t max_nodes) {
    const int64_t n = std::min(own.size(), rules.max_length);
    std::vector<int32_t> last(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) last[size_t(i)] = own.at(own.size() - n + i);
    const auto matches = [&](const TokenHistory& history) {
        return history.find(last.data(), n, rules.max_length, kMaxMatches);
    };
    Drafts best = best_drafts(own, matches(own), true, rules, max_nodes);
    if (shared) {
        Drafts others = best_drafts(*shared, matches(*shared), false, rules, max_nodes);
        if (others.score > best.score + kTie) best = std::move(others);
    }
    return best;
}

}  // namespace

TokenHistory::TokenHistory(int64_t capacity) : capacity_(power_of_two(capacity)) {
    const size_t size = size_t(std::min(capacity_, kFirstSize));
    tokens_.resize(size), distance_.resize(size), newest_.resize(size / 2 + 1);
}

int64_t TokenHistory::num_bytes() const {
    return int64_t(tokens_.size() * sizeof(int32_t) + distance_.size() * sizeof(uint32_t) +
                   newest_.size() * sizeof(int64_t));
}

size_t TokenHistory::bucket(int32_t before, int32_t last) const {
    const uint64_t pair = (uint64_t(uint32_t(before)) << 32) | uint32_t(last);
    return size_t((pair * 0x9E3779B97F4A7C15ull) >> 24) % newest_.size();
}

void TokenHistory::chain(int64_t position) {
    const size_t place = size_t(position & mask());
    distance_[place] = 0;
    const int32_t last = at(position), before = at(position - 1);
    if (last == kBorder || before == kBorder) return;
    int64_t& newest = newest_[bucket(before, last)];
    const int64_t distance = newest ? position - (newest - 1) : 0;
    if (distance < int64_t(tokens_.size())) distance_[place] = uint32_t(distance);
    newest = position + 1;
}

void TokenHistory::grow() {
    const size_t size = tokens_.size() * 2;
    tokens_.resize(size), distance_.resize(size);
    newest_.assign(size / 2 + 1, 0);
    for (int64_t position = 0; position < end_; ++position) chain(position);
}

void TokenHistory::append(const int32_t* tokens, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        if (end_ == int64_t(tokens_.size()) && end_ < capacity_) grow();
        tokens_[size_t(end_ & mask())] = tokens[i];
        ++end_;
        chain(end_ - 1);
    }
}

std::vector<Match> TokenHistory::find(const int32_t* tokens, int64_t n, int64_t max_length, int64_t max_matches) const {
    std::vector<Match> found;
    if (n < 2 || tokens[n - 1] == kBorder || tokens[n - 2] == kBorder) return found;
    int64_t position = newest_[bucket(tokens[n - 2], tokens[n - 1])] - 1;
    for (int64_t visited = 0; position >= begin() && visited < kMaxVisited; ++visited) {
        int64_t length = 0;
        while (length < std::min(n, max_length) && tokens[n - 1 - length] != kBorder &&
               at(position - length) == tokens[n - 1 - length])
            ++length;
        if (length >= 2 && position + 1 < end_) found.push_back({position + 1, length});
        const int64_t distance = distance_[size_t(position & mask())];
        if (!distance || int64_t(found.size()) == max_matches) break;
        position -= distance;
    }
    return found;
}

std::vector<int32_t> suffix_drafts(const TokenHistory& own, const TokenHistory* shared, const DraftRules& rules) {
    return drafts_behind(own, shared, rules, 0).tokens;
}

SuffixTree suffix_tree(const TokenHistory& own, const TokenHistory* shared, int64_t max_nodes,
                       const DraftRules& rules) {
    return drafts_behind(own, shared, rules, max_nodes);
}

}  // namespace quire
