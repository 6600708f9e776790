// Activations that the threshold of a matrix sets apart: in 8 bits they would be rounded, and for their sake so would
// their neighbours.
//
// They are found in each row by itself. Where a row is quantized its outliers count as zeros; what they add to its
// results is added afterwards in fp32, input by input. So nobody else in a batch changes a result.
#pragma once

#include <cstdint>

#include "buffer.h"
#include "kernels.h"
#include "thread_pool.h"

namespace quire {

// Memory for the product under way, and its arithmetic. One object serves all products of a tape, one after the other.
class Outliers {
 public:
    // For products of at most `max_rows` rows.
    void reserve(int64_t max_rows, int64_t num_inputs, int num_threads);

    // x [num_inputs] with zeros for its outliers: itself where it has none, else a copy that lasts until the thread's
    // next call. Which they are is noted as those of `row`. A threshold of 0: it has none.
    const float* without(const float* x, int64_t num_inputs, float threshold, int64_t row, int thread);

    // Whether one of the rows [0, num_rows) has any.
    bool any(int64_t num_rows) const;

    // out[r] += the outliers of row first_row + r, whose inputs are x[r], times their columns. Called by all threads of
    // the team at once; each writes its share of the outputs.
    void add(const PackedMatrix& w, const float* x, int64_t stride, int64_t first_row, int64_t num_rows, float* out,
             int64_t out_stride, const Team& team) const;

 private:
    // Those of a row, whose inputs are x. Returns how many they are.
    int64_t list(int64_t row, int64_t num_inputs, const float* x, int32_t* columns, float* values) const;

    int64_t max_inputs_ = 0;
    Buffer<int32_t> counts_;   // [rows] how many they are
    Buffer<uint32_t> masks_;   // [rows, groups], of rows that have any: a bit for each input
    Buffer<float> rest_;       // [threads, inputs] a row without them
    Buffer<int32_t> columns_;  // [threads, inputs] those of some rows, one after the other
    Buffer<float> values_;     // likewise
};

}  // namespace quire
