#include "sentencepiece.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

namespace quire {

namespace {

constexpr std::string_view kSpace = "\xe2\x96\x81";  // stands for a space in vocabularies

// Bytes of the UTF-8 character that starts with this byte.
size_t character_size(char first) {
    const auto byte = uint8_t(first);
    return byte < 0xc0 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
}

uint32_t hash_of(std::string_view text) { return uint32_t(std::hash<std::string_view>{}(text)); }

uint64_t step(size_t node, char c) { return node << 8 | uint8_t(c); }

// Whether the piece has a space after another character.
bool spans_words(std::string_view piece) {
    size_t at = 0;
    while (piece.substr(at, kSpace.size()) == kSpace) at += kSpace.size();
    return piece.find(kSpace, at) != std::string_view::npos;
}

struct Symbol {
    std::string_view text;  // empty: merged into the symbol before
    int before, after;      // adjacent symbols; -1: none
};

struct Pair {
    float score;
    int left;
    size_t size;  // of both when the pair was queued: if one has grown since, the pair is stale
    int right;

    bool operator<(const Pair& other) const { return score != other.score ? score < other.score : left > other.left; }
};

}  // namespace

SentencePieces::SentencePieces(std::vector<std::string> pieces, std::vector<float> scores,
                               std::vector<uint8_t> mergeable, const std::vector<int32_t>& user_defined,
                               const std::array<int32_t, 256>& bytes, int32_t unknown, std::string prefix)
    : pieces_(std::move(pieces)),
      scores_(std::move(scores)),
      mergeable_(std::move(mergeable)),
      bytes_(bytes),
      unknown_(unknown),
      prefix_(std::move(prefix)) {
    size_t num_entries = 2;
    while (num_entries < 2 * pieces_.size()) num_entries *= 2;
    table_.assign(num_entries, Entry{0, -1});
    for (size_t i = 0; i < pieces_.size(); ++i) {
        const uint32_t hash = hash_of(pieces_[i]);
        size_t at = hash & (num_entries - 1);
        while (table_[at].id >= 0) at = (at + 1) & (num_entries - 1);
        table_[at] = {hash, int32_t(i)};
    }
    for (size_t i = 0; i < pieces_.size() && merges_within_words_; ++i)
        merges_within_words_ = !(mergeable_[i] && spans_words(pieces_[i]));
    for (const int32_t id : user_defined) {
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

// The longest user-defined piece at the start of `rest`, or -1.
int32_t SentencePieces::user_defined_at(std::string_view rest) const {
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
    std::string part;      // of the text, merged by itself
    bool begins = true;    // the part is at the start of the text, or follows a user-defined piece
    bool in_word = false;  // the part ends with a character that is not a space
    const auto flush = [&] {
        if (!part.empty()) merge(part, ids);
        part.clear();
    };
    for (size_t at = 0; at < text.size();) {
        if (const int32_t special = user_defined_at(text.substr(at)); special >= 0) {
            flush();
            ids.push_back(special);
            at += pieces_[size_t(special)].size();
            begins = true;
            continue;
        }
        if (begins) part = prefix_;
        begins = false;
        const bool space = text[at] == ' ';
        const size_t size = space ? 1 : std::min(character_size(text[at]), text.size() - at);
        const std::string_view character = space ? kSpace : text.substr(at, size);
        if (in_word && merges_within_words_ && character == kSpace) flush();
        part += character;
        in_word = character != kSpace;
        at += size;
    }
    flush();
    return ids;
}

void SentencePieces::merge(std::string_view text, std::vector<int32_t>& ids) const {
    std::vector<Symbol> symbols;
    for (size_t at = 0; at < text.size();) {
        const size_t size = std::min(character_size(text[at]), text.size() - at);
        symbols.push_back({text.substr(at, size), int(symbols.size()) - 1, int(symbols.size()) + 1});
        at += size;
    }
    symbols.back().after = -1;
    std::priority_queue<Pair> pairs;
    const auto queue_pair = [&](int left, int right) {
        if (left < 0 || right < 0) return;
        const std::string_view both(symbols[left].text.data(), symbols[left].text.size() + symbols[right].text.size());
        if (const int32_t merged = id(both); merged >= 0 && mergeable_[size_t(merged)])
            pairs.push({scores_[size_t(merged)], left, both.size(), right});
    };
    for (int i = 0; i + 1 < int(symbols.size()); ++i) queue_pair(i, i + 1);
    while (!pairs.empty()) {
        const Pair pair = pairs.top();
        pairs.pop();
        Symbol &left = symbols[pair.left], &right = symbols[pair.right];
        if (left.text.empty() || right.text.empty() || left.text.size() + right.text.size() != pair.size) continue;
        left.text = {left.text.data(), pair.size};
        right.text = {};
        left.after = right.after;
        if (left.after >= 0) symbols[left.after].before = pair.left;
        queue_pair(left.before, pair.left);
        queue_pair(pair.left, left.after);
    }
    for (int i = 0; i >= 0; i = symbols[i].after) append_ids(symbols[i].text, ids);
}

// Appends the id of a symbol, or else the ids of its bytes, or else the unknown id, once for adjacent unknown symbols.
void SentencePieces::append_ids(std::string_view symbol, std::vector<int32_t>& ids) const {
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
