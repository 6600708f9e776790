#include "sentencepiece.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

namespace quire {

namespace {

constexpr std::string_view kSpace = "\xe2\x96\x81";  // what vocabularies have in place of a space

// Bytes of the character that begins with this one.
size_t character_size(char first) {
    const auto byte = uint8_t(first);
    return byte < 0xc0 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
}

uint32_t hash_of(std::string_view text) { return uint32_t(std::hash<std::string_view>{}(text)); }

uint64_t step(size_t node, char c) { return node << 8 | uint8_t(c); }

// Whether a space stands in it behind something else.
bool spans_words(std::string_view piece) {
    size_t at = 0;
    while (piece.substr(at, kSpace.size()) == kSpace) at += kSpace.size();
    return piece.find(kSpace, at) != std::string_view::npos;
}

struct Symbol {
    std::string_view text;  // empty: joined with the one before
    int before, after;      // neighbours; -1: none
};

struct Pair {
    float score;
    int left;
    size_t size;  // of both, when they were seen: one that has grown since is no such pair any more
    int right;

    bool operator<(const Pair& other) const { return score != other.score ? score < other.score : left > other.left; }
};

}  // namespace

SentencePieces::SentencePieces(std::vector<std::string> pieces, std::vector<float> scores, std::vector<uint8_t> joined,
                               const std::vector<int32_t>& first, const std::array<int32_t, 256>& bytes,
                               int32_t unknown, std::string prefix)
    : pieces_(std::move(pieces)),
      scores_(std::move(scores)),
      joined_(std::move(joined)),
      bytes_(bytes),
      unknown_(unknown),
      prefix_(std::move(prefix)) {
    size_t places = 2;
    while (places < 2 * pieces_.size()) places *= 2;
    table_.assign(places, Entry{0, -1});
    for (size_t i = 0; i < pieces_.size(); ++i) {
        const uint32_t hash = hash_of(pieces_[i]);
        size_t at = hash & (places - 1);
        while (table_[at].id >= 0) at = (at + 1) & (places - 1);
        table_[at] = {hash, int32_t(i)};
    }
    for (size_t i = 0; i < pieces_.size() && words_apart_; ++i) words_apart_ = !(joined_[i] && spans_words(pieces_[i]));
    for (const int32_t id : first) {
        size_t node = 0;
        for (const char c : pieces_.at(size_t(id))) {
            const auto [next, is_new] = steps_.try_emplace(step(node, c), ends_.size());
            if (is_new) ends_.push_back(-1);
            node = next->second;
        }
        if (node) ends_[node] = id;
    }
}

int32_t SentencePieces::id(std::string_view piece) const {
    const uint32_t hash = hash_of(piece);
    const size_t last = table_.size() - 1;
    for (size_t at = hash & last; table_[at].id >= 0; at = (at + 1) & last)
        if (table_[at].hash == hash && pieces_[size_t(table_[at].id)] == piece) return table_[at].id;
    return -1;
}

// The longest piece that is found first and begins here, or -1.
int32_t SentencePieces::first_at(std::string_view rest) const {
    int32_t longest = -1;
    size_t node = 0;
    for (const char c : rest) {
        const auto next = steps_.find(step(node, c));
        if (next == steps_.end()) break;
        node = next->second;
        if (ends_[node] >= 0) longest = ends_[node];
    }
    return longest;
}

std::vector<int32_t> SentencePieces::encode(std::string_view text) const {
    std::vector<int32_t> ids;
    std::string part;      // of the text, to be joined by itself
    bool begins = true;    // nothing stands between it and the text's begin, or a piece found first
    bool in_word = false;  // it ends with something else than a space
    const auto flush = [&] {
        if (!part.empty()) join(part, ids);
        part.clear();
    };
    for (size_t at = 0; at < text.size();) {
        if (const int32_t found = first_at(text.substr(at)); found >= 0) {
            flush();
            ids.push_back(found);
            at += pieces_[size_t(found)].size();
            begins = true;
            continue;
        }
        if (begins) part = prefix_;
        begins = false;
        const bool space = text[at] == ' ';
        const size_t size = space ? 1 : std::min(character_size(text[at]), text.size() - at);
        const std::string_view character = space ? kSpace : text.substr(at, size);
        if (in_word && words_apart_ && character == kSpace) flush();
        part += character;
        in_word = character != kSpace;
        at += size;
    }
    flush();
    return ids;
}

void SentencePieces::join(std::string_view text, std::vector<int32_t>& ids) const {
    std::vector<Symbol> symbols;
    for (size_t at = 0; at < text.size();) {
        const size_t size = std::min(character_size(text[at]), text.size() - at);
        symbols.push_back({text.substr(at, size), int(symbols.size()) - 1, int(symbols.size()) + 1});
        at += size;
    }
    symbols.back().after = -1;
    std::priority_queue<Pair> pairs;
    const auto see = [&](int left, int right) {
        if (left < 0 || right < 0) return;
        const std::string_view both(symbols[left].text.data(), symbols[left].text.size() + symbols[right].text.size());
        if (const int32_t found = id(both); found >= 0 && joined_[size_t(found)])
            pairs.push({scores_[size_t(found)], left, both.size(), right});
    };
    for (int i = 0; i + 1 < int(symbols.size()); ++i) see(i, i + 1);
    while (!pairs.empty()) {
        const Pair pair = pairs.top();
        pairs.pop();
        Symbol &left = symbols[pair.left], &right = symbols[pair.right];
        if (left.text.empty() || right.text.empty() || left.text.size() + right.text.size() != pair.size) continue;
        left.text = {left.text.data(), pair.size};
        right.text = {};
        left.after = right.after;
        if (left.after >= 0) symbols[left.after].before = pair.left;
        see(left.before, pair.left);
        see(pair.left, left.after);
    }
    for (int i = 0; i >= 0; i = symbols[i].after) spell(symbols[i].text, ids);
}

// A symbol's id; of a character that has none, those of its bytes; or the unknown one, once for neighbours.
void SentencePieces::spell(std::string_view symbol, std::vector<int32_t>& ids) const {
    if (const int32_t whole = id(symbol); whole >= 0) {
        ids.push_back(whole);
        return;
    }
    if (std::all_of(symbol.begin(), symbol.end(), [&](char c) { return bytes_[uint8_t(c)] >= 0; }))
        for (const char c : symbol) ids.push_back(bytes_[uint8_t(c)]);
    else if (unknown_ >= 0 && (ids.empty() || ids.back() != unknown_))
        ids.push_back(unknown_);
}

}  // namespace quire
