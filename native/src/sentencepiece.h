// Text to ids as SentencePiece's BPE does it: of all neighbours whose joint piece is in the vocabulary, those with the
// highest score are joined, the leftmost first, until none are left.
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
    // joined[i]: whether piece i may be made of others. first: ids of pieces that are found in a text before anything
    // else, the longest of those that begin at a place. bytes: ids of the pieces <0x00> .. <0xFF>, -1 where there is
    // none. unknown: what stands for anything else, or -1. prefix: put before every part of a text between `first`
    // ones.
    SentencePieces(std::vector<std::string> pieces, std::vector<float> scores, std::vector<uint8_t> joined,
                   const std::vector<int32_t>& first, const std::array<int32_t, 256>& bytes, int32_t unknown,
                   std::string prefix);

    std::vector<int32_t> encode(std::string_view text) const;  // UTF-8
    int32_t id(std::string_view piece) const;                  // -1: there is none
    const std::string& piece(int32_t id) const { return pieces_.at(size_t(id)); }
    size_t size() const { return pieces_.size(); }

 private:
    // A place in a table that is searched from the place that the hash names, up to an empty one.
    struct Entry {
        uint32_t hash;
        int32_t id;  // -1: empty
    };

    int32_t first_at(std::string_view rest) const;
    void join(std::string_view text, std::vector<int32_t>& ids) const;
    void spell(std::string_view symbol, std::vector<int32_t>& ids) const;

    std::vector<std::string> pieces_;
    std::vector<float> scores_;
    std::vector<uint8_t> joined_;  // [pieces] flags
    std::vector<Entry> table_;
    // A tree of the pieces that are found first: from a node, with a byte, to the next; and the piece that ends at a
    // node.
    std::unordered_map<uint64_t, size_t> steps_;
    std::vector<int32_t> ends_{-1};
    std::array<int32_t, 256> bytes_;
    int32_t unknown_;
    std::string prefix_;
    bool words_apart_ = true;  // no piece goes on behind the space that ends a word: words are joined one by one
};

}  // namespace quire
