// Policies of tiles. A policy, for matrices of one format, has
//   max_rows                            rows that are multiplied at once
//   tile_bytes(w)                       bytes of a loaded tile
//   load_tiles(w, first, last, panel)   the tiles [first, last), one after the other: in place, or unpacked into
//   `panel` multiply<Rows>(tile, activations, num_inputs, out, out_stride)
// and may set kTilesAtOnce, kUnpacksWhileMultiplying and kArrangesRows. With kUnpacksWhileMultiplying, it also has
//   unpack_and_multiply<max_rows>(packed tile, tile, activations, ...)   which writes the tile that it multiplies
// and with kArrangesRows
//   arranged_bytes(num_inputs)          memory for the rows of a block, in the order of the kernel, once for all tiles
//   arrange<Rows>(activations, num_inputs, arranged)   whose result multiply gets as Block::arranged
#pragma once

#include "matrix_format.h"

namespace quire::QUIRE_ISA {
namespace {

// Tiles that are multiplied at once. A panel is padded to a multiple of it.
template <class Tiles>
constexpr int64_t kTilesAtOnce = 1;

template <class Tiles>
constexpr bool kUnpacksWhileMultiplying = false;

template <class Tiles>
constexpr bool kArrangesRows = false;

template <class Format>
struct InPlace {
    static constexpr int max_rows = kMaxTileRows<Format>;

    static int64_t tile_bytes(const PackedMatrix& w) { return w.tile_bytes(); }

    static const uint8_t* load_tiles(const PackedMatrix& w, int64_t first_tile, int64_t, uint8_t*) {
        return w.data + first_tile * w.tile_bytes();
    }

    template <int Rows>
    static void multiply(const uint8_t* tile, const Block& a, int64_t num_inputs, float* out, int64_t out_stride) {
        TileMatmul<Format, Rows>::run(tile, a, num_inputs, out, out_stride);
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
