// Outliers (LLM.int8): activations whose magnitude reaches the threshold of a matrix. In 8 bits, they would cost
// themselves and their neighbours precision.
//
// Each row has its own outliers. They count as zeros when the row is quantized; their products are added afterwards in
// fp32, input by input. So the other rows of a batch change no result.
#pragma once

#include <cstdint>

#include "buffer.h"
#include "kernels.h"
#include "thread_pool.h"

namespace quire {

// Buffers and arithmetic. One object serves all matmuls of a tape, one after the other.
class Outliers {
 public:
    // For matmuls of at most `max_rows` rows.
    void reserve(int64_t max_rows, int64_t num_inputs, int num_threads);

    // x [num_inputs] with zeros for its outliers: x itself if it has none, else a copy that is valid until the thread's
    // next call. Stores which inputs they are as the outliers of `row`. With a threshold of 0 there are none.
    const float* without(const float* x, int64_t num_inputs, float threshold, int64_t row, int thread);

    // Whether one of the rows [first, last) has outliers.
    bool any(int64_t first, int64_t last) const;

    // out[r] += the outliers of row first_row + r, whose inputs are x[r], times their columns. All threads of the pool
    // call this at once; each writes its share of the outputs.
    void add(const PackedMatrix& w, const float* x, int64_t stride, int64_t first_row, int64_t num_rows, float* out,
             int64_t out_stride, const ThreadPool& pool) const;

 private:
    // Lists the outliers of a row, whose inputs are x. Returns their number.
    int64_t list(int64_t row, int64_t num_inputs, const float* x, int32_t* columns, float* values) const;

    int64_t max_inputs_ = 0;
    Buffer<int32_t> counts_;   // [rows] the number of outliers
    Buffer<uint32_t> masks_;   // [rows, groups] a bit for each input; only of rows that have outliers
    Buffer<float> rest_;       // [threads, inputs] a row without its outliers
    Buffer<int32_t> columns_;  // [threads, inputs] the outliers of some rows, one after the other
    Buffer<float> values_;     // [threads, inputs] their values
};

}  // namespace quire
