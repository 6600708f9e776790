// What layers of compressed attention keep: entries of groups of tokens, and numbers of each token. See CompressedSpec
// in ops/kv_spec.py.
#pragma once

#include <cstdint>
#include <vector>

#include "ops.h"

namespace quire {

struct CompressedLayer {
    int64_t columns;                            // numbers of a token
    int64_t group;                              // tokens that become an entry; 0: the layer has no entries
    int64_t parts[2];                           // numbers of an entry: key and value, and the key of the indexer
    size_t token_offset = 0, entry_offset = 0;  // bytes from the start of a page, or of a block
};

// A block has, for every layer, part 0 of its entries and then part 1. A page has, for every layer, the numbers of its
// tokens, and is a window page, or lies behind the entries of a block.
struct CompressedPages {
    uint8_t *blocks = nullptr, *pages = nullptr;
    size_t block_bytes = 0, page_bytes = 0;  // from one to the next
    bool windowed = false;
    int64_t block_size = 0;
    PageType type = PageType::Float32;
    std::vector<CompressedLayer> layers;

    size_t number_bytes() const { return type == PageType::Float32 ? 4 : 2; }
    int64_t block_entries(const CompressedLayer& layer) const {
        return layer.group ? (block_size + layer.group - 1) / layer.group : 0;
    }
    // Gives every layer its place. -> bytes of the entries of a block, and of the tokens of a page
    void lay_out(size_t& entry_bytes, size_t& token_bytes) {
        entry_bytes = token_bytes = 0;
        for (CompressedLayer& layer : layers) {
            layer.entry_offset = entry_bytes;
            layer.token_offset = token_bytes;
            entry_bytes += block_entries(layer) * (layer.parts[0] + layer.parts[1]) * number_bytes();
            token_bytes += block_size * layer.columns * number_bytes();
        }
    }
    // The block, in the table of its sequence, of entry i: that of its last token. And its place in this block.
    int64_t block_of(const CompressedLayer& layer, int64_t i) const { return ((i + 1) * layer.group - 1) / block_size; }
    int64_t place_of(const CompressedLayer& layer, int64_t i) const {
        return i - block_of(layer, i) * block_size / layer.group;
    }
    uint8_t* token(const CompressedLayer& layer, int64_t page, int64_t place) const {
        return pages + page * page_bytes + layer.token_offset + place * layer.columns * number_bytes();
    }
    uint8_t* entry(const CompressedLayer& layer, int64_t block, int64_t place, int part) const {
        const int64_t before = part ? block_entries(layer) * layer.parts[0] : 0;
        return blocks + block * block_bytes + layer.entry_offset +
               (before + place * layer.parts[part]) * number_bytes();
    }
};

}  // namespace quire
