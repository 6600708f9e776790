// Compressed attention (DeepSeek V4): groups of tokens are pooled into entries; a token attends to those before it in a
// window, and to entries: to all, or to those that an indexer chooses.
#pragma once

#include <cstdint>

#include "tape.h"

namespace quire {

class CompressedAttention {
 public:
    CompressedAttention(Tape& tape, const Step& step, const ThreadPool& pool)
        : tape_(tape), step_(step), pool_(pool), kernels_(kernels()), pages_(tape.compressed_) {}

    // Threads take rows.
    void write(const WriteTokens& op) const;
    void pool(const PoolGroup& op) const;
    void write(const WriteEntry& op) const;

    // Threads take rows. If there are fewer rows than threads, they share the entries of each.
    void choose(const TopEntries& op) const;

    // A free thread takes the next tile of heads of a row. It copies what the row's token sees to memory of its own, in
    // order, and attends to the copy.
    void attend(const AttendCompressed& op) const;

 private:
    // The token of a row: its position, and the tables of its sequence.
    struct Token {
        int64_t position;
        const int32_t *blocks, *pages;
    };
    Token token_at(int64_t token) const;
    Token token_of(const View& out, int64_t r) const { return token_at(out.logits_only ? step_.logit_rows[r] : r); }
    int64_t num_rows(const View& out) const { return out.logits_only ? step_.num_logits : step_.num_tokens; }
    bool ends_group(const CompressedLayer& layer, int64_t position) const { return (position + 1) % layer.group == 0; }
    // What the layer keeps of the token at a position.
    uint8_t* kept(const CompressedLayer& layer, const Token& token, int64_t position) const {
        return pages_.token(layer, token.pages[position / pages_.block_size], position % pages_.block_size);
    }
    uint8_t* entry(const CompressedLayer& layer, const Token& token, int64_t i, int part) const {
        const int64_t block = pages_.block_of(layer, i);
        return pages_.entry(layer, token.blocks[block], pages_.place_of(layer, i), part);
    }

    // The scores of the entries [first, end) of what the token of a row sees.
    void score(const TopEntries& op, int64_t r, int64_t first, int64_t end, float* scores) const;
    void select(const TopEntries& op, int64_t r, const float* scores) const;
    // Copies the vectors that a token sees, one behind the other. -> how many
    int64_t gather(const AttendCompressed& op, const Token& token, const float* chosen, uint8_t* to) const;

    Tape& tape_;
    const Step& step_;
    const ThreadPool& pool_;
    const Kernels& kernels_;
    const CompressedPages& pages_;
};

}  // namespace quire
