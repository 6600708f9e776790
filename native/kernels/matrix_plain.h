// Products of a tile in ordinary loops: the specification of matrix_vector.h.
#pragma once

#include "fp16.h"
#include "matrix_format.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kRowBlock = 1;
template <class Format>
constexpr int kMaxTileRows = 1;  // rows that TileProduct takes at once

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

// A scale, or what is stored in the same way. `unit` is the one of two levels.
template <class Format>
inline float stored_at(const uint8_t* at, const uint8_t* unit) {
    switch (Format::scale_type) {
        case ScaleType::TwoLevel: return half_to_float(word_at(unit)) * float(int8_t(*at));
        case ScaleType::WideTwoLevel: return float_at(unit) * float(int8_t(*at));
        case ScaleType::Float32: return float_at(at);
        case ScaleType::BFloat16: return bfloat_to_float(word_at(at));
        case ScaleType::Float16:
        case ScaleType::ZeroPoint: break;
    }
    return half_to_float(word_at(at));
}

template <class Format>
inline float scale_at(const uint8_t* block, int group, int output) {
    return stored_at<Format>(Format::scales(block, group, output), Format::units(block, output));
}

template <class Format>
inline float offset_at(const uint8_t* block, int group, int output) {
    const float stored = stored_at<Format>(Format::offsets(block, group, output), Format::offset_units(block, output));
    return Format::scale_type == ScaleType::ZeroPoint ? stored * scale_at<Format>(block, group, output) : stored;
}

// The bits that a plane has of the code of input j of a quad.
template <class Format, int Bits>
inline int bits_at(const uint8_t* plane, int quad, int output, int j) {
    const int stored = plane[quad % Bits * Format::plane_row + 4 * output + j];
    return stored >> (quad / Bits * Bits) & ((1 << Bits) - 1);
}

// What the planes say (zero not yet taken off).
template <class Format>
inline int code_at(const uint8_t* codes, int quad, int output, int j) {
    int code = bits_at<Format, Format::low_bits>(codes, quad, output, j);
    if constexpr (Format::high_bits > 0)
        code |= bits_at<Format, Format::high_bits>(codes + Format::high_plane_at, quad, output, j) << Format::low_bits;
    if (Format::bits == 8) return int8_t(code);
    return Format::has_codebook ? Format::codebook[code] : code;
}

// The dot products of 16 outputs' codes (zero not yet taken off) with the codes of activations, for a part of a run.
template <class Format>
inline void dot_codes(const uint8_t* codes, const int8_t* x, int part, int32_t* dots) {
    constexpr int kQuads = Format::group / 4;
    for (int quad = part * kQuads; quad < (part + 1) * kQuads; ++quad)
        for (int o = 0; o < kTileOutputs; ++o)
            for (int j = 0; j < 4; ++j) dots[o] += code_at<Format>(codes, quad, o, j) * x[4 * quad + j];
}

// out[o] = x . w[o] for one row of activations and the 16 outputs of a tile.
template <class Format, int Rows>
struct TileProduct {
    static void run(const uint8_t* tile, const Block& a, int64_t num_inputs, float* out, int64_t) {
        float acc[kTileOutputs] = {};
        GroupPlace<Format> at{tile};
        for (int64_t g = 0; g < num_inputs / kGroupInputs; ++g) {
            const QuantizedGroup& x = a.groups[g];
            for (int part = 0; part < Format::parts; ++part, at.advance()) {
                int32_t dots[kTileOutputs] = {};
                dot_codes<Format>(Format::codes(at.block, at.group / Format::parts), x.codes, part, dots);
                for (int o = 0; o < kTileOutputs; ++o) {
                    if (Format::has_offset)
                        acc[o] =
                            __builtin_fmaf(offset_at<Format>(at.block, at.group, o), *sum_of<Format>(x, part), acc[o]);
                    const int32_t dot = dots[o] - Format::zero * code_sum_of<Format>(x, part);
                    acc[o] = __builtin_fmaf(float(dot) * scale_at<Format>(at.block, at.group, o), x.scale, acc[o]);
                }
            }
        }
        for (int o = 0; o < kTileOutputs; ++o) out[o] = acc[o];
    }
};

template <Layout Element, int Rows>
struct TileProduct<FloatFormat<Element>, Rows> {
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
                    weight = Element == Layout::Float16 ? half_to_float(bits) : bfloat_to_float(bits);
                }
                acc[o] = __builtin_fmaf(weight, a.x[k], acc[o]);
            }
        }
        for (int o = 0; o < kTileOutputs; ++o) out[o] = acc[o];
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
