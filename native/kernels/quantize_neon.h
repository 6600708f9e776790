// Activations as groups of codes, with NEON: see quantize_group in matrix.cpp.
#pragma once

#include <arm_neon.h>

#include "matrix.h"

namespace quire::QUIRE_ISA {
namespace {

// 16 codes: adding `counter` rounds, and leaves the code in the low bits.
inline int8x16_t round_to_codes(const float32x4_t* x, float to_code, float32x4_t counter) {
    uint16x8_t words[4];
    for (int i = 0; i < 4; ++i) words[i] = vreinterpretq_u16_f32(vaddq_f32(vmulq_n_f32(x[i], to_code), counter));
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
        uint32x4_t most = vreinterpretq_u32_f32(vabsq_f32(x[0]));
        for (int i = 1; i < kGroupInputs / 4; ++i) most = vmaxq_u32(most, vreinterpretq_u32_f32(vabsq_f32(x[i])));
        return vmaxvq_u32(most);
    }
    void store_codes(float to_code, QuantizedGroup& out) const {
        const float32x4_t counter = vdupq_n_f32(0x1.8p23f);
        for (int half = 0; half < 2; ++half) {
            const int8x16_t codes = round_to_codes(x + 4 * half, to_code, counter);
            vst1q_s8(out.codes + 16 * half, codes);
            out.half_code_sums[half] = vaddlvq_s8(codes);
        }
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
