// SentencePiece BPE: of all adjacent pairs whose merged piece is in the vocabulary, the one with the highest score is
// merged, the leftmost first, until no pair is left.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace quire {

class SentencePieces {
 public:
    // mergeable[i]: whether piece i may result from a merge. user_defined: ids of pieces that are matched before any
    // merge, the longest at each position. bytes: ids of the pieces <0x00> .. <0xFF>, or -1. unknown: the id of
    // everything else, or -1. prefix: put before the text, and before the text after each user-defined piece.
    SentencePieces(std::vector<std::string> pieces, std::vector<float> scores, std::vector<uint8_t> mergeable,
                   const std::vector<int32_t>& user_defined, const std::array<int32_t, 256>& bytes, int32_t unknown,
                   std::string prefix);

    std::vector<int32_t> encode(std::string_view text) const;  // UTF-8
    int32_t id(std::string_view piece) const;                  // -1: there is none
    const std::string& piece(int32_t id) const { return pieces_.at(size_t(id)); }
    size_t size() const { return pieces_.size(); }

 private:
    // An entry of a hash table with linear probing.
    struct Entry {
        uint32_t hash;
        int32_t id;  // -1: empty
    };

    int32_t user_defined_at(std::string_view rest) const;
    void merge(std::string_view text, std::vector<int32_t>& ids) const;
    void append_ids(std::string_view symbol, std::vector<int32_t>& ids) const;

    std::vector<std::string> pieces_;
    std::vector<float> scores_;
    std::vector<uint8_t> mergeable_;  // [pieces] flags
    std::vector<Entry> table_;
    // A trie of the user-defined pieces: (node, byte) -> next node, and the piece that ends at a node.
    std::unordered_map<uint64_t, size_t> steps_;
    std::vector<int32_t> ends_{-1};
    std::array<int32_t, 256> bytes_;
    int32_t unknown_;
    std::string prefix_;
    bool merges_within_words_ = true;  // no piece spans a word boundary, so words are merged one by one
};

}  // namespace quire
