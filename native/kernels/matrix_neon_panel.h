// Many rows with NEON dot products: a panel of tiles is unpacked once, then multiplied with block after block of rows.
//
// The two vector pipes of a core are what limits this product, so the inner loop leaves them nothing but dot products
// and, for every sum of a group, three multiply-adds. All else is done by the load units: dot products start from a
// loaded constant, and the addend that stands for their conversion to floats is loaded as well.
//
// An unpacked tile is 4 strips of 4 outputs. A strip is a sequence of groups:
//   codes     [group / 4][4][4]  int8: codes of 4 neighbouring inputs, for each of 4 outputs
//   scales    [4]                fp32
//   counters  [4]                fp32, -kCounter * scale
//   offsets   [4]                fp32, where there are any
#pragma once

#include "matrix_neon.h"
#include "matrix_tiles.h"
#include "matrix_vector.h"

namespace quire::QUIRE_ISA {
namespace {

template <int Group, bool Offset>
struct Strip {
    static constexpr int width = 4;  // outputs
    static constexpr int scales_at = 4 * Group, counters_at = scales_at + 16, offsets_at = counters_at + 16;
    static constexpr int group_bytes = Offset ? offsets_at + 16 : offsets_at;
    static constexpr int parts = kGroupInputs / Group;  // groups of weights in a group of activations

    // acc[r] += group . x[r]: the dot products of all rows, then all multiply-adds, as every change between the two
    // costs the pipes some turns.
    template <int Rows>
    QUIRE_INLINE static void add_group(const uint8_t* group, const QuantizedGroup* x, int part,
                                       float32x4_t (&acc)[Rows]) {
        int32x4_t dots[Rows];
        QUIRE_UNROLL
        for (int half = 0; half < Group / 16; ++half) {
            int8x16_t weights[4];
            QUIRE_UNROLL
            for (int q = 0; q < 4; ++q) weights[q] = load_here<int8x16_t>(group + 64 * half + 16 * q);
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) {
                if (half == 0) dots[r] = Unit::start();
                add_quads(dots[r], weights, load_here<int8x16_t>(x[r].codes + part * Group + 16 * half));
            }
        }
        constexpr int kLater = 3;  // rows between a term and its addition: as long as it takes to compute
        const auto scales = load_here<float32x4_t>(group + scales_at);
        const auto offsets = load_here<float32x4_t>(group + (Offset ? offsets_at : scales_at));
        float32x4_t factors[Rows], terms[Rows];  // factors: scale, sum and the two half sums of a row
        QUIRE_UNROLL
        for (int r = 0; r < Rows + kLater; ++r) {
            if (r < Rows) {
                terms[r] = load_here<float32x4_t>(group + counters_at);
                add_product(terms[r], vreinterpretq_f32_s32(dots[r]), scales);
                factors[r] = load_here<float32x4_t>(&x[r].scale);
                if constexpr (Offset && parts == 1) add_product<1>(acc[r], offsets, factors[r]);
                if constexpr (Offset && parts == 2) {
                    if (part == 0)
                        add_product<2>(acc[r], offsets, factors[r]);
                    else
                        add_product<3>(acc[r], offsets, factors[r]);
                }
            }
            if (r >= kLater) add_product<0>(acc[r - kLater], terms[r - kLater], factors[r - kLater]);
        }
    }

    // The order of these instructions is what makes the loop fast, so they stay where they are written.
    // dot += 16 inputs: w[q] has input quad q of 4 outputs, x the codes of 4 quads, picked from by lane.
    QUIRE_INLINE static void add_quads(int32x4_t& dot, const int8x16_t (&w)[4], int8x16_t x) {
        __asm__ volatile(
            "sdot %0.4s, %1.16b, %5.4b[0]\n\t"
            "sdot %0.4s, %2.16b, %5.4b[1]\n\t"
            "sdot %0.4s, %3.16b, %5.4b[2]\n\t"
            "sdot %0.4s, %4.16b, %5.4b[3]"
            : "+&w"(dot)
            : "w"(w[0]), "w"(w[1]), "w"(w[2]), "w"(w[3]), "w"(x));
    }
    template <int Lane>
    QUIRE_INLINE static void add_product(float32x4_t& sum, float32x4_t w, float32x4_t x) {  // += w * x[Lane]
        __asm__ volatile("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(w), "w"(x), "i"(Lane));
    }
    QUIRE_INLINE static void add_product(float32x4_t& sum, float32x4_t x, float32x4_t y) {  // += x * y
        __asm__ volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(x), "w"(y));
    }

    // out[r, o] for Rows rows and the 4 outputs of a strip. Sums and dot products of 12 rows, 4 vectors of weights
    // and the codes of a row are what the registers hold.
    template <int Rows>
    QUIRE_INLINE static void multiply(const uint8_t* group, const Block& block, int64_t num_groups, float* out,
                                      int64_t out_stride) {
        const QuantizedGroup* x = block.groups;
        float32x4_t acc[Rows];
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) acc[r] = vdupq_n_f32(0);
        for (const QuantizedGroup* end = x + num_groups * block.group_stride; x != end; x += block.group_stride) {
            QUIRE_UNROLL
            for (int part = 0; part < parts; ++part, group += group_bytes) add_group(group, x, part, acc);
        }
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) vst1q_f32(out + r * out_stride, acc[r]);
    }
};

// Tiles of an integer layout, unpacked into strips.
template <class Format>
struct Unpacked {
    using Strips = Strip<Format::group, Format::has_offset>;
    static constexpr int max_rows = kRowBlock;

    static int64_t strip_bytes(int64_t num_inputs) { return num_inputs / Format::group * Strips::group_bytes; }
    static int64_t tile_bytes(const PackedMatrix& w) {
        return kTileOutputs / Strips::width * strip_bytes(w.num_inputs);
    }

    static const uint8_t* take(const PackedMatrix& w, int64_t first_tile, int64_t last_tile, uint8_t* panel) {
        uint8_t* to = panel;
        for (int64_t t = first_tile; t < last_tile; ++t, to += tile_bytes(w)) {
            const uint8_t* group = w.data + t * w.tile_bytes();
            for (int64_t g = 0; g < w.num_inputs / Format::group; ++g, group += Format::group_bytes)
                for (int s = 0; s < kTileOutputs / Strips::width; ++s)
                    unpack(group, s * Strips::width, to + s * strip_bytes(w.num_inputs) + g * Strips::group_bytes);
        }
        return panel;
    }

    QUIRE_INLINE static void unpack(const uint8_t* group, int output, uint8_t* to) {
        for (int q = 0; q < Format::group / 4; ++q)
            vst1q_s8((int8_t*)to + 16 * q, unpack_quad<Format>(group, q, output));
        const float32x4_t scales = load_scales<Format::scale_type>(group, output);
        vst1q_f32((float*)(to + Strips::scales_at), scales);
        vst1q_f32((float*)(to + Strips::counters_at), vmulq_n_f32(scales, -Unit::kCounter));
        if constexpr (Format::has_offset)
            vst1q_f32((float*)(to + Strips::offsets_at), load_offsets<Format>(group, output));
    }

    template <int Rows>
    __attribute__((noinline)) static void multiply(const uint8_t* tile, const Block& a, int64_t num_inputs, float* out,
                                                   int64_t out_stride) {
        for (int s = 0; s < kTileOutputs / Strips::width; ++s)
            Strips::template multiply<Rows>(tile + s * strip_bytes(num_inputs), a, num_inputs / kGroupInputs,
                                            out + s * Strips::width, out_stride);
    }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
