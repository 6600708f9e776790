// Many rows on x86: a panel of tiles is unpacked once, and then multiplied with block after block of rows.
//
// An unpacked panel is a sequence of strips of kStripOutputs outputs, one tile or two, as many as are multiplied at
// once. A strip of an integer layout is a sequence of groups:
//   quants   [planes][group / 4][outputs][4]  weights, as made by Simd::plane
//   scales   [outputs]                        fp32
//   magics   [outputs]                        fp32, -kMagic * scale
//   offsets  [outputs]                        fp32, if there are any
// A strip of a float layout is [num_inputs][outputs], fp32.
//
// Beside the interface of matrix_vector.h, `Simd` has
//   panel_rows, panel_float_rows, panel_vectors   the register tile
//   kPlanes<Format>, plane<Format>(weights, i)    the planes of weights
//   dot_unpacked<Format>(quants, x, part, dots)   dots[r][v] = quants . x[r], in the form that `scaled` knows
#pragma once

#include "matrix_tiles.h"
#include "matrix_vector.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kStripOutputs = Simd::panel_vectors * Simd::lanes;
constexpr int kStripTiles = kStripOutputs / kTileOutputs;
constexpr int kStripFloats = 4 * kStripOutputs;  // bytes of one float for each output

// Calls unpack(tile, strip, output) for tiles [first, last): the tile, its strip, and its first output there. A missing
// last tile of a strip is zeros.
template <class Unpack>
QUIRE_INLINE void fill_panel(const PackedMatrix& w, int64_t first, int64_t last, int64_t strip_bytes, uint8_t* panel,
                             const Unpack& unpack) {
    if ((last - first) % kStripTiles)
        __builtin_memset(panel + (last - first) / kStripTiles * strip_bytes, 0, size_t(strip_bytes));
    for (int64_t t = first; t < last; ++t)
        unpack(w.data + t * w.tile_bytes(), panel + (t - first) / kStripTiles * strip_bytes,
               int((t - first) % kStripTiles) * kTileOutputs);
}

// In a panel, weights are bytes and scales are fp32: formats that differ only in how these are packed share kernels.
template <class Format>
using PanelFormat = IntFormat<Format::has_codebook ? 8 : Format::bits, Format::group, ScaleType::Float16,
                              Format::has_offset, Format::zero>;

template <class Format>
struct PanelTiles {
    static constexpr int max_rows = Simd::panel_rows, kVectors = Simd::panel_vectors;

    static constexpr int plane_bytes = Format::group * kStripOutputs,
                         scales_at = Simd::template kPlanes<Format> * plane_bytes, magics_at = scales_at + kStripFloats,
                         offsets_at = magics_at + kStripFloats,
                         group_bytes = Format::has_offset ? offsets_at + kStripFloats : offsets_at;

    static int64_t strip_bytes(const PackedMatrix& w) { return w.num_inputs / Format::group * group_bytes; }
    static int64_t tile_bytes(const PackedMatrix& w) { return strip_bytes(w) / kStripTiles; }

    template <int Rows>
    __attribute__((noinline)) static void multiply(const uint8_t* group, const Block& block, int64_t num_inputs,
                                                   float* out, int64_t out_stride) {
        const QuantizedGroup* x = block.groups;
        Simd::Float acc[Rows][kVectors];
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::zero();
        for (const QuantizedGroup* end = x + num_inputs / kGroupInputs * block.group_stride; x != end;
             x += block.group_stride) {
            for (int part = 0; part < Format::parts; ++part, group += group_bytes) {
                if constexpr (Format::parts > 1)  // not both at once, which would need more registers
                    __asm__("" : "+r"(part));
                add_group(group, x, part, acc);
            }
        }
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) Simd::store(out + r * out_stride + v * Simd::lanes, acc[r][v]);
    }

    // acc[r][v] += group . x[r]
    template <int Rows>
    QUIRE_INLINE static void add_group(const uint8_t* group, const QuantizedGroup* x, int part,
                                       Simd::Float (&acc)[Rows][kVectors]) {
        constexpr int kBytes = 4 * Simd::lanes;  // of a vector
        Simd::Int dots[Rows][kVectors];
        Simd::template dot_unpacked<Format>(group, x, part, dots);
        if constexpr (Format::has_offset) {
            Simd::Float offsets[kVectors];
            for (int v = 0; v < kVectors; ++v) offsets[v] = Simd::load_floats(group + offsets_at + v * kBytes);
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) {
                const Simd::Float sums = Simd::splat(*sum_of<Format>(x[r], part));
                for (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::fma(offsets[v], sums, acc[r][v]);
            }
        }
        Simd::Float scales[kVectors], magics[kVectors];
        for (int v = 0; v < kVectors; ++v) {
            scales[v] = Simd::load_floats(group + scales_at + v * kBytes);
            magics[v] = Simd::load_floats(group + magics_at + v * kBytes);
        }
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) {
            const Simd::Float x_scale = Simd::splat(x[r].scale);
            for (int v = 0; v < kVectors; ++v)
                acc[r][v] = Simd::fma(Simd::fma(Simd::as_floats(dots[r][v]), scales[v], magics[v]), x_scale, acc[r][v]);
        }
    }
};

