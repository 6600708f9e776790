// 4-bit weights and up to 12 rows of activations with NEON: too few rows to unpack a panel.
#pragma once

#include "matrix_neon.h"
#include "matrix_vector.h"

namespace quire::QUIRE_ISA {
namespace {

// The super-scales of a vector of outputs.
template <class Format>
QUIRE_INLINE float32x4_t load_super_scales(const uint8_t* super_scales, int vector) {
    const uint8_t* at = super_scales + vector * Simd::lanes * Format::super_scale_bytes;
    return Format::super_scale_bytes == 4 ? Simd::load_floats(at) : Simd::load_fp16(at);
}

// Two-level scales, or offsets, of several vectors of outputs: the sub-scales of 8 outputs are widened together.
template <class Format, int Vectors>
QUIRE_INLINE void load_two_level(const uint8_t* counts, const uint8_t* super_scales, float32x4_t (&to)[Vectors]) {
    static_assert(Vectors % 2 == 0);
    QUIRE_UNROLL
    for (int v = 0; v < Vectors; v += 2) {
        const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(vld1_u8(counts + 4 * v)));
        to[v] = vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), load_super_scales<Format>(super_scales, v));
        to[v + 1] = vmulq_f32(vcvtq_f32_s32(vmovl_high_s16(wide)), load_super_scales<Format>(super_scales, v + 1));
    }
}
template <class Format, int Vectors>
QUIRE_INLINE void load_scales(const uint8_t* block, int group, int output, float32x4_t (&to)[Vectors]) {
    if constexpr (Format::two_level && Vectors > 1) {
        load_two_level<Format>(Format::scales(block, group, output), Format::super_scales(block, output), to);
    } else {
        QUIRE_UNROLL
        for (int v = 0; v < Vectors; ++v) to[v] = load_scales<Format>(block, group, output + v * Simd::lanes);
    }
}
template <class Format, int Vectors>
QUIRE_INLINE void load_offsets(const uint8_t* block, int group, int output, float32x4_t (&to)[Vectors]) {
    if constexpr (Format::two_level && Vectors > 1) {
        load_two_level<Format>(Format::offsets(block, group, output), Format::super_offsets(block, output), to);
    } else {
        QUIRE_UNROLL
        for (int v = 0; v < Vectors; ++v) to[v] = load_offsets<Format>(block, group, output + v * Simd::lanes);
    }
}

// 1 to 4 rows: every byte of weights is unpacked between the dot products that use it, which keeps both vector pipes
// busy.
template <class Format, int Rows>
struct OneToFourRows {
    static constexpr int kVectors = Simd::int_vectors(Rows);
    static constexpr int kOutputs = kVectors * Simd::lanes;

    __attribute__((noinline)) static void run(const uint8_t* tile, const Block& block, int64_t num_inputs, float* out,
                                              int64_t out_stride) {
        for (int first = 0; first < kTileOutputs; first += kOutputs)
            run_outputs(tile, first, block, num_inputs / kGroupInputs, out + first, out_stride);
    }

    QUIRE_INLINE static void run_outputs(const uint8_t* weights, int first, const Block& block, int64_t num_groups,
                                         float* out, int64_t out_stride) {
        float32x4_t acc[Rows][kVectors];
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::zero();
        const QuantizedGroup* x = block.groups;
        for (int64_t g = 0; g < num_groups; g += Format::block_runs, weights += Format::block_bytes)
            for (int run = 0; run < Format::block_runs; ++run, x += block.group_stride)
                add_run(weights, run, first, x, acc);
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) vst1q_f32(out + r * out_stride + v * Simd::lanes, acc[r][v]);
    }

    QUIRE_INLINE static void add_run(const uint8_t* weights, int run, int first, const QuantizedGroup* x,
                                     float32x4_t (&acc)[Rows][kVectors]) {
        int8x16_t low[Rows], high[Rows];  // quads 0 .. 3 and 4 .. 7
        int32x4_t dots[Rows][kVectors];
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) {
            low[r] = vld1q_s8(x[r].quants);
            high[r] = vld1q_s8(x[r].quants + 16);
            for (int v = 0; v < kVectors; ++v) {
                dots[r][v] = Simd::start();
                if constexpr (Format::zero != 0)
                    dots[r][v] = vaddq_s32(dots[r][v], vdupq_n_s32(-Format::zero * x[r].quant_sum));
            }
        }
        const uint8_t* quants = Format::quants(weights, run) + 4 * first;
        add_quads<0>(quants, low, high, dots);
        add_quads<1>(quants, low, high, dots);
        add_quads<2>(quants, low, high, dots);
        add_quads<3>(quants, low, high, dots);
        float32x4_t scales[kVectors], offsets[kVectors];
        load_scales<Format>(weights, run, first, scales);
        if constexpr (Format::has_offset) load_offsets<Format>(weights, run, first, offsets);
        QUIRE_UNROLL
        for (int v = 0; v < kVectors; ++v) {
            if constexpr (Format::has_offset)
                for (int r = 0; r < Rows; ++r) acc[r][v] = Simd::fma_scalar(offsets[v], &x[r].sum, acc[r][v]);
            for (int r = 0; r < Rows; ++r)
                acc[r][v] = Simd::fma_scalar(Simd::scaled(dots[r][v], scales[v]), &x[r].scale, acc[r][v]);
        }
    }

    // dots += quads Quad and Quad + 4.
    template <int Quad>
    QUIRE_INLINE static void add_quads(const uint8_t* quants, const int8x16_t (&low)[Rows],
                                       const int8x16_t (&high)[Rows], int32x4_t (&dots)[Rows][kVectors]) {
        QUIRE_UNROLL
        for (int v = 0; v < kVectors; ++v) {
            const uint8x16_t pairs = load_here<uint8x16_t>(quants + Quad * 4 * kTileOutputs + v * 16);
            const int8x16_t first = Simd::low_quants<Format>(pairs), second = Simd::high_quants<Format>(pairs);
            for (int r = 0; r < Rows; ++r) {
                dots[r][v] = vdotq_laneq_s32(dots[r][v], first, low[r], Quad);
                dots[r][v] = vdotq_laneq_s32(dots[r][v], second, high[r], Quad);
            }
        }
    }
};

