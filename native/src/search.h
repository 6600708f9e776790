// Scales of groups of weights that lose least, for writers of quantized checkpoints.
//
// Groups lie one behind the other, `size` values each: x, and how much an error of each counts (weights). Lanes of a
// vector are groups, and the sums of a group are taken value after value, each product rounded: every table, and the
// numpy code in quantize/search.py, gives the same bits. Values are finite.
#pragma once

#include <cstdint>

#include "ops.h"

namespace quire {

struct Groups {
    const float *x, *weights;  // [count, size] each
    int64_t count, size;
    float* scratch;  // group_scratch(size) floats, private to the thread
};

constexpr int64_t group_scratch(int64_t size) { return 3 * size * kMaxLanes; }

// The costs of half a vector: of at most 81 (3 ^ 4) and 64 (8 ^ 2) combinations of digits.
constexpr int64_t kMaxHalf = 81;
constexpr int64_t kGridScratch = 2 * kMaxHalf * kMaxLanes;

// Vectors of digits: entry i is the halves with the numbers halves[2 * i] and halves[2 * i + 1], whose digits are of
// base `base`, the first the least significant. Digit k stands for values[k].
struct DigitGrid {
    const float* values;
    const uint8_t* halves;
    int base, num_entries;
};

struct SearchKernels {
    // x is about scale * q, q in -levels .. levels - 1. Each factor tries q = round(x * factor / largest x), where the
    // scale is refitted by weighted least squares.
    void (*symmetric)(const Groups& groups, const float* factors, int num_factors, int levels, float* scales);
    // x is about scale * q + offset, q in 0 .. levels; offset <= 0 unless `free`. Each factor tries q = round((x - low)
    // * factor / (high - low)); the scale and offset of the first are not refitted.
    void (*offset)(const Groups& groups, const float* factors, int num_factors, int levels, bool free, float* scales,
                   float* offsets);
    // x is about scale * (q - zero), q in 0 .. levels: the best of the scales shrink * widest, rounded to fp16.
    void (*shrunk)(const Groups& groups, const float* widest, const float* zeros, const float* shrinks, int num_shrinks,
                   int levels, float* scales);
    // x is about scale * an entry of a codebook of 16 in ascending order. Each factor tries the entries nearest to
    // x * factor / largest x.
    void (*codebook)(const Groups& groups, const float* factors, int num_factors, const float* book, float* scales);
    // The entry of the grid that is nearest to each group, whose size is that of its vectors.
    void (*nearest)(const Groups& groups, const DigitGrid& grid, int32_t* entries);
};

}  // namespace quire
