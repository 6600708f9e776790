#include "outliers.h"

#include <algorithm>
#include <cmath>

namespace quire {

namespace {

// An int and no early exit, so that compilers vectorize the loop.
bool reaches(const float* x, int64_t n, float threshold) {
    int any = 0;
    for (int64_t k = 0; k < n; ++k) any |= std::fabs(x[k]) >= threshold;
    return any;
}

}  // namespace

void Outliers::reserve(int64_t max_rows, int64_t num_inputs, int num_threads) {
    max_inputs_ = std::max(max_inputs_, num_inputs);
    counts_.reserve(max_rows);
    masks_.reserve(max_rows * (num_inputs / kGroupInputs));
    rest_.reserve(num_threads * max_inputs_);
    columns_.reserve(num_threads * max_inputs_);
    values_.reserve(num_threads * max_inputs_);
}

const float* Outliers::without(const float* x, int64_t num_inputs, float threshold, int64_t row, int thread) {
    int32_t& count = counts_.get()[row] = 0;
    if (threshold == 0 || !reaches(x, num_inputs, threshold)) return x;
    float* rest = rest_.get() + thread * max_inputs_;
    uint32_t* masks = masks_.get() + row * (num_inputs / kGroupInputs);
    std::copy_n(x, num_inputs, rest);
    for (int64_t g = 0; g < num_inputs / kGroupInputs; ++g) {
        masks[g] = 0;
        if (!reaches(x + g * kGroupInputs, kGroupInputs, threshold)) continue;
        for (int i = 0; i < kGroupInputs; ++i) {
            float& value = rest[g * kGroupInputs + i];
            if (!(std::fabs(value) >= threshold)) continue;
            masks[g] |= 1u << i;
            value = 0;
            ++count;
        }
    }
    return rest;
}

bool Outliers::any(int64_t first, int64_t last) const {
    return std::any_of(counts_.get() + first, counts_.get() + last, [](int32_t count) { return count > 0; });
}

void Outliers::add(const PackedMatrix& w, const float* x, int64_t stride, int64_t first_row, int64_t num_rows,
                   float* out, int64_t out_stride, const ThreadPool& pool) const {
    const auto [first_tile, last_tile] = pool.share(w.num_tiles());
    int32_t* columns = columns_.get() + pool.thread * max_inputs_;
    float* values = values_.get() + pool.thread * max_inputs_;
    for (int64_t first = 0, last; first < num_rows; first = last) {
        int64_t num_outliers = 0;
        for (last = first; last < num_rows && num_outliers + counts_.get()[first_row + last] <= max_inputs_; ++last)
            num_outliers +=
                list(first_row + last, w.num_inputs, x + last * stride, columns + num_outliers, values + num_outliers);
        // Rows often have outliers in the same columns: with few tiles at a time, those columns are still in the cache.
        constexpr int64_t kTilesAtOnce = 16;
        for (int64_t tile = first_tile; tile < last_tile; tile += kTilesAtOnce) {
            const int64_t end = std::min(tile + kTilesAtOnce, last_tile);
            for (int64_t r = first, at = 0; r < last; at += counts_.get()[first_row + r], ++r)
                kernels().matrix.add_columns(w, columns + at, values + at, counts_.get()[first_row + r], tile, end,
                                             out + r * out_stride);
        }
    }
}

int64_t Outliers::list(int64_t row, int64_t num_inputs, const float* x, int32_t* columns, float* values) const {
    const int64_t num_groups = num_inputs / kGroupInputs;
    const uint32_t* masks = masks_.get() + row * num_groups;
    int64_t count = 0;
    for (int64_t g = 0; count < counts_.get()[row]; ++g)
        for (uint32_t left = masks[g]; left; left &= left - 1, ++count) {
            columns[count] = int32_t(g * kGroupInputs + __builtin_ctz(left));
            values[count] = x[columns[count]];
        }
    return count;
}

}  // namespace quire
