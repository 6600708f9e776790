// Many rows with AVX-512: a panel of tiles is unpacked once, then multiplied with block after block of rows.
//
// Two vector pipes do all arithmetic and two 64-byte loads are made a cycle, so the inner loop keeps both busy with dot
// products: a register tile of 6 rows and 2 tiles of outputs needs 8 loads for 12 of them. Dot products start from the
// bits of 1.5 * 2^23, as floats that count by ones, and one multiply-add with -1.5 * 2^23 * scale converts and scales
// them. That is exact where a scale has at most 22 significant bits: fp16 has 11, a product of fp16 and 6 or 8 bits 19.
//
// An unpacked tile is a sequence of groups:
//   codes     [group / 4][16][4]  uint8: stored codes (Int4), or codes + 128 (Int8, Codebook4)
//   scales    [16]                fp32
//   counters  [16]                fp32, -kCounter * scale
//   offsets   [16]                fp32, where there are any
#pragma once

#include "matrix_tiles.h"
#include "matrix_vector.h"

namespace quire::QUIRE_ISA {
namespace {

// codes, as they are packed -> one byte a code
template <class Format>
QUIRE_INLINE void unpack_codes(const uint8_t* codes, uint8_t* to) {
    for (int q = 0; q < Format::group / 4; ++q) {
        __m512i quad = _mm512_loadu_si512(codes + (Format::bits == 4 ? q % 4 : q) * 4 * kTileOutputs);
        if constexpr (Format::bits == 4)
            quad = Unit::codes_of<Format>(q < 4 ? quad : _mm512_srli_epi16(quad, 4));
        else
            quad = _mm512_xor_si512(quad, _mm512_set1_epi8(-128));
        _mm512_store_si512(to + q * 4 * kTileOutputs, quad);
    }
}

// Tiles are multiplied two at a time: what would be the last one's partner is zeros.
inline void pad_panel(int64_t num_tiles, int64_t tile_bytes, uint8_t* panel) {
    if (num_tiles % 2) __builtin_memset(panel + num_tiles * tile_bytes, 0, size_t(tile_bytes));
}

template <class Format>
struct Avx512Panel {
    static constexpr int max_rows = 6, kTiles = 2;  // the register tile

    static constexpr int scales_at = kTileOutputs * Format::group, counters_at = scales_at + 64,
                         offsets_at = counters_at + 64, group_bytes = Format::has_offset ? offsets_at + 64 : offsets_at;

    static int64_t tile_bytes(int64_t num_inputs) { return num_inputs / Format::group * group_bytes; }
    static int64_t tile_bytes(const PackedMatrix& w) { return tile_bytes(w.num_inputs); }

    static const uint8_t* take(const PackedMatrix& w, int64_t first_tile, int64_t last_tile, uint8_t* panel) {
        const uint8_t *group = w.data + first_tile * w.tile_bytes(), *end = w.data + last_tile * w.tile_bytes();
        for (uint8_t* to = panel; group != end; group += Format::group_bytes, to += group_bytes) {
            unpack_codes<Format>(group + Format::codes_at, to);
            const __m512 scales = load_scales<Format::scale_type>(group, 0);
            _mm512_store_ps(to + scales_at, scales);
            _mm512_store_ps(to + counters_at, _mm512_mul_ps(scales, _mm512_set1_ps(-Unit::kCounter)));
            if constexpr (Format::has_offset)
                _mm512_store_ps(to + offsets_at, load_scales<Format::scale_type>(group + Format::offsets_at, 0));
        }
        pad_panel(last_tile - first_tile, tile_bytes(w), panel);
        return panel;
    }

    template <int Rows>
    __attribute__((noinline)) static void multiply(const uint8_t* tile, const Block& block, int64_t num_inputs,
                                                   float* out, int64_t out_stride) {
        const int64_t next_tile = tile_bytes(num_inputs);
        const QuantizedGroup* x = block.groups;
        __m512 acc[Rows][kTiles];
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r)
            for (int t = 0; t < kTiles; ++t) acc[r][t] = _mm512_setzero_ps();
        for (const QuantizedGroup* end = x + num_inputs / kGroupInputs * block.group_stride; x != end;
             x += block.group_stride) {
#pragma GCC unroll 1  // two groups at once would need more registers
            for (int part = 0; part < Format::parts; ++part, tile += group_bytes)
                add_group(tile, next_tile, x, part, acc);
        }
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r)
            for (int t = 0; t < kTiles; ++t) _mm512_storeu_ps(out + r * out_stride + t * kTileOutputs, acc[r][t]);
    }

