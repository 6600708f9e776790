// Many rows with NEON dot products: a panel of tiles is unpacked once, and then multiplied with block after block of
// rows.
//
// The two vector pipes of a core limit this matmul, so the inner loop leaves them only dot products and, for every sum
// of a group, three multiply-adds. Loads do the rest: dot products start from a loaded constant, and the addend that
// replaces their conversion to float is loaded too.
//
// An unpacked tile is 4 strips of 4 outputs. A strip is a sequence of groups:
//   quants   [group / 4][4][4]  int8: 4 consecutive inputs for each of 4 outputs
//   scales   [4]                fp32
//   magics   [4]                fp32, -kMagic * scale
//   offsets  [4]                fp32, if there are any
#pragma once

#include "matrix_neon.h"
#include "matrix_tiles.h"
#include "matrix_vector.h"

namespace quire::QUIRE_ISA {
namespace {

// Splits 16 bytes of two nibbles into 32 bytes, in integer registers: the integer pipes are idle here, and a vector
// store takes a vector pipe.
QUIRE_INLINE void split_nibbles(const uint8_t* from, uint8_t* low, uint8_t* high) {
    uint64_t a, b, c, d;
    __asm__ volatile(
        "ldp %0, %1, [%4]\n\t"
        "and %2, %0, #0x0f0f0f0f0f0f0f0f\n\t"
        "and %3, %1, #0x0f0f0f0f0f0f0f0f\n\t"
        "stp %2, %3, [%5]\n\t"
        "and %0, %7, %0, lsr #4\n\t"
        "and %1, %7, %1, lsr #4\n\t"
        "stp %0, %1, [%6]"
        : "=&r"(a), "=&r"(b), "=&r"(c), "=&r"(d)
        : "r"(from), "r"(low), "r"(high), "r"(0x0f0f0f0f0f0f0f0f)
        : "memory");
}

template <int Group, bool Offset>
struct Strip {
    static constexpr int width = 4;  // outputs
    static constexpr int scales_at = 4 * Group, magics_at = scales_at + 16, offsets_at = magics_at + 16;
    static constexpr int group_bytes = Offset ? offsets_at + 16 : offsets_at;
    static constexpr int parts = kGroupInputs / Group;  // groups of weights in a group of activations

    // acc[r] += group . x[r]: the dot products of all rows, then all multiply-adds, as every switch between the two
    // costs some cycles. unpack_next(0), unpack_next(1), ... are called between the first dot products.
    template <int Rows, class UnpackNext>
    QUIRE_INLINE static void add_group(const uint8_t* group, const QuantizedGroup* x, int part,
                                       float32x4_t (&acc)[Rows], const UnpackNext& unpack_next) {
        int32x4_t dots[Rows];
        QUIRE_UNROLL
        for (int half = 0; half < Group / 16; ++half) {
            int8x16_t weights[4];
            QUIRE_UNROLL
            for (int q = 0; q < 4; ++q) weights[q] = load_here<int8x16_t>(group + 64 * half + 16 * q);
            QUIRE_UNROLL
            for (int r = 0; r < Rows; ++r) {
                if (half == 0) dots[r] = Simd::start();
                add_quads(dots[r], weights, load_here<int8x16_t>(x[r].quants + part * Group + 16 * half));
                if (half == 0 && r % 2) unpack_next(r / 2);
            }
        }
        constexpr int kDelay = 3;  // rows between a term and its addition, to hide its latency
        const auto scales = load_here<float32x4_t>(group + scales_at);
        const auto offsets = load_here<float32x4_t>(group + (Offset ? offsets_at : scales_at));
        float32x4_t factors[Rows], terms[Rows];  // factors: scale, sum and the two half sums of a row
        QUIRE_UNROLL
        for (int r = 0; r < Rows + kDelay; ++r) {
            if (r < Rows) {
                terms[r] = load_here<float32x4_t>(group + magics_at);
                fmla(terms[r], vreinterpretq_f32_s32(dots[r]), scales);
                factors[r] = load_here<float32x4_t>(&x[r].scale);
                if constexpr (Offset && parts == 1) fmla<1>(acc[r], offsets, factors[r]);
                if constexpr (Offset && parts == 2) {
                    if (part == 0)
                        fmla<2>(acc[r], offsets, factors[r]);
                    else
                        fmla<3>(acc[r], offsets, factors[r]);
                }
            }
            if (r >= kDelay) fmla<0>(acc[r - kDelay], terms[r - kDelay], factors[r - kDelay]);
        }
    }

    // out[r, o] for Rows rows and the 4 outputs of a strip. Accumulators and dot products of 12 rows, 4 vectors of
    // weights and the activations of a row fill the registers.
    template <int Rows, class UnpackNext>
    QUIRE_INLINE static void multiply(const uint8_t* group, const Block& block, int64_t num_groups, float* out,
                                      int64_t out_stride, const UnpackNext& unpack_next) {
        const QuantizedGroup* x = block.groups;
        float32x4_t acc[Rows];
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) acc[r] = vdupq_n_f32(0);
        for (const QuantizedGroup* end = x + num_groups * block.group_stride; x != end; x += block.group_stride) {
            QUIRE_UNROLL
            for (int part = 0; part < parts; ++part, group += group_bytes) add_group(group, x, part, acc, unpack_next);
        }
        QUIRE_UNROLL
        for (int r = 0; r < Rows; ++r) vst1q_f32(out + r * out_stride, acc[r]);
    }
};

// Tiles that are unpacked into strips. All formats of a group size share these kernels.
template <int Group, bool Offset>
struct StripTiles {
    using Strips = Strip<Group, Offset>;
    static constexpr int max_rows = kRowBlock;

