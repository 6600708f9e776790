// Products of a tile in ordinary loops: the specification of matrix_vector.h.
#pragma once

#include "half.h"
#include "matrix_format.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kRowBlock = 1;
template <class Format>
constexpr int kMaxTileRows = 1;  // rows that TileProduct takes at once

template <ScaleType Scale>
inline float scale_at(const uint8_t* scales, int output) {
    if (Scale == ScaleType::Float32) {
        float value;
        __builtin_memcpy(&value, scales + 4 * output, 4);
        return value;
    }
    uint16_t bits;
    __builtin_memcpy(&bits, scales + 2 * output, 2);
    return Scale == ScaleType::BFloat16 ? bfloat_to_float(bits) : half_to_float(bits);
}

template <class Format>
inline float offset_at(const uint8_t* group, int output) {
    const float stored = scale_at<Format::scale_type>(group + Format::offsets_at, output);
    return Format::scale_type == ScaleType::ZeroPoint ? stored * scale_at<Format::scale_type>(group, output) : stored;
}

// What a stored byte, or half of it, says (zero not yet taken off).
template <class Format>
inline int code_of(uint8_t stored, bool high) {
    if (Format::bits == 8) return int8_t(stored);
    const int code = high ? stored >> 4 : stored & 15;
    return Format::has_codebook ? Format::codebook[code] : code;
}

// The dot products of 16 outputs' codes (zero not yet taken off) with the codes of one group of activations.
template <class Format>
inline void dot_codes(const uint8_t* codes, const int8_t* x, int32_t* dots) {
    for (int quad = 0; quad < Format::group / 4; ++quad) {
        for (int o = 0; o < kTileOutputs; ++o) {
            for (int j = 0; j < 4; ++j) {
                const uint8_t stored = codes[((Format::bits == 4 ? quad % 4 : quad) * kTileOutputs + o) * 4 + j];
                dots[o] += code_of<Format>(stored, quad >= 4) * x[4 * quad + j];
            }
        }
    }
}

// out[o] = x . w[o] for one row of activations and the 16 outputs of a tile.
template <class Format, int Rows>
struct TileProduct {
    static void run(const uint8_t* tile, const Block& a, int64_t num_inputs, float* out, int64_t) {
        float acc[kTileOutputs] = {};
        for (int64_t g = 0; g < num_inputs / kGroupInputs; ++g) {
            const QuantizedGroup& x = a.groups[g];
            for (int part = 0; part < Format::parts; ++part, tile += Format::group_bytes) {
                int32_t dots[kTileOutputs] = {};
                dot_codes<Format>(tile + Format::codes_at, x.codes + part * Format::group, dots);
                for (int o = 0; o < kTileOutputs; ++o) {
                    if (Format::has_offset)
                        acc[o] = __builtin_fmaf(offset_at<Format>(tile, o), *sum_of<Format>(x, part), acc[o]);
                    const int32_t dot = dots[o] - Format::zero * code_sum_of<Format>(x, part);
                    acc[o] = __builtin_fmaf(float(dot) * scale_at<Format::scale_type>(tile, o), x.scale, acc[o]);
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
