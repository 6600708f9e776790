// Many rows on x86: a panel of tiles is unpacked once, then multiplied with block after block of rows.
//
// An unpacked panel is a sequence of strips of kStripOutputs outputs, one tile or two, as many as are multiplied at
// once. A strip of an integer layout is a sequence of groups:
//   codes     [planes][group / 4][outputs][4]  weights, as Unit::plane makes them
//   scales    [outputs]                        fp32
//   counters  [outputs]                        fp32, -kCounter * scale
//   offsets   [outputs]                        fp32, where there are any
// One of a float layout is [num_inputs][outputs], fp32.
//
// Of its unit this wants, beside what matrix_vector.h does,
//   panel_rows, panel_float_rows, panel_vectors   the register tile
//   kPlanes<Format>, plane<Format>(weights, i)    what is kept of weights
//   dot_unpacked<Format>(codes, x, part, dots)    dots[r][v] = codes . x[r], in the form that `scaled` knows
#pragma once

#include "matrix_tiles.h"
#include "matrix_vector.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kStripOutputs = Unit::panel_vectors * Unit::lanes;
constexpr int kStripTiles = kStripOutputs / kTileOutputs;
constexpr int kStripFloats = 4 * kStripOutputs;  // bytes of one float for each output

// Call unpack(tile, strip, output) for tiles [first, last): where it is, the strip it goes to, its first output there.
// What a strip lacks of its tiles is zeros.
template <class Unpack>
QUIRE_INLINE void fill_panel(const PackedMatrix& w, int64_t first, int64_t last, int64_t strip_bytes, uint8_t* panel,
                             const Unpack& unpack) {
    if ((last - first) % kStripTiles)
        __builtin_memset(panel + (last - first) / kStripTiles * strip_bytes, 0, size_t(strip_bytes));
    for (int64_t t = first; t < last; ++t)
        unpack(w.data + t * w.tile_bytes(), panel + (t - first) / kStripTiles * strip_bytes,
               int((t - first) % kStripTiles) * kTileOutputs);
}

template <class Format>
struct Unpacked {
    static constexpr int max_rows = Unit::panel_rows, kVectors = Unit::panel_vectors;

    static constexpr int plane_bytes = Format::group * kStripOutputs,
                         scales_at = Unit::template kPlanes<Format> * plane_bytes,
                         counters_at = scales_at + kStripFloats, offsets_at = counters_at + kStripFloats,
                         group_bytes = Format::has_offset ? offsets_at + kStripFloats : offsets_at;

    static int64_t strip_bytes(const PackedMatrix& w) { return w.num_inputs / Format::group * group_bytes; }
    static int64_t tile_bytes(const PackedMatrix& w) { return strip_bytes(w) / kStripTiles; }

    static const uint8_t* take(const PackedMatrix& w, int64_t first_tile, int64_t last_tile, uint8_t* panel) {
        fill_panel(w, first_tile, last_tile, strip_bytes(w), panel,
                   [&](const uint8_t* tile, uint8_t* strip, int output) {
                       for (const uint8_t* end = tile + w.tile_bytes(); tile != end; tile += Format::block_bytes)
                           for (int run = 0; run < Format::block_runs; ++run, strip += Format::parts * group_bytes)
                               for (int o = 0; o < kTileOutputs; o += Unit::lanes)
                                   unpack(tile, run, o, strip, output + o);
                   });
        return panel;
    }

    // A run of a vector of outputs, from `output` on in a tile, `to_output` in a strip.
    QUIRE_INLINE static void unpack(const uint8_t* block, int run, int output, uint8_t* to, int to_output) {
        constexpr int kPlanes = Unit::template kPlanes<Format>, kQuads = Format::group / 4;
        QUIRE_UNROLL
        for (int part = 0; part < Format::parts; ++part, to += group_bytes) {
            QUIRE_UNROLL
            for (int i = 0; i < kQuads; ++i) {
                const int q = Unit::template quad_at<Format>(part, i);
                const auto weights = Unit::template weights<Format>(Format::codes(block, run) + 4 * output, q);
                for (int plane = 0; plane < kPlanes; ++plane)
                    Unit::store_bytes(to + plane * plane_bytes + 4 * ((q - part * kQuads) * kStripOutputs + to_output),
                                      Unit::template plane<Format>(weights, plane));
            }
            const int group = run * Format::parts + part;
            const auto scales = load_scales<Format>(block, group, output);
            float* floats = (float*)(to + scales_at) + to_output;  // scales, counters, offsets
            Unit::store(floats, scales);
            Unit::store(floats + kStripOutputs, Unit::counters(scales));
            if constexpr (Format::has_offset)
                Unit::store(floats + 2 * kStripOutputs, load_offsets<Format>(block, group, output));
        }
    }

