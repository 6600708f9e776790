// Up to 12 rows of activations and 4-bit weights with NEON, where unpacking a panel would not pay.
#pragma once

#include "matrix_neon.h"
#include "matrix_vector.h"

namespace quire::QUIRE_ISA {
namespace {

// Those of a vector of outputs.
template <class Format>
QUIRE_INLINE float32x4_t load_units(const uint8_t* units, int vector) {
    const uint8_t* at = units + vector * Unit::lanes * Format::unit_bytes;
    return Format::unit_bytes == 4 ? Unit::load_floats(at) : Unit::load_halves(at);
}

// The scales, or offsets, of several vectors of outputs: counts of 8 outputs are widened together.
template <class Format, int Vectors>
QUIRE_INLINE void load_counted(const uint8_t* counts, const uint8_t* units, float32x4_t (&to)[Vectors]) {
    static_assert(Vectors % 2 == 0);
    QUIRE_UNROLL
    for (int v = 0; v < Vectors; v += 2) {
        const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(vld1_u8(counts + 4 * v)));
        to[v] = vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), load_units<Format>(units, v));
        to[v + 1] = vmulq_f32(vcvtq_f32_s32(vmovl_high_s16(wide)), load_units<Format>(units, v + 1));
    }
}
template <class Format, int Vectors>
QUIRE_INLINE void load_scales(const uint8_t* block, int group, int output, float32x4_t (&to)[Vectors]) {
    if constexpr (Format::two_level && Vectors > 1) {
        load_counted<Format>(Format::scales(block, group, output), Format::units(block, output), to);
    } else {
        QUIRE_UNROLL
        for (int v = 0; v < Vectors; ++v) to[v] = load_scales<Format>(block, group, output + v * Unit::lanes);
    }
}
template <class Format, int Vectors>
QUIRE_INLINE void load_offsets(const uint8_t* block, int group, int output, float32x4_t (&to)[Vectors]) {
    if constexpr (Format::two_level && Vectors > 1) {
        load_counted<Format>(Format::offsets(block, group, output), Format::offset_units(block, output), to);
    } else {
        QUIRE_UNROLL
        for (int v = 0; v < Vectors; ++v) to[v] = load_offsets<Format>(block, group, output + v * Unit::lanes);
    }
}

// 1 to 4 rows: every byte of weights is unpacked between the dot products that use it, so that both vector pipes are
// busy all the time.
template <class Format, int Rows>
struct FewRows {
    static constexpr int kVectors = Unit::int_vectors(Rows);
    static constexpr int kOutputs = kVectors * Unit::lanes;

    __attribute__((noinline)) static void run(const uint8_t* tile, const Block& block, int64_t num_inputs, float* out,
                                              int64_t out_stride) {
        for (int first = 0; first < kTileOutputs; first += kOutputs)
            run_outputs(tile, first, block, num_inputs / kGroupInputs, out + first, out_stride);
    }

    QUIRE_INLINE static void run_outputs(const uint8_t* weights, int first, const Block& block, int64_t num_groups,
                                         float* out, int64_t out_stride) {
        float32x4_t acc[Rows][kVectors];
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) acc[r][v] = Unit::zero();
        const QuantizedGroup* x = block.groups;
        for (int64_t g = 0; g < num_groups; g += Format::block_runs, weights += Format::block_bytes)
            for (int run = 0; run < Format::block_runs; ++run, x += block.group_stride)
                add_run(weights, run, first, x, acc);
        for (int r = 0; r < Rows; ++r)
            for (int v = 0; v < kVectors; ++v) vst1q_f32(out + r * out_stride + v * Unit::lanes, acc[r][v]);
    }

    QUIRE_INLINE static void add_run(const uint8_t* weights, int run, int first, const QuantizedGroup* x,
                                     float32x4_t (&acc)[Rows][kVectors]) {
        int8x16_t low[Rows], high[Rows];  // codes of quads 0 .. 3 and 4 .. 7
        int32x4_t dots[Rows][kVectors];
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) {
            low[r] = vld1q_s8(x[r].codes);
            high[r] = vld1q_s8(x[r].codes + 16);
            for (int v = 0; v < kVectors; ++v) {
                dots[r][v] = Unit::start();
                if constexpr (Format::zero != 0)
                    dots[r][v] = vaddq_s32(dots[r][v], vdupq_n_s32(-Format::zero * x[r].code_sum));
            }
        }
        const uint8_t* codes = Format::codes(weights, run) + 4 * first;
        add_quads<0>(codes, low, high, dots);
        add_quads<1>(codes, low, high, dots);
        add_quads<2>(codes, low, high, dots);
        add_quads<3>(codes, low, high, dots);
        float32x4_t scales[kVectors], offsets[kVectors];
        load_scales<Format>(weights, run, first, scales);
        if constexpr (Format::has_offset) load_offsets<Format>(weights, run, first, offsets);
        QUIRE_UNROLL
        for (int v = 0; v < kVectors; ++v) {
            if constexpr (Format::has_offset)
                for (int r = 0; r < Rows; ++r) acc[r][v] = Unit::fma_scalar(offsets[v], &x[r].sum, acc[r][v]);
            for (int r = 0; r < Rows; ++r)
                acc[r][v] = Unit::fma_scalar(Unit::scaled(dots[r][v], scales[v]), &x[r].scale, acc[r][v]);
        }
    }

    // dots += quads Quad and Quad + 4.
    template <int Quad>
    QUIRE_INLINE static void add_quads(const uint8_t* codes, const int8x16_t (&low)[Rows],
                                       const int8x16_t (&high)[Rows], int32x4_t (&dots)[Rows][kVectors]) {
        QUIRE_UNROLL
        for (int v = 0; v < kVectors; ++v) {
            const uint8x16_t pairs = load_here<uint8x16_t>(codes + Quad * 4 * kTileOutputs + v * 16);
            const int8x16_t first = Unit::low_codes<Format>(pairs), second = Unit::high_codes<Format>(pairs);
            for (int r = 0; r < Rows; ++r) {
                dots[r][v] = vdotq_laneq_s32(dots[r][v], first, low[r], Quad);
                dots[r][v] = vdotq_laneq_s32(dots[r][v], second, high[r], Quad);
            }
        }
    }
};

