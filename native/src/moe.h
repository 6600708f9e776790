// Mixture of experts (MoE).
//
// A route is the pair of a row and one of its top_k experts: route r * top_k + j. Routes are sorted by expert, and each
// expert's matrices are multiplied with its own routes. A route's result has the bits of a matmul of that row alone, so
// it does not depend on the other routes of the expert.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "outliers.h"
#include "rank_group.h"
#include "routing.h"
#include "thread_pool.h"

namespace quire {

using Segments = std::vector<PackedMatrix>;  // one matrix, as segments stacked along the outputs

struct Experts {
    std::vector<Segments> matrices;  // [count], all of one shape: of experts first .. first + count
    const float* biases;             // [count, num_outputs], or null
    int64_t first;                   // 0, unless other ranks have the experts before
    int64_t num_inputs = 0, num_outputs = 0;
    bool have_threshold = false;  // some of the matrices have an outlier threshold

    // The segments of one expert share one input order, and its integer segments share one threshold.
    Experts(std::vector<Segments> matrices, const float* biases, int64_t first);

    int64_t count() const { return int64_t(matrices.size()); }
};

// Rows of a buffer that is not owned: row r starts at base[(index ? index[r] : r) * stride].
struct Rows {
    float* base;
    int64_t stride;
    const int32_t* index;

    float* at(int64_t r) const { return base + (index ? index[r] : r) * stride; }
};

// What ranks have in common of all routes: each writes its part, and reads all. A rank has columns of the hidden
// values, where experts are divided by their outputs, or the outputs of its own experts.
struct SharedRoutes {
    float* hidden;         // [routes, down.num_inputs], or null: `gate_up` gives all columns
    int64_t first_hidden;  // the first column of `gate_up`
    float* outputs;        // [routes, down.num_outputs], or null: all experts are here
    RankGroup* group;
};

// Buffers and arithmetic. One object serves all MoE layers of a tape, one after the other.
class MoeRunner {
 public:
    // For layers of at most `max_rows` rows.
    void reserve(const Routing& routing, const Experts& gate_up, const Experts& down, int64_t max_rows,
                 int num_threads);

    // out[r] = sum over j of weight[r, j] * down(activate_and_mul(gate_up(x[r]))), or of down(activate(gate_up(x[r])))
    // where gate_up has as many outputs as down has inputs, of expert ids[r, j], in the order of j. Where the routing
    // weighs inputs, x[r] is multiplied by weight[r, j], and not the output. An expert that passes on its input gives
    // x[r]. All threads of the pool call this at once.
    // A thread reads its own rows of x and logits, then (after a barrier) other rows of x, and (after another barrier)
    // writes its own rows of out.
    // `chosen`: the experts of each row, see select_experts; or without a base.
    void run(const Routing& routing, const Experts& gate_up, const Experts& down, Activation activation, Rows x,
             Rows logits, Rows chosen, Rows out, int64_t num_rows, const ThreadPool& pool, uint8_t* panel,
             const SharedRoutes& shared);

 private:
    // The inputs of one matmul, in the forms that the layouts read.
    struct Prepared {
        Buffer<float> floats;
        Buffer<QuantizedGroup> groups;
        Buffer<Fp16Group> fp16;
    };

    void sort_routes(const Routing& routing, int64_t num_rows);
    void activate(const Routing& routing, Activation activation, float* hidden, int64_t num_outputs, float* out) const;
    Range own_routes(const Experts& experts, const ThreadPool& pool) const;
    void prepare(const Experts& experts, int64_t position, const float* row, int thread);
    void add_bias(const Experts& experts, int64_t position, float* row) const;
    void multiply(const Experts& experts, float* out, std::atomic<int64_t>* counters, const ThreadPool& pool,
                  uint8_t* panel);

    Buffer<float> scratch_;               // routing_scratch for each thread
    Buffer<int32_t> ids_;                 // [routes] the expert
    Buffer<float> weights_;               // [routes]
    Buffer<int32_t> positions_, routes_;  // [routes] the index of a route when sorted by expert, and the inverse
    std::vector<int64_t> first_;          // [num_experts + 1] where the routes of an expert begin
    std::vector<int64_t> padded_;         // [num_experts] the same, with the rows of each expert padded to whole blocks
    std::vector<int64_t> next_;           // [num_experts] used while routes are sorted
    Prepared prepared_;
    Outliers outliers_;
    Buffer<float> reordered_;  // [threads, reordered_stride_] a row in the input order of an expert
    Buffer<float> weighed_;    // [threads, reordered_stride_] a row times its weight
    int64_t reordered_stride_ = 0;
    Buffer<float> hidden_;                        // [routes, 2 * inner]
    Buffer<float> expert_outputs_;                // [routes, columns]
    std::vector<std::atomic<int64_t>> counters_;  // Worker::taken of every matmul
};

}  // namespace quire