// 5 to 12 rows: a group of 4 outputs is unpacked, and then multiplied with up to 8 rows at a time. Sums are converted
// and scaled as in matrix_neon_panel.h.
template <class Format, int Rows>
struct FiveToTwelveRows {
    static constexpr int kFirst = Rows <= 8 ? Rows : (Rows + 1) / 2, kSecond = Rows - kFirst;

    __attribute__((noinline)) static void run(const uint8_t* tile, const Block& block, int64_t num_inputs, float* out,
                                              int64_t out_stride) {
        for (int first = 0; first < kTileOutputs; first += Simd::lanes)
            run_outputs(tile, first, block, num_inputs / kGroupInputs, out + first, out_stride);
    }

    QUIRE_INLINE static void run_outputs(const uint8_t* weights, int first, const Block& block, int64_t num_groups,
                                         float* out, int64_t out_stride) {
        float32x4_t acc[Rows];
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) acc[r] = Simd::zero();
        const QuantizedGroup* x = block.groups;
        for (int64_t g = 0; g < num_groups; g += Format::block_runs, weights += Format::block_bytes)
            for (int run = 0; run < Format::block_runs; ++run, x += block.group_stride)
                add_run(weights, run, first, x, acc);
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) vst1q_f32(out + r * out_stride, acc[r]);
    }

    QUIRE_INLINE static void add_run(const uint8_t* block, int run, int first, const QuantizedGroup* x,
                                     float32x4_t (&acc)[Rows]) {
        int8x16_t weights[8];
        const uint8_t* quants = Format::quants(block, run) + 4 * first;
        QUIRE_UNROLL
        for (int q = 0; q < 4; ++q) {
            const uint8x16_t pairs = vld1q_u8(quants + q * 4 * kTileOutputs);
            weights[q] = Simd::low_quants<Format>(pairs);
            weights[q + 4] = Simd::high_quants<Format>(pairs);
        }
        if constexpr (Format::zero != 0) {
            QUIRE_UNROLL
            for (int q = 0; q < 8; ++q) weights[q] = vsubq_s8(weights[q], vdupq_n_s8(Format::zero));
        }
        const float32x4_t scales = load_scales<Format>(block, run, first);
        alignas(16) float magics[4];
        const float32x4_t magic = vmulq_n_f32(scales, -Simd::kMagic);
        __asm__ volatile("str %q1, %0" : "=m"(magics) : "w"(magic));
        float32x4_t offsets = Simd::zero();
        if constexpr (Format::has_offset) offsets = load_offsets<Format>(block, run, first);
        add_rows<0, kFirst>(weights, scales, offsets, magics, x, acc);
        if constexpr (kSecond > 0) add_rows<kFirst, kSecond>(weights, scales, offsets, magics, x, acc);
    }

    template <int First, int Count>
    QUIRE_INLINE static void add_rows(const int8x16_t (&weights)[8], float32x4_t scales, float32x4_t offsets,
                                      const float (&magics)[4], const QuantizedGroup* x, float32x4_t (&acc)[Rows]) {
        int32x4_t dots[Count];
        QUIRE_UNROLL
        for (int half = 0; half < 2; ++half) {
            QUIRE_UNROLL
            for (int i = 0; i < Count; ++i) {
                if (half == 0) dots[i] = Simd::start();
                add_quads(dots[i], weights + 4 * half, load_here<int8x16_t>(x[First + i].quants + 16 * half));
            }
        }
        constexpr int kDelay = 2;                  // rows between a term and its addition, to hide its latency
        float32x4_t factors[Count], terms[Count];  // factors: scale, then sum
        QUIRE_UNROLL
        for (int i = 0; i < Count + kDelay; ++i) {
            if (i < Count) {
                terms[i] = load_here<float32x4_t>(magics);
                fmla(terms[i], vreinterpretq_f32_s32(dots[i]), scales);
                factors[i] = load_here<float32x4_t>(&x[First + i].scale);
                if constexpr (Format::has_offset) fmla<1>(acc[First + i], offsets, factors[i]);
            }
            if (i >= kDelay) fmla<0>(acc[First + i - kDelay], terms[i - kDelay], factors[i - kDelay]);
        }
    }
};

template <class Format, int Rows>
struct UpToTwelveRows : FiveToTwelveRows<Format, Rows> {};
template <class Format>
struct UpToTwelveRows<Format, 1> : OneToFourRows<Format, 1> {};
template <class Format>
struct UpToTwelveRows<Format, 2> : OneToFourRows<Format, 2> {};
template <class Format>
struct UpToTwelveRows<Format, 3> : OneToFourRows<Format, 3> {};
template <class Format>
struct UpToTwelveRows<Format, 4> : OneToFourRows<Format, 4> {};

template <ScaleType Scale, bool Offset, int Zero, Codebook Book, int Rows>
struct TileMatmul<IntFormat<4, 32, Scale, Offset, Zero, Book>, Rows>
    : UpToTwelveRows<IntFormat<4, 32, Scale, Offset, Zero, Book>, Rows> {};

template <ScaleType Scale, bool Offset, int Zero, Codebook Book>
constexpr int kMaxTileRows<IntFormat<4, 32, Scale, Offset, Zero, Book>> = 12;

}  // namespace
}  // namespace quire::QUIRE_ISA
