// fp16 weights, multiplied and summed in fp16: twice the multiply-adds of fp32 per instruction, and no conversion but
// of one sum for each group of inputs, which is added in fp32. The order of summation: native/src/matrix.h, multiply.
#pragma once

#include "fp16.h"
#include "matrix_neon.h"
#include "matrix_tiles.h"
#include "matrix_vector.h"

namespace quire::QUIRE_ISA {
namespace {

// Compilers would copy a lane to a vector before they multiply with it, copy zeros, and hoist all loads of a loop. Each
// takes vector pipes, or registers. So the instructions of the inner loop are inline assembly.
template <int Lane>
QUIRE_INLINE void fmla(float16x8_t& sum, float16x8_t w, float16x8_t x) {  // sum += w * x[Lane]
    __asm__ volatile("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(sum) : "w"(w), "x"(x), "i"(Lane));
}
QUIRE_INLINE float16x8_t zero_fp16() {
    float16x8_t zero;
    __asm__ volatile("movi %0.2d, #0" : "=w"(zero));
    return zero;
}

struct Fp16Tiles : InPlace<FloatFormat<Layout::Float16>> {
    static constexpr int max_rows = kRowBlock;
    static constexpr int octet = 8;                       // inputs whose activations fill a vector
    static constexpr int input_bytes = 2 * kTileOutputs;  // of weights
    static constexpr int group_bytes = kGroupInputs * input_bytes;

    // out[r, o] for Rows rows and the 16 outputs of a tile. More than 8 rows take two passes over each group: 16 sums,
    // 8 vectors of activations and the weights fill the registers. The fp32 sums are in memory.
    template <int Rows>
    __attribute__((noinline)) static void multiply(const uint8_t* group, const Block& block, int64_t num_inputs,
                                                   float* out, int64_t out_stride) {
        constexpr int kFirst = Rows <= 8 ? Rows : (Rows + 1) / 2, kSecond = Rows - kFirst;
        float acc[Rows][kTileOutputs] = {};
        uint8_t padded[group_bytes];
        const Fp16Group* x = block.fp16;
        for (int64_t left = num_inputs; left > 0; left -= kGroupInputs, group += group_bytes) {
            if (left < kGroupInputs) group = pad(group, left, padded);
            add_group<kFirst>(group, x, acc);
            if constexpr (kSecond > 0) add_group<kSecond>(group, x + kFirst, acc + kFirst);
            x += block.group_stride;
        }
        for (int r = 0; r < Rows; ++r) __builtin_memcpy(out + r * out_stride, acc[r], sizeof acc[r]);
    }

    // Copies the last inputs of a tile, and pads them with zeros: memory behind them belongs to the next tile.
    __attribute__((noinline)) static const uint8_t* pad(const uint8_t* group, int64_t num_inputs, uint8_t* padded) {
        __builtin_memset(padded, 0, group_bytes);
        __builtin_memcpy(padded, group, size_t(num_inputs * input_bytes));
        return padded;
    }

    // acc[r] += group . x[r]
    template <int Rows>
    QUIRE_INLINE static void add_group(const uint8_t* group, const Fp16Group* x, float (*acc)[kTileOutputs]) {
        float16x8_t sums[Rows][2];
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) sums[r][0] = zero_fp16(), sums[r][1] = zero_fp16();
        for (int i = 0; i < kGroupInputs / octet; ++i) add_octet(group + i * octet * input_bytes, x, i, sums);
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) {
            QUIRE_UNROLL
            for (int half = 0; half < 2; ++half) {
                float* to = acc[r] + 8 * half;
                const float32x4_t low = vcvt_f32_f16(vget_low_f16(sums[r][half])),
                                  high = vcvt_high_f32_f16(sums[r][half]);
                vst1q_f32(to, Simd::fma_scalar(low, &x[r].scale, vld1q_f32(to)));
                vst1q_f32(to + 4, Simd::fma_scalar(high, &x[r].scale, vld1q_f32(to + 4)));
            }
        }
    }

    template <int Rows>
    QUIRE_INLINE static void add_octet(const uint8_t* weights, const Fp16Group* rows, int index,
                                       float16x8_t (&sums)[Rows][2]) {
        float16x8_t x[Rows];
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) x[r] = load_here<float16x8_t>(rows[r].values + index * octet);
        add_input<0>(weights, x, sums);
        add_input<1>(weights, x, sums);
        add_input<2>(weights, x, sums);
        add_input<3>(weights, x, sums);
        add_input<4>(weights, x, sums);
        add_input<5>(weights, x, sums);
        add_input<6>(weights, x, sums);
        add_input<7>(weights, x, sums);
    }

    // sums[r] += w * x[r][Input] for the weights of one input of an octet.
    template <int Input, int Rows>
    QUIRE_INLINE static void add_input(const uint8_t* weights, const float16x8_t (&x)[Rows],
                                       float16x8_t (&sums)[Rows][2]) {
        const float16x8_t low = load_here<float16x8_t>(weights + Input * input_bytes),
                          high = load_here<float16x8_t>(weights + Input * input_bytes + 16);
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) {
            fmla<Input>(sums[r][0], low, x[r]);
            fmla<Input>(sums[r][1], high, x[r]);
        }
    }
};

// Converts a group to fp16. A group with an Inf or NaN gets a NaN scale, so that every result that depends on it is
// NaN.
QUIRE_INLINE void group_to_fp16(const float* x, Fp16Group& out) {
    uint32x4_t bits = vdupq_n_u32(0);  // of |x|: as integers, Inf and NaN are above all numbers
    for (int i = 0; i < kGroupInputs; i += 4)
        bits = vmaxq_u32(bits, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + i))));
    const uint32_t max_bits = vmaxvq_u32(bits);
    if (max_bits >= 0x7f800000) {
        out = Fp16Group{};
        out.scale = float_of_bits(0x7fc00000);
        return;
    }
    // The scale is 2^(exponent - 128). Below 2^-125, all magnitudes share one scale, and may end up below 2.
    const uint32_t exponent = max_bits >> 23 < 2 ? 2 : max_bits >> 23;
    out.scale = float_of_bits((exponent - 1) << 23);
    const float32x4_t inverse = vdupq_n_f32(float_of_bits((255 - exponent) << 23));
    for (int i = 0; i < kGroupInputs; i += 8) {
        const float16x4_t low = vcvt_f16_f32(vmulq_f32(vld1q_f32(x + i), inverse));
        vst1q_u16(out.values + i,
                  vreinterpretq_u16_f16(vcvt_high_f16_f32(low, vmulq_f32(vld1q_f32(x + i + 4), inverse))));
    }
}

}  // namespace

void to_fp16(const float* x, int64_t num_inputs, Fp16Group* groups, int64_t stride) {
    for (; num_inputs >= kGroupInputs; num_inputs -= kGroupInputs, x += kGroupInputs, groups += stride)
        group_to_fp16(x, *groups);
    if (num_inputs == 0) return;
    float padded[kGroupInputs] = {};
    __builtin_memcpy(padded, x, size_t(num_inputs) * sizeof(float));
    group_to_fp16(padded, *groups);
}

}  // namespace quire::QUIRE_ISA
