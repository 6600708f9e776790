// Tiles as a product finds them. A policy of tiles, for matrices of one format, has
//   max_rows                       rows that are multiplied at once
//   tile_bytes(w)                  what a tile takes once it is taken
//   take(w, first, last, panel)    the tiles [first, last), one after the other: in place, or made in `panel`
//   multiply<Rows>(tile, activations, num_inputs, out, out_stride)
// and may say more of itself with kTilesAtOnce, kTakesAlong and kArrangesRows. One that takes along has besides
//   take_and_multiply<max_rows>(packed tile, tile, activations, ...)   which writes the tile that it multiplies
// and one that arranges rows
//   arranged_bytes(num_inputs)     memory for the rows of a block, in an order of its own, once for all tiles
//   arrange<Rows>(activations, num_inputs, arranged)   which multiply then finds in Block::arranged
#pragma once

#include "matrix_format.h"

namespace quire::QUIRE_ISA {
namespace {

// Tiles that are multiplied at once. A panel has room for so many: the last ones may be padding.
template <class Tiles>
constexpr int64_t kTilesAtOnce = 1;

template <class Tiles>
constexpr bool kTakesAlong = false;

template <class Tiles>
constexpr bool kArrangesRows = false;

template <class Format>
struct InPlace {
    static constexpr int max_rows = kMaxTileRows<Format>;

    static int64_t tile_bytes(const PackedMatrix& w) { return w.tile_bytes(); }

    static const uint8_t* take(const PackedMatrix& w, int64_t first_tile, int64_t, uint8_t*) {
        return w.data + first_tile * w.tile_bytes();
    }

    template <int Rows>
    static void multiply(const uint8_t* tile, const Block& a, int64_t num_inputs, float* out, int64_t out_stride) {
        TileProduct<Format, Rows>::run(tile, a, num_inputs, out, out_stride);
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
