// Tile matmuls with SIMD: lanes are outputs, and Rows x Vectors accumulators stay in registers.
//
// `Simd` is the interface to the ISA (matrix_neon.h, matrix_avx2.h, matrix_avx512.h). It has
//   Float, Int, lanes                                  vectors of fp32 and int32
//   max_rows, int_vectors(rows), float_vectors(rows)   the register tile
//   prefetches_quants, prefetches_floats(rows), prefetch_bytes   whether weights are prefetched, and how far ahead
//   zero(), load_fp16(p), load_bf16(p), load_floats(p), load_int8(p), store(p, v)
//   fma_scalar(a, p, c)   a * *p + c
//   dot<Format, Rows>(quants, rows, part, dots)
//       exact dot products of a part of a run of weights with activations,
//       in a form that only `scaled` knows
//   scaled(dots, s)   float(dot) * s
#pragma once

#include "matrix_format.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kRowBlock = Simd::row_block;
template <class Format>
constexpr int kMaxTileRows = Simd::max_rows;

// Scales or offsets. `super_scales` are used if scales have two levels.
template <class Format>
QUIRE_INLINE Simd::Float load_stored(const uint8_t* p, const uint8_t* super_scales) {
    if constexpr (Format::scale_type == ScaleType::TwoLevel)
        return Simd::load_fp16(super_scales) * Simd::load_int8(p);  // exact: 11 bits times 8
    if constexpr (Format::scale_type == ScaleType::WideTwoLevel)
        return Simd::load_floats(super_scales) * Simd::load_int8(p);  // exact: 11 bits times 8
    if constexpr (Format::scale_type == ScaleType::Float32) return Simd::load_floats(p);
    if constexpr (Format::scale_type == ScaleType::Float16) return Simd::load_fp16(p);
    if constexpr (Format::scale_type == ScaleType::BFloat16) return Simd::load_bf16(p);
    if constexpr (Format::scale_type == ScaleType::ZeroPoint) return Simd::load_fp16(p);
}

// The scales of a group of a block, for the outputs from `output` on.
template <class Format>
QUIRE_INLINE Simd::Float load_scales(const uint8_t* block, int group, int output) {
    return load_stored<Format>(Format::scales(block, group, output), Format::super_scales(block, output));
}

template <class Format>
QUIRE_INLINE Simd::Float load_offsets(const uint8_t* block, int group, int output) {
    const auto stored =
        load_stored<Format>(Format::offsets(block, group, output), Format::super_offsets(block, output));
    if constexpr (Format::scale_type == ScaleType::ZeroPoint)
        return stored * load_scales<Format>(block, group, output);  // exact: 11 bits times 9
    else
        return stored;
}

// out[r, o] = x[r] . w[o] for `Rows` rows of activations and the 16 outputs of a tile.
template <class Format, int Rows>
struct TileMatmul {
    static constexpr int kVectors = Simd::int_vectors(Rows);
    static constexpr int kOutputs = kVectors * Simd::lanes;

    __attribute__((noinline)) static void run(const uint8_t* tile, const Block& a, int64_t num_inputs, float* out,
                                              int64_t out_stride) {
        for (int first = 0; first < kTileOutputs; first += kOutputs)
            run_outputs(tile, first, a, num_inputs / kGroupInputs, out + first, out_stride);
    }

    QUIRE_INLINE static void run_outputs(const uint8_t* weights, int first, const Block& block, int64_t num_groups,
                                         float* out, int64_t out_stride) {
        const QuantizedGroup* x = block.groups;
        typename Simd::Float acc[Rows][kVectors];
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::zero();
        constexpr int kRunLines = (Format::block_bytes / Format::block_runs + 63) / 64;  // of cache
        for (const QuantizedGroup* end = x + num_groups * block.group_stride; x != end; weights += Format::block_bytes)
            for (int run = 0; run < Format::block_runs; ++run, x += block.group_stride) {
                if constexpr (Simd::prefetches_quants) {
                    QUIRE_UNROLL
                    for (int line = 0; line < kRunLines; ++line)
                        __builtin_prefetch(weights + Simd::prefetch_bytes + 64 * (run * kRunLines + line));
                }
                add_run(weights, run, first, x, acc);
            }
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) Simd::store(out + r * out_stride + v * Simd::lanes, acc[r][v]);
    }

    QUIRE_INLINE static void add_run(const uint8_t* weights, int run, int first, const QuantizedGroup* x,
                                     typename Simd::Float (&acc)[Rows][kVectors]) {
        const QuantizedGroup* rows[Rows];
        for (int r = 0; r < Rows; ++r) rows[r] = x + r;
        QUIRE_UNROLL
        for (int part = 0; part < Format::parts; ++part) {
            const int group = run * Format::parts + part;
            QUIRE_UNROLL
            for (int v = 0; v < kVectors; ++v) {
                const int output = first + v * Simd::lanes;
                typename Simd::Int dots[Rows];
                Simd::template dot<Format, Rows>(Format::quants(weights, run) + 4 * output, rows, part, dots);
                if constexpr (Format::has_offset) {
                    const auto offsets = load_offsets<Format>(weights, group, output);
                    for (int r = 0; r < Rows; ++r)
                        acc[r][v] = Simd::fma_scalar(offsets, sum_of<Format>(*rows[r], part), acc[r][v]);
                }
                const auto scales = load_scales<Format>(weights, group, output);
                for (int r = 0; r < Rows; ++r)
                    acc[r][v] = Simd::fma_scalar(Simd::scaled(dots[r], scales), &rows[r]->scale, acc[r][v]);
            }
        }
    }
};

template <Layout Element>
QUIRE_INLINE Simd::Float load_weights(const uint8_t* weights) {
    if constexpr (Element == Layout::Float32) return Simd::load_floats(weights);
    if constexpr (Element == Layout::Float16) return Simd::load_fp16(weights);
    if constexpr (Element == Layout::BFloat16) return Simd::load_bf16(weights);
}

template <Layout Element, int Rows>
struct TileMatmul<FloatFormat<Element>, Rows> {
    static constexpr int kVectors = Simd::float_vectors(Rows);
    static constexpr int kOutputs = kVectors * Simd::lanes;
    static constexpr int kBytes = FloatFormat<Element>::element_bytes;

    __attribute__((noinline)) static void run(const uint8_t* tile, const Block& a, int64_t num_inputs, float* out,
                                              int64_t out_stride) {
        for (int first = 0; first < kTileOutputs; first += kOutputs)
            run_outputs(tile + first * kBytes, a, num_inputs, out + first, out_stride);
    }

    QUIRE_INLINE static void run_outputs(const uint8_t* weights, const Block& a, int64_t num_inputs, float* out,
                                         int64_t out_stride) {
        typename Simd::Float acc[Rows][kVectors];
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::zero();
        for (int64_t k = 0; k < num_inputs; ++k, weights += kTileOutputs * kBytes) {
            if constexpr (Simd::prefetches_floats(Rows)) __builtin_prefetch(weights + Simd::prefetch_bytes);
            for (int v = 0; v < kVectors; ++v) {
                const auto w = load_weights<Element>(weights + v * Simd::lanes * kBytes);
                for (int r = 0; r < Rows; ++r) acc[r][v] = Simd::fma_scalar(w, a.x + r * a.stride + k, acc[r][v]);
            }
        }
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) Simd::store(out + r * out_stride + v * Simd::lanes, acc[r][v]);
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
