// Policies of tiles, which become TileKernels. A policy, for matrices of one format, has
//   max_rows, tile_bytes, load_tiles, multiply<Rows>    as in TileKernels
// and may set kTilesAtOnce, kUnpacksWhileMultiplying and kArrangesRows. With the latter two, it also has
//   unpack_and_multiply<Rows>
//   arranged_bytes, arrange<Rows>
#pragma once

#include "matrix_format.h"
#include "matrix_kernels.h"

namespace quire::QUIRE_ISA {
namespace {

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
    static constexpr auto multiply = TileMatmul<Format, Rows>::run;
};

template <class Tiles, int... I>
constexpr TileKernels tile_kernels(std::integer_sequence<int, I...>) {
    static_assert(Tiles::max_rows <= kMaxBlockRows && kTilesAtOnce<Tiles> <= kMaxBundle);
    TileKernels kernels{Tiles::max_rows,
                        kTilesAtOnce<Tiles>,
                        Tiles::tile_bytes,
                        Tiles::load_tiles,
                        {Tiles::template multiply<I + 1>...},
                        nullptr,
                        {},
                        nullptr};
    if constexpr (kUnpacksWhileMultiplying<Tiles>)
        kernels.unpack_and_multiply = Tiles::template unpack_and_multiply<Tiles::max_rows>;
    if constexpr (kArrangesRows<Tiles>) {
        ((kernels.arrange[I] = Tiles::template arrange<I + 1>), ...);
        kernels.arranged_bytes = Tiles::arranged_bytes;
    }
    return kernels;
}
template <class Tiles>
constexpr TileKernels kTileKernels = tile_kernels<Tiles>(std::make_integer_sequence<int, Tiles::max_rows>{});

}  // namespace
}  // namespace quire::QUIRE_ISA