// 5 to 12 rows: a group of 4 outputs is unpacked, then meets the rows, up to 8 at a time. Sums are converted and scaled
// as in matrix_neon_panel.h.
template <class Format, int Rows>
struct SeveralRows {
    static constexpr int kFirst = Rows <= 8 ? Rows : (Rows + 1) / 2, kSecond = Rows - kFirst;

    __attribute__((noinline)) static void run(const uint8_t* tile, const Block& block, int64_t num_inputs, float* out,
                                              int64_t out_stride) {
        for (int first = 0; first < kTileOutputs; first += Unit::lanes)
            run_outputs(tile, first, block, num_inputs / kGroupInputs, out + first, out_stride);
    }

    QUIRE_INLINE static void run_outputs(const uint8_t* weights, int first, const Block& block, int64_t num_groups,
                                         float* out, int64_t out_stride) {
        float32x4_t acc[Rows];
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) acc[r] = Unit::zero();
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
        const uint8_t* codes = Format::codes(block, run) + 4 * first;
        QUIRE_UNROLL
        for (int q = 0; q < 4; ++q) {
            const uint8x16_t pairs = vld1q_u8(codes + q * 4 * kTileOutputs);
            weights[q] = Unit::low_codes<Format>(pairs);
            weights[q + 4] = Unit::high_codes<Format>(pairs);
        }
        if constexpr (Format::zero != 0) {
            QUIRE_UNROLL
            for (int q = 0; q < 8; ++q) weights[q] = vsubq_s8(weights[q], vdupq_n_s8(Format::zero));
        }
        const float32x4_t scales = load_scales<Format>(block, run, first);
        alignas(16) float counters[4];
        const float32x4_t counter = vmulq_n_f32(scales, -Unit::kCounter);
        __asm__ volatile("str %q1, %0" : "=m"(counters) : "w"(counter));
        float32x4_t offsets = Unit::zero();
        if constexpr (Format::has_offset) offsets = load_offsets<Format>(block, run, first);
        add_rows<0, kFirst>(weights, scales, offsets, counters, x, acc);
        if constexpr (kSecond > 0) add_rows<kFirst, kSecond>(weights, scales, offsets, counters, x, acc);
    }

    template <int First, int Count>
    QUIRE_INLINE static void add_rows(const int8x16_t (&weights)[8], float32x4_t scales, float32x4_t offsets,
                                      const float (&counters)[4], const QuantizedGroup* x, float32x4_t (&acc)[Rows]) {
        int32x4_t dots[Count];
        QUIRE_UNROLL
        for (int half = 0; half < 2; ++half) {
            QUIRE_UNROLL
            for (int i = 0; i < Count; ++i) {
                if (half == 0) dots[i] = Unit::start();
                add_quads(dots[i], weights + 4 * half, load_here<int8x16_t>(x[First + i].codes + 16 * half));
            }
        }
        constexpr int kLater = 2;  // rows between a term and its addition: as long as it takes to compute
        float32x4_t factors[Count], terms[Count];  // factors: scale, then sum
        QUIRE_UNROLL
        for (int i = 0; i < Count + kLater; ++i) {
            if (i < Count) {
                terms[i] = load_here<float32x4_t>(counters);
                add_product(terms[i], vreinterpretq_f32_s32(dots[i]), scales);
                factors[i] = load_here<float32x4_t>(&x[First + i].scale);
                if constexpr (Format::has_offset) add_product<1>(acc[First + i], offsets, factors[i]);
            }
            if (i >= kLater) add_product<0>(acc[First + i - kLater], terms[i - kLater], factors[i - kLater]);
        }
    }
};

template <class Format, int Rows>
struct FewOrSeveral : SeveralRows<Format, Rows> {};
template <class Format>
struct FewOrSeveral<Format, 1> : FewRows<Format, 1> {};
template <class Format>
struct FewOrSeveral<Format, 2> : FewRows<Format, 2> {};
template <class Format>
struct FewOrSeveral<Format, 3> : FewRows<Format, 3> {};
template <class Format>
struct FewOrSeveral<Format, 4> : FewRows<Format, 4> {};

template <ScaleType Scale, bool Offset, int Zero, Codebook Book, int Rows>
struct TileProduct<IntFormat<4, 32, Scale, Offset, Zero, Book>, Rows>
    : FewOrSeveral<IntFormat<4, 32, Scale, Offset, Zero, Book>, Rows> {};

template <ScaleType Scale, bool Offset, int Zero, Codebook Book>
constexpr int kMaxTileRows<IntFormat<4, 32, Scale, Offset, Zero, Book>> = 12;

}  // namespace
}  // namespace quire::QUIRE_ISA