    template <int Rows>
    __attribute__((noinline)) static void multiply(const uint8_t* group, const Block& block, int64_t num_inputs,
                                                   float* out, int64_t out_stride) {
        const QuantizedGroup* x = block.groups;
        Unit::Float acc[Rows][kVectors];
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Unit::zero();
        for (const QuantizedGroup* end = x + num_inputs / kGroupInputs * block.group_stride; x != end;
             x += block.group_stride) {
            for (int part = 0; part < Format::parts; ++part, group += group_bytes) {
                if constexpr (Format::parts > 1)  // one after the other: both at once would need more registers
                    __asm__("" : "+r"(part));
                add_group(group, x, part, acc);
            }
        }
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) Unit::store(out + r * out_stride + v * Unit::lanes, acc[r][v]);
    }

    // acc[r][v] += group . x[r]
    template <int Rows>
    QUIRE_INLINE static void add_group(const uint8_t* group, const QuantizedGroup* x, int part,
                                       Unit::Float (&acc)[Rows][kVectors]) {
        constexpr int kBytes = 4 * Unit::lanes;  // of a vector
        Unit::Int dots[Rows][kVectors];
        Unit::template dot_unpacked<Format>(group, x, part, dots);
        if constexpr (Format::has_offset) {
            Unit::Float offsets[kVectors];
            for (int v = 0; v < kVectors; ++v) offsets[v] = Unit::load_floats(group + offsets_at + v * kBytes);
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) {
                const Unit::Float sums = Unit::splat(*sum_of<Format>(x[r], part));
                for (int v = 0; v < kVectors; ++v) acc[r][v] = Unit::fma(offsets[v], sums, acc[r][v]);
            }
        }
        Unit::Float scales[kVectors], counters[kVectors];
        for (int v = 0; v < kVectors; ++v) {
            scales[v] = Unit::load_floats(group + scales_at + v * kBytes);
            counters[v] = Unit::load_floats(group + counters_at + v * kBytes);
        }
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) {
            const Unit::Float x_scale = Unit::splat(x[r].scale);
            for (int v = 0; v < kVectors; ++v)
                acc[r][v] =
                    Unit::fma(Unit::fma(Unit::as_floats(dots[r][v]), scales[v], counters[v]), x_scale, acc[r][v]);
        }
    }
};

template <Layout Element>
struct Unpacked<FloatFormat<Element>> {
    static constexpr int max_rows = Unit::panel_float_rows, kVectors = Unit::panel_vectors;

    static int64_t tile_bytes(const PackedMatrix& w) { return w.num_inputs * kTileOutputs * 4; }

    static const uint8_t* take(const PackedMatrix& w, int64_t first_tile, int64_t last_tile, uint8_t* panel) {
        fill_panel(w, first_tile, last_tile, kStripTiles * tile_bytes(w), panel,
                   [&](const uint8_t* tile, uint8_t* strip, int output) {
                       constexpr int kBytes = FloatFormat<Element>::element_bytes;
                       float* to = (float*)strip + output;
                       for (int64_t k = 0; k < w.num_inputs; ++k, tile += kTileOutputs * kBytes, to += kStripOutputs)
                           for (int o = 0; o < kTileOutputs; o += Unit::lanes)
                               Unit::store(to + o, load_weights<Element>(tile + o * kBytes));
                   });
        return panel;
    }

    template <int Rows>
    __attribute__((noinline)) static void multiply(const uint8_t* weights, const Block& block, int64_t num_inputs,
                                                   float* out, int64_t out_stride) {
        const float* x[(Rows + 2) / 3];  // every third row; an address reaches two more
        for (int i = 0; i < (Rows + 2) / 3; ++i) x[i] = block.x + 3 * i * block.stride;
        Unit::Float acc[Rows][kVectors];
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Unit::zero();
        for (int64_t k = 0; k < num_inputs; ++k, weights += kStripFloats) {
            Unit::Float w[kVectors];
            for (int v = 0; v < kVectors; ++v) w[v] = Unit::load_floats(weights + v * 4 * Unit::lanes);
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) {
                const Unit::Float factor = Unit::splat(x[r / 3][r % 3 * block.stride]);
                for (int v = 0; v < kVectors; ++v) acc[r][v] = Unit::fma(w[v], factor, acc[r][v]);
            }
            QUIRE_UNROLL
            for (int i = 0; i < (Rows + 2) / 3; ++i) ++x[i];
        }
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) Unit::store(out + r * out_stride + v * Unit::lanes, acc[r][v]);
    }
};

template <class Format>
constexpr int64_t kTilesAtOnce<Unpacked<Format>> = kStripTiles;

}  // namespace
}  // namespace quire::QUIRE_ISA