    // acc[r][t] += group . x[r]
    template <int Rows>
    QUIRE_INLINE static void add_group(const uint8_t* group, int64_t next_tile, const QuantizedGroup* x, int part,
                                       __m512 (&acc)[Rows][kTiles]) {
        __m512i dots[Rows][kTiles];
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) {
            const __m512i start = Unit::template start<Format>(x[r], part);
            for (int t = 0; t < kTiles; ++t) dots[r][t] = start;
        }
        QUIRE_UNROLL
        for (int q = 0; q < Format::group / 4; ++q) {
            __m512i w[kTiles];
            for (int t = 0; t < kTiles; ++t) w[t] = _mm512_load_si512(group + t * next_tile + q * 4 * kTileOutputs);
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) {
                const __m512i codes = Unit::quad(x[r].codes + part * Format::group + 4 * q);
                for (int t = 0; t < kTiles; ++t) dots[r][t] = _mm512_dpbusd_epi32(dots[r][t], w[t], codes);
            }
        }
        if constexpr (Format::has_offset) {
            __m512 offsets[kTiles];
            for (int t = 0; t < kTiles; ++t) offsets[t] = _mm512_load_ps(group + t * next_tile + offsets_at);
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) {
                const __m512 sums = _mm512_set1_ps(*sum_of<Format>(x[r], part));
                for (int t = 0; t < kTiles; ++t) acc[r][t] = _mm512_fmadd_ps(offsets[t], sums, acc[r][t]);
            }
        }
        __m512 scales[kTiles], counters[kTiles];
        for (int t = 0; t < kTiles; ++t) {
            scales[t] = _mm512_load_ps(group + t * next_tile + scales_at);
            counters[t] = _mm512_load_ps(group + t * next_tile + counters_at);
        }
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) {
            const __m512 x_scale = _mm512_set1_ps(x[r].scale);
            for (int t = 0; t < kTiles; ++t) {
                const __m512 term = _mm512_fmadd_ps(_mm512_castsi512_ps(dots[r][t]), scales[t], counters[t]);
                acc[r][t] = _mm512_fmadd_ps(term, x_scale, acc[r][t]);
            }
        }
    }
};

// Tiles of floats, as fp32: 12 rows and 2 tiles of outputs are 24 sums.
template <Layout Element>
struct Avx512Panel<FloatFormat<Element>> {
    static constexpr int max_rows = 12;

    static int64_t tile_bytes(const PackedMatrix& w) { return w.num_inputs * kTileOutputs * 4; }

    static const uint8_t* take(const PackedMatrix& w, int64_t first_tile, int64_t last_tile, uint8_t* panel) {
        const uint8_t* from = w.data + first_tile * w.tile_bytes();
        for (int64_t k = 0; k < (last_tile - first_tile) * w.num_inputs; ++k)
            Unit::store((float*)panel + k * kTileOutputs,
                        load_weights<Element>(from + k * kTileOutputs * FloatFormat<Element>::element_bytes));
        pad_panel(last_tile - first_tile, tile_bytes(w), panel);
        return panel;
    }

    template <int Rows>
    __attribute__((noinline)) static void multiply(const uint8_t* tile, const Block& block, int64_t num_inputs,
                                                   float* out, int64_t out_stride) {
        const float *first = (const float*)tile, *second = first + num_inputs * kTileOutputs;
        const float* x[(Rows + 2) / 3];  // every third row; an address reaches two more
        for (int i = 0; i < (Rows + 2) / 3; ++i) x[i] = block.x + 3 * i * block.stride;
        __m512 acc[Rows][2];
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
        for (int64_t k = 0; k < num_inputs; ++k) {
            const __m512 w[2] = {_mm512_load_ps(first + k * kTileOutputs), _mm512_load_ps(second + k * kTileOutputs)};
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) {
                const __m512 factor = _mm512_set1_ps(x[r / 3][r % 3 * block.stride]);
                acc[r][0] = _mm512_fmadd_ps(w[0], factor, acc[r][0]);
                acc[r][1] = _mm512_fmadd_ps(w[1], factor, acc[r][1]);
            }
            QUIRE_UNROLL
            for (int i = 0; i < (Rows + 2) / 3; ++i) ++x[i];
        }
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r)
            for (int t = 0; t < 2; ++t) _mm512_storeu_ps(out + r * out_stride + t * kTileOutputs, acc[r][t]);
    }
};

template <class Format>
constexpr int64_t kTilesAtOnce<Avx512Panel<Format>> = 2;

}  // namespace
}  // namespace quire::QUIRE_ISA
