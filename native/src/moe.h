// A mixture of experts, computed by a team of threads.
//
// A route is one row's way through one expert: route r * top_k + j. Routes are put in the order of their experts, and
// each expert's matrices are multiplied with its routes only. A route's results are those of a product of one row, so
// they do not depend on who else goes to the same expert.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "outliers.h"
#include "routing.h"
#include "thread_pool.h"

namespace quire {

using Segments = std::vector<PackedMatrix>;  // of one matrix, stacked along the outputs

struct Experts {
    std::vector<Segments> matrices;  // [num_experts], all of one shape
    const float* biases;             // [num_experts, num_outputs], or null
    int64_t num_inputs = 0, num_outputs = 0;
    bool have_threshold = false;  // some of them

    // The segments of one expert have their inputs in one order, and those of integers one threshold.
    Experts(std::vector<Segments> matrices, const float* biases);
};

// Rows that somebody else keeps: row r starts at base[(index ? index[r] : r) * stride].
struct Rows {
    float* base;
    int64_t stride;
    const int32_t* index;

    float* at(int64_t r) const { return base + (index ? index[r] : r) * stride; }
};

// Memory for the mixture under way, and its arithmetic. One object serves all mixtures of a tape, one after the other.
class MixtureRunner {
 public:
    // For mixtures of at most `max_rows` rows.
    void reserve(const Routing& routing, const Experts& gate_up, const Experts& down, int64_t max_rows,
                 int num_threads);

    // out[r] = sum over j of weight[r, j] * down(activate_and_mul(gate_up(x[r]))) of expert ids[r, j], in the order of
    // j. Called by all threads of the team at once. A thread reads its share of the rows of x and logits, waits, reads
    // others, waits, and writes its share of the rows of out.
    void run(const Routing& routing, const Experts& gate_up, const Experts& down, Activation activation, Rows x,
             Rows logits, Rows out, int64_t num_rows, const Team& team, uint8_t* panel);

 private:
    // What is prepared of the rows of one product.
    struct Prepared {
        Buffer<float> floats;
        Buffer<QuantizedGroup> groups;
        Buffer<HalfGroup> halves;
    };

    void sort_routes(const Routing& routing, int64_t num_rows);
    void prepare(const Experts& experts, int64_t place, const float* row, int thread);
    void add_bias(const Experts& experts, int64_t place, float* row) const;
    void multiply(const Experts& experts, float* out, std::atomic<int64_t>* counters, const Team& team, uint8_t* panel);

    Buffer<float> scratch_;            // routing_scratch for each thread
    Buffer<int32_t> ids_;              // [routes] the expert
    Buffer<float> weights_;            // [routes]
    Buffer<int32_t> places_, routes_;  // [routes] where a route stands in the order of experts, and the inverse
    std::vector<int64_t> first_;       // [num_experts + 1] where an expert's routes begin
    std::vector<int64_t> padded_;      // [num_experts] the same where an expert's rows are whole blocks
    std::vector<int64_t> next_;        // [num_experts] while routes are sorted
    Prepared prepared_;
    Outliers outliers_;
    Buffer<float> reordered_;  // the inputs of a row for each thread, where an expert has them in an order of its own
    int64_t reordered_stride_ = 0;
    Buffer<float> hidden_;                        // [routes, 2 * inner]
    Buffer<float> parts_;                         // [routes, columns]
    std::vector<std::atomic<int64_t>> counters_;  // Worker::taken of every product
};

}  // namespace quire
