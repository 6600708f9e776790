// Quantization of activations with NEON: see quantize_group in matrix.cpp.
#pragma once

#include <arm_neon.h>

#include "matrix.h"

namespace quire::QUIRE_ISA {
namespace {

// Rounds 16 inputs to int8: adding `magic` rounds, and leaves the integer in the low bits.
inline int8x16_t round_to_int8(const float32x4_t* x, float inverse_scale, float32x4_t magic) {
    uint16x8_t words[4];
    for (int i = 0; i < 4; ++i) words[i] = vreinterpretq_u16_f32(vaddq_f32(vmulq_n_f32(x[i], inverse_scale), magic));
    const uint8x16_t low = vreinterpretq_u8_u16(vuzp1q_u16(words[0], words[1]));
    const uint8x16_t high = vreinterpretq_u8_u16(vuzp1q_u16(words[2], words[3]));
    return vreinterpretq_s8_u8(vuzp1q_u8(low, high));
}

// The inputs of a group.
struct Inputs {
    float32x4_t x[kGroupInputs / 4];

    explicit Inputs(const float* from) {
        for (int i = 0; i < kGroupInputs / 4; ++i) x[i] = vld1q_f32(from + 4 * i);
    }
    uint32_t largest() const {
        uint32x4_t maximum = vreinterpretq_u32_f32(vabsq_f32(x[0]));
        for (int i = 1; i < kGroupInputs / 4; ++i) maximum = vmaxq_u32(maximum, vreinterpretq_u32_f32(vabsq_f32(x[i])));
        return vmaxvq_u32(maximum);
    }
    void store_quants(float inverse_scale, QuantizedGroup& out) const {
        const float32x4_t magic = vdupq_n_f32(0x1.8p23f);
        for (int half = 0; half < 2; ++half) {
            const int8x16_t quants = round_to_int8(x + 4 * half, inverse_scale, magic);
            vst1q_s8(out.quants + 16 * half, quants);
            out.half_quant_sums[half] = vaddlvq_s8(quants);
        }
    }
};

// In each lane, the largest magnitude of some inputs of a group.
inline uint32x4_t largest_lanes(const float* x) {
    uint32x4_t maximum[2] = {vdupq_n_u32(0), vdupq_n_u32(0)};
    for (int i = 0; i < kGroupInputs / 4; ++i)
        maximum[i % 2] = vmaxq_u32(maximum[i % 2], vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + 4 * i))));
    return vmaxq_u32(maximum[0], maximum[1]);
}

// Stores the quantized values of a group. Returns the sums of its two halves, in two lanes each.
inline int32x4_t store_quants(const float* x, float inverse_scale, int8_t* quants) {
    const float32x4_t magic = vdupq_n_f32(0x1.8p23f);
    int32x4_t sums[2];
    for (int half = 0; half < 2; ++half) {
        float32x4_t inputs[4];
        for (int i = 0; i < 4; ++i) inputs[i] = vld1q_f32(x + 16 * half + 4 * i);
        const int8x16_t rounded = round_to_int8(inputs, inverse_scale, magic);
        vst1q_s8(quants + 16 * half, rounded);
        sums[half] = vdotq_s32(vdupq_n_s32(0), rounded, vdupq_n_s8(1));
    }
    return vpaddq_s32(sums[0], sums[1]);
}

// Quantizes four groups at once: per-group numbers are computed for all four together. Returns false, with nothing
// done, if a group is zeros or has an Inf or NaN.
inline bool quantize_four(const float* x, QuantizedGroup* groups, int64_t stride) {
    uint32x4_t lanes[4];
    for (int i = 0; i < 4; ++i) lanes[i] = largest_lanes(x + i * kGroupInputs);
    const uint32x4_t maximum = vpmaxq_u32(vpmaxq_u32(lanes[0], lanes[1]), vpmaxq_u32(lanes[2], lanes[3]));
    const float32x4_t max = vreinterpretq_f32_u32(maximum);
    if (vmaxvq_u32(maximum) >= 0x7f800000 || vminvq_f32(max) < 0x1p-100f) return false;
    float inverse_scale[4];
    vst1q_f32(inverse_scale, vdivq_f32(vdupq_n_f32(127.0f), max));
    int32x4_t sums[4];
    for (int i = 0; i < 4; ++i)
        sums[i] = store_quants(x + i * kGroupInputs, inverse_scale[i], groups[i * stride].quants);
    const int32x4_t halves[2] = {vpaddq_s32(sums[0], sums[1]), vpaddq_s32(sums[2], sums[3])};
    const int32x4_t wholes = vpaddq_s32(halves[0], halves[1]);
    const float32x4_t scales = vdivq_f32(max, vdupq_n_f32(127.0f)), scaled = vmulq_f32(scales, vcvtq_f32_s32(wholes));
    const float32x4_t pairs[2] = {vzip1q_f32(scales, scaled), vzip2q_f32(scales, scaled)};
    const float32x4_t scaled_halves[2] = {vmulq_f32(vzip1q_f32(scales, scales), vcvtq_f32_s32(halves[0])),
                                          vmulq_f32(vzip2q_f32(scales, scales), vcvtq_f32_s32(halves[1]))};
    int32_t quant_sums[4];
    vst1q_s32(quant_sums, wholes);
    for (int i = 0; i < 4; ++i) {
        QuantizedGroup& out = groups[i * stride];
        const bool odd = i % 2;
        vst1_f32(&out.scale, odd ? vget_high_f32(pairs[i / 2]) : vget_low_f32(pairs[i / 2]));
        vst1_f32(out.half_sums, odd ? vget_high_f32(scaled_halves[i / 2]) : vget_low_f32(scaled_halves[i / 2]));
        out.quant_sum = quant_sums[i];
        vst1_s32(out.half_quant_sums, odd ? vget_high_s32(halves[i / 2]) : vget_low_s32(halves[i / 2]));
        out.unused = 0;
    }
    return true;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