template <class Format>
struct Unpacked : PanelTiles<PanelFormat<Format>> {
    using Tiles = PanelTiles<PanelFormat<Format>>;
    using Tiles::strip_bytes, Tiles::group_bytes, Tiles::plane_bytes, Tiles::scales_at;

    static const uint8_t* load_tiles(const PackedMatrix& w, int64_t first_tile, int64_t last_tile, uint8_t* panel) {
        fill_panel(w, first_tile, last_tile, strip_bytes(w), panel,
                   [&](const uint8_t* tile, uint8_t* strip, int output) {
                       for (const uint8_t* end = tile + w.tile_bytes(); tile != end; tile += Format::block_bytes)
                           for (int run = 0; run < Format::block_runs; ++run, strip += Format::parts * group_bytes)
                               for (int o = 0; o < kTileOutputs; o += Simd::lanes)
                                   unpack(tile, run, o, strip, output + o);
                   });
        return panel;
    }

    // Unpacks a run of a vector of outputs, from `output` on in a tile, `to_output` in a strip.
    QUIRE_INLINE static void unpack(const uint8_t* block, int run, int output, uint8_t* to, int to_output) {
        constexpr int kPlanes = Simd::template kPlanes<Format>, kQuads = Format::group / 4;
        QUIRE_UNROLL
        for (int part = 0; part < Format::parts; ++part, to += group_bytes) {
            QUIRE_UNROLL
            for (int i = 0; i < kQuads; ++i) {
                const int q = Simd::template quad_at<Format>(part, i);
                const auto weights = Simd::template weights<Format>(Format::quants(block, run) + 4 * output, q);
                for (int plane = 0; plane < kPlanes; ++plane)
                    Simd::store_bytes(to + plane * plane_bytes + 4 * ((q - part * kQuads) * kStripOutputs + to_output),
                                      Simd::template plane<Format>(weights, plane));
            }
            const int group = run * Format::parts + part;
            const auto scales = load_scales<Format>(block, group, output);
            float* floats = (float*)(to + scales_at) + to_output;  // scales, magics, offsets
            Simd::store(floats, scales);
            Simd::store(floats + kStripOutputs, Simd::magics(scales));
            if constexpr (Format::has_offset)
                Simd::store(floats + 2 * kStripOutputs, load_offsets<Format>(block, group, output));
        }
    }
};

template <Layout Element>
struct Unpacked<FloatFormat<Element>> {
    static constexpr int max_rows = Simd::panel_float_rows, kVectors = Simd::panel_vectors;

    static int64_t tile_bytes(const PackedMatrix& w) { return w.num_inputs * kTileOutputs * 4; }

    static const uint8_t* load_tiles(const PackedMatrix& w, int64_t first_tile, int64_t last_tile, uint8_t* panel) {
        fill_panel(w, first_tile, last_tile, kStripTiles * tile_bytes(w), panel,
                   [&](const uint8_t* tile, uint8_t* strip, int output) {
                       constexpr int kBytes = FloatFormat<Element>::element_bytes;
                       float* to = (float*)strip + output;
                       for (int64_t k = 0; k < w.num_inputs; ++k, tile += kTileOutputs * kBytes, to += kStripOutputs)
                           for (int o = 0; o < kTileOutputs; o += Simd::lanes)
                               Simd::store(to + o, load_weights<Element>(tile + o * kBytes));
                   });
        return panel;
    }

    template <int Rows>
    __attribute__((noinline)) static void multiply(const uint8_t* weights, const Block& block, int64_t num_inputs,
                                                   float* out, int64_t out_stride) {
        const float* x[(Rows + 2) / 3];  // every third row: addressing modes reach two more
        for (int i = 0; i < (Rows + 2) / 3; ++i) x[i] = block.x + 3 * i * block.stride;
        Simd::Float acc[Rows][kVectors];
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::zero();
        for (int64_t k = 0; k < num_inputs; ++k, weights += kStripFloats) {
            Simd::Float w[kVectors];
            for (int v = 0; v < kVectors; ++v) w[v] = Simd::load_floats(weights + v * 4 * Simd::lanes);
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) {
                const Simd::Float factor = Simd::splat(x[r / 3][r % 3 * block.stride]);
                for (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::fma(w[v], factor, acc[r][v]);
            }
            QUIRE_UNROLL
            for (int i = 0; i < (Rows + 2) / 3; ++i) ++x[i];
        }
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) Simd::store(out + r * out_stride + v * Simd::lanes, acc[r][v]);
    }
};

template <class Format>
constexpr int64_t kTilesAtOnce<Unpacked<Format>> = kStripTiles;

}  // namespace
}  // namespace quire::QUIRE_ISA
