#include "draft_trees.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "tape.h"

namespace quire {

namespace {

uint64_t bit(int64_t token) { return uint64_t(1) << token; }

// The tokens of a sequence in a step, as the places of a tree behind its text.
struct Tree {
    const uint64_t* words;
    const int32_t* positions;
    int64_t count;
    int64_t num_before;   // places before the tree
    int64_t num_earlier;  // places of the tree that earlier steps have computed
};

// A token at position p sees p + 1 places: what its word has, and all before the tree.
Tree tree_of(const Step& step, int64_t seq) {
    const int64_t start = step.seq_starts[seq], count = step.seq_starts[seq + 1] - start;
    const uint64_t* words = step.ancestors + start;
    const int32_t* positions = step.positions + start;
    const int64_t num_before = count ? positions[0] + 1 - __builtin_popcountll(words[0]) : 0;
    return {words, positions, count, num_before, step.context_lens[seq] - count - num_before};
}

// The keys and values of one head: in a block of the pages, or in a tail.
struct HeadBlock {
    uint8_t *keys, *values;
};

template <class T>
void copy_floats(const Pages& pages, const HeadBlock& from, int64_t slot, const HeadBlock& to, int64_t target) {
    const int64_t head_dim = pages.head_dim, size = pages.block_size;
    if (pages.latent) {
        std::memcpy(to.keys + target * head_dim * sizeof(T), from.keys + slot * head_dim * sizeof(T),
                    head_dim * sizeof(T));
        return;
    }
    const T* keys = reinterpret_cast<const T*>(from.keys) + slot;
    T* target_keys = reinterpret_cast<T*>(to.keys) + target;
    for (int64_t d = 0; d < head_dim; ++d) target_keys[d * size] = keys[d * size];
    std::memcpy(to.values + target * head_dim * sizeof(T), from.values + slot * head_dim * sizeof(T),
                head_dim * sizeof(T));
}

void copy_int8(const Pages& pages, const HeadBlock& from, int64_t slot, const HeadBlock& to, int64_t target) {
    const int64_t columns = pages.stored_columns(), size = pages.block_size;
    for (int64_t quad = 0; quad < columns / 4; ++quad)
        std::memcpy(to.keys + (quad * size + target) * 4, from.keys + (quad * size + slot) * 4, 4);
    const uint8_t* values = from.values + slot / 4 * columns * 4 + slot % 4;
    uint8_t* target_values = to.values + target / 4 * columns * 4 + target % 4;
    for (int64_t d = 0; d < columns; ++d) target_values[d * 4] = values[d * 4];
    pages.scales(to.keys)[target] = pages.scales(from.keys)[slot];
    pages.scales(to.values)[target] = pages.scales(from.values)[slot];
}

// Copies the key and the value of one token.
void copy_token(const Pages& pages, const HeadBlock& from, int64_t slot, const HeadBlock& to, int64_t target) {
    switch (pages.type) {
        case PageType::Int8: return copy_int8(pages, from, slot, to, target);
        case PageType::Float32: return copy_floats<uint32_t>(pages, from, slot, to, target);
        default: return copy_floats<uint16_t>(pages, from, slot, to, target);
    }
}

}  // namespace

void DraftTrees::check(const Step& step, int64_t seq) {
    const Tree tree = tree_of(step, seq);
    const auto fail = [&](int64_t token, const std::string& problem) {
        throw std::invalid_argument("ancestors[" + std::to_string(token) + "] of a sequence is " +
                                    std::to_string(tree.words[token]) + ", and " + problem);
    };
    for (int64_t token = 0; token < tree.count; ++token) {
        const int64_t place = tree.num_earlier + token;
        if (place < 0 || place >= kMaxTreeTokens)
            fail(token, "the token is at place " + std::to_string(place) + " of its tree");
        const uint64_t before = tree.words[token] & (bit(place) - 1);
        const int64_t parent = before ? 63 - __builtin_clzll(before) : -1;
        const bool of_step = parent >= tree.num_earlier;  // the words of earlier tokens are not known
        const uint64_t expected = (of_step ? tree.words[parent - tree.num_earlier] : before) | bit(place);
        if (tree.words[token] != expected) fail(token, "its parent's and itself are " + std::to_string(expected));
        const int64_t position = tree.num_before + __builtin_popcountll(expected) - 1;
        if (tree.positions[token] != position)
            fail(token, "its position is " + std::to_string(tree.positions[token]) + " instead of " +
                            std::to_string(position));
    }
}

void DraftTrees::find(const Step& step, const Pages& pages, int num_threads) {
    runs_.clear();
    tokens_.clear();
    if (!step.ancestors) return;
    for (int64_t seq = 0; seq < step.num_seqs; ++seq) {
        const int64_t start = step.seq_starts[seq], count = step.seq_starts[seq + 1] - start;
        const bool in_tree = 0 < count && count <= kMaxTreeTokens;
        const Tree tree =
            in_tree ? tree_of(step, seq) : Tree{nullptr, nullptr, count, step.context_lens[seq] - count, 0};
        for (int64_t token = 0; token < count; ++token) {
            const uint64_t word = in_tree ? tree.words[token] : 0;
            const int64_t seen = in_tree ? __builtin_popcountll(word) : token + 1;
            tokens_.push_back({seq, start + token, 1, tree.num_before + seen, tree.num_before, word});
            if (token > 0 && (!in_tree || word == (tree.words[token - 1] | bit(tree.num_earlier + token)))) {
                Branch& run = runs_.back();
                run = {seq, run.start, run.count + 1, tokens_.back().context, tree.num_before, word};
            } else {
                runs_.push_back(tokens_.back());
            }
        }
    }
    const size_t num_blocks = size_t(ceil_div(kMaxTreeTokens, pages.block_size)) + 1;
    tail_stride_ = (num_blocks * pages.tail_bytes() + kPagesSlack + 63) / 64 * 64;
    tails_.reserve(num_threads * tail_stride_);
}

void DraftTrees::read_tail(const Branch& branch, const int32_t* block_table, int thread, AttentionTile& tile) const {
    const Pages& pages = *tile.pages;
    const int64_t size = pages.block_size, in_place = __builtin_ctzll(~branch.word);
    int64_t position = branch.num_before + in_place;
    uint8_t* tail = tails_.get() + thread * tail_stride_;
    tile.tail = tail;
    tile.tail_block = position / size;
    const auto block_of = [&](int64_t place) -> HeadBlock {
        const int32_t block = block_table[place / size];
        return {pages.keys(block, tile.layer, tile.kv_head), pages.values(block, tile.layer, tile.kv_head)};
    };
    const auto tail_of = [&](int64_t place) -> HeadBlock {
        uint8_t* keys = tail + (place / size - tile.tail_block) * pages.tail_bytes();
        return {keys, keys + pages.value_offset()};
    };
    if (position % size != 0) {  // positions before, which are in place
        std::memcpy(tail_of(position).keys, block_of(position).keys, pages.head_bytes());
        std::memcpy(tail_of(position).values, block_of(position).values, pages.head_bytes());
    }
    for (uint64_t rest = branch.word >> in_place << in_place; rest; rest &= rest - 1, ++position) {
        const int64_t place = branch.num_before + __builtin_ctzll(rest);
        copy_token(pages, block_of(place), place % size, tail_of(position), position % size);
    }
}

}  // namespace quire