    static int64_t strip_bytes(int64_t num_inputs) { return num_inputs / Group * Strips::group_bytes; }
    static int64_t tile_bytes(const PackedMatrix& w) {
        return kTileOutputs / Strips::width * strip_bytes(w.num_inputs);
    }

    template <int Rows>
    __attribute__((noinline)) static void multiply(const uint8_t* tile, const Block& a, int64_t num_inputs, float* out,
                                                   int64_t out_stride) {
        for (int s = 0; s < kTileOutputs / Strips::width; ++s)
            Strips::template multiply<Rows>(tile + s * strip_bytes(num_inputs), a, num_inputs / kGroupInputs,
                                            out + s * Strips::width, out_stride, [](int) {});
    }
};

// Tiles of an integer layout.
template <class Format>
struct Unpacked : StripTiles<Format::group, Format::has_offset> {
    using Tiles = StripTiles<Format::group, Format::has_offset>;
    using Strips = typename Tiles::Strips;
    using Tiles::strip_bytes, Tiles::tile_bytes;

    static const uint8_t* load_tiles(const PackedMatrix& w, int64_t first_tile, int64_t last_tile, uint8_t* panel) {
        uint8_t* to = panel;
        for (int64_t t = first_tile; t < last_tile; ++t, to += tile_bytes(w)) {
            GroupCursor<Format> from{w.data + t * w.tile_bytes()};
            for (int64_t g = 0; g < w.num_inputs / Format::group; ++g, from.advance())
                for (int s = 0; s < kTileOutputs / Strips::width; ++s)
                    unpack(from, s * Strips::width, to + s * strip_bytes(w.num_inputs) + g * Strips::group_bytes);
        }
        return panel;
    }

    // A group is unpacked in pieces: four quarters of its quantized values, and then the scales.
    static constexpr int kPieces = 5;
    QUIRE_INLINE static void unpack(GroupCursor<Format> from, int output, uint8_t* to, int piece) {
        constexpr bool kPlainNibbles = Format::bits == 4 && Format::zero == 0 && !Format::has_codebook;
        if (piece < 4 && kPlainNibbles) {
            const uint8_t* quants = Format::quants(from.block, from.group) + 4 * output;
            return split_nibbles(quants + piece * 4 * kTileOutputs, to + 16 * piece, to + 64 + 16 * piece);
        }
        if (piece < 4) {
            for (int q = piece; q < Format::group / 4; q += 4)
                vst1q_s8((int8_t*)to + 16 * q, unpack_quad(from, q, output));
            return;
        }
        const float32x4_t scales = load_scales<Format>(from.block, from.group, output);
        vst1q_f32((float*)(to + Strips::scales_at), scales);
        vst1q_f32((float*)(to + Strips::magics_at), vmulq_n_f32(scales, -Simd::kMagic));
        if constexpr (Format::has_offset)
            vst1q_f32((float*)(to + Strips::offsets_at), load_offsets<Format>(from.block, from.group, output));
    }
    QUIRE_INLINE static void unpack(GroupCursor<Format> from, int output, uint8_t* to) {
        QUIRE_UNROLL
        for (int piece = 0; piece < kPieces; ++piece) unpack(from, output, to, piece);
    }

    // The same with a packed tile, which is unpacked into `tile` meanwhile. While a group is multiplied, the next one
    // is unpacked, and a part of the next tile is prefetched.
    template <int Rows>
    __attribute__((noinline)) static void unpack_and_multiply(const uint8_t* packed, uint8_t* tile, const Block& a,
                                                              int64_t num_inputs, float* out, int64_t out_stride) {
        constexpr int kStrips = kTileOutputs / Strips::width, kGroupBytes = Format::block_bytes / Format::block_groups,
                      kLines = (kGroupBytes + 63) / 64;
        const int64_t packed_bytes = num_inputs / Format::group * kGroupBytes;
        for (int s = 0; s < kStrips; ++s) {
            GroupCursor<Format> from{packed};
            uint8_t *to = tile + s * strip_bytes(num_inputs), *const last =
                                                                  to + strip_bytes(num_inputs) - Strips::group_bytes;
            unpack(from, s * Strips::width, to);
            const auto unpack_next = [&](int piece) {
                if (piece == 0 && to != last) from.advance(), to += Strips::group_bytes;
                if (piece < kPieces) unpack(from, s * Strips::width, to, piece);  // the last group is unpacked again
                if (piece < kPieces) return;
                const uint8_t* next_tile = from.block + from.group * kGroupBytes + packed_bytes;
                for (int line = s; line < kLines; line += kStrips) __builtin_prefetch(next_tile + 64 * line);
                __asm__ volatile("" ::: "memory");  // the store must precede the load
            };
            Strips::template multiply<Rows>(tile + s * strip_bytes(num_inputs), a, num_inputs / kGroupInputs,
                                            out + s * Strips::width, out_stride, unpack_next);
        }
    }
};

template <class Format>
constexpr bool kUnpacksWhileMultiplying<Unpacked<Format>> = true;
template <Layout Element>
constexpr bool kUnpacksWhileMultiplying<Unpacked<FloatFormat<Element>>> = false;

}  // namespace
}  // namespace quire::QUIRE_ISA
