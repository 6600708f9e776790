// Tile matmuls in ordinary loops: the specification of matrix_vector.h.
#pragma once

#include "fp16.h"
#include "matrix_format.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kRowBlock = 1;
template <class Format>
constexpr int kMaxTileRows = 1;  // rows of a TileMatmul

inline float float_at(const uint8_t* at) {
    float value;
    __builtin_memcpy(&value, at, 4);
    return value;
}
inline uint16_t word_at(const uint8_t* at) {
    uint16_t bits;
    __builtin_memcpy(&bits, at, 2);
    return bits;
}

// A scale or offset. `super_scale` is used if scales have two levels.
template <class Format>
inline float stored_at(const uint8_t* at, const uint8_t* super_scale) {
    switch (Format::scale_type) {
        case ScaleType::TwoLevel: return fp16_to_float(word_at(super_scale)) * float(int8_t(*at));
        case ScaleType::WideTwoLevel: return float_at(super_scale) * float(int8_t(*at));
        case ScaleType::Float32: return float_at(at);
        case ScaleType::BFloat16: return bf16_to_float(word_at(at));
        case ScaleType::Float16:
        case ScaleType::ZeroPoint: break;
    }
    return fp16_to_float(word_at(at));
}

template <class Format>
inline float scale_at(const uint8_t* block, int group, int output) {
    return stored_at<Format>(Format::scales(block, group, output), Format::super_scales(block, output));
}

template <class Format>
inline float offset_at(const uint8_t* block, int group, int output) {
    const float stored = stored_at<Format>(Format::offsets(block, group, output), Format::super_offsets(block, output));
    return Format::scale_type == ScaleType::ZeroPoint ? stored * scale_at<Format>(block, group, output) : stored;
}

// The bits of input j of a quad in a plane.
template <class Format, int Bits>
inline int bits_at(const uint8_t* plane, int quad, int output, int j) {
    const int stored = plane[quad % Bits * Format::plane_row + 4 * output + j];
    return stored >> (quad / Bits * Bits) & ((1 << Bits) - 1);
}

// The quantized value of input j of a quad (zero not yet subtracted).
template <class Format>
inline int quant_at(const uint8_t* quants, int quad, int output, int j) {
    int quant = bits_at<Format, Format::low_bits>(quants, quad, output, j);
    if constexpr (Format::high_bits > 0)
        quant |= bits_at<Format, Format::high_bits>(quants + Format::high_plane_at, quad, output, j)
                 << Format::low_bits;
    if (Format::bits == 8) return int8_t(quant);
    return Format::has_codebook ? Format::codebook[quant] : quant;
}

// Dot products of the quantized values of 16 outputs (zero not yet subtracted) with those of activations, for a part of
// a run.
template <class Format>
inline void dot_quants(const uint8_t* quants, const int8_t* x, int part, int32_t* dots) {
    constexpr int kQuads = Format::group / 4;
    for (int quad = part * kQuads; quad < (part + 1) * kQuads; ++quad)
        for (int o = 0; o < kTileOutputs; ++o)
            for (int j = 0; j < 4; ++j) dots[o] += quant_at<Format>(quants, quad, o, j) * x[4 * quad + j];
}

// out[o] = x . w[o] for one row of activations and the 16 outputs of a tile.
template <class Format, int Rows>
struct TileMatmul {
    static void run(const uint8_t* tile, const Block& a, int64_t num_inputs, float* out, int64_t) {
        float acc[kTileOutputs] = {};
        GroupCursor<Format> at{tile};
        for (int64_t g = 0; g < num_inputs / kGroupInputs; ++g) {
            const QuantizedGroup& x = a.groups[g];
            for (int part = 0; part < Format::parts; ++part, at.advance()) {
                int32_t dots[kTileOutputs] = {};
                dot_quants<Format>(Format::quants(at.block, at.group / Format::parts), x.quants, part, dots);
                for (int o = 0; o < kTileOutputs; ++o) {
                    if (Format::has_offset)
                        acc[o] =
                            __builtin_fmaf(offset_at<Format>(at.block, at.group, o), *sum_of<Format>(x, part), acc[o]);
                    const int32_t dot = dots[o] - Format::zero * quant_sum_of<Format>(x, part);
                    acc[o] = __builtin_fmaf(float(dot) * scale_at<Format>(at.block, at.group, o), x.scale, acc[o]);
                }
            }
        }
        for (int o = 0; o < kTileOutputs; ++o) out[o] = acc[o];
    }
};

template <Layout Element, int Rows>
struct TileMatmul<FloatFormat<Element>, Rows> {
    static void run(const uint8_t* tile, const Block& a, int64_t num_inputs, float* out, int64_t) {
        float acc[kTileOutputs] = {};
        for (int64_t k = 0; k < num_inputs; ++k) {
            for (int o = 0; o < kTileOutputs; ++o) {
                float weight;
                if (Element == Layout::Float32) {
                    __builtin_memcpy(&weight, tile + (k * kTileOutputs + o) * 4, 4);
                } else {
                    uint16_t bits;
                    __builtin_memcpy(&bits, tile + (k * kTileOutputs + o) * 2, 2);
                    weight = Element == Layout::Float16 ? fp16_to_float(bits) : bf16_to_float(bits);
                }
                acc[o] = __builtin_fmaf(weight, a.x[k], acc[o]);
            }
        }
        for (int o = 0; o < kTileOutputs; ++o) out[o] = acc[o];
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
