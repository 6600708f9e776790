// LoRA: y += scale * B (A x), for the rows that have an adapter.
//
// The rows of a step are sorted by adapter once. All threads together then multiply each adapter's matrices with its
// own rows. A row's result has the bits of a matmul of that row alone, so it does not depend on the rest of the batch.
// Sums are fp32, whatever type the matrices are stored in.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "moe.h"
#include "thread_pool.h"

namespace quire {

// One adapter's delta of consecutive outputs of a linear layer.
struct LoraPart {
    PackedMatrix b;  // [outputs, rank]
    int64_t first_output;
    int64_t first_hidden;  // the first of `rank` rows of A
    float scale;
};

// One adapter's delta of a linear layer. Without parts, it is zero.
struct LoraAdapter {
    PackedMatrix a;  // [hidden, inputs]: the A matrices of all parts, stacked
    std::vector<LoraPart> parts;
};

// The adapters of one linear layer, by slot. They change only between steps, and must outlive their time in a slot.
class AdapterSlots {
 public:
    AdapterSlots(int64_t num_inputs, int64_t num_outputs, int64_t num_slots, int64_t max_hidden, int64_t max_parts);

    // Throws std::invalid_argument if shapes do not fit the layer.
    void put(int64_t slot, LoraAdapter adapter);

    const LoraAdapter& at(int64_t slot) const { return slots_[slot]; }
    int64_t num_slots() const { return int64_t(slots_.size()); }

    const int64_t num_inputs, num_outputs;
    const int64_t max_hidden, max_parts;  // of one adapter: rows of A, and parts

 private:
    std::vector<LoraAdapter> slots_;
};

// Buffers and arithmetic. One object serves all layers of a tape, one after the other.
class LoraRunner {
 public:
    void reserve(const AdapterSlots& slots, int64_t max_rows, int num_threads);

    // Called before a step. `adapters` [num_tokens]: the slot of each token, or -1. Null: no token has an adapter.
    void begin(const int32_t* adapters, int64_t num_tokens, const int32_t* logit_rows, int64_t num_logits);

    // y[r] += the delta of r's adapter. Rows are tokens or, if `logits_only`, rows of logits. All threads of the pool
    // call this at once, after a barrier. A thread writes its share of the rows of y after all threads have read x.
    void run(const AdapterSlots& slots, Rows x, Rows y, bool logits_only, const ThreadPool& pool, uint8_t* panel);

 private:
    // The rows of a step, sorted by slot.
    struct Order {
        std::vector<int32_t> rows;        // [adapted rows]
        std::vector<int32_t> positions;   // [num_rows] the index of a row in `rows`, or -1
        std::vector<int64_t> first;       // [num_slots + 1] where the rows of a slot begin
        std::vector<uint8_t> contiguous;  // [num_slots] whether its rows are consecutive

        template <class SlotOf>
        void sort(int64_t num_rows, int64_t num_slots, const SlotOf& slot_of);
        int64_t count(int64_t slot) const { return first[slot + 1] - first[slot]; }
    };

    Order token_order_, logit_order_;
    int64_t num_slots_ = 0, num_threads_ = 1;
    Buffer<float> gathered_;                      // [adapted rows, inputs]
    Buffer<float> hidden_;                        // [adapted rows, max_hidden]
    Buffer<float> deltas_;                        // [adapted rows, outputs]
    std::vector<std::atomic<int64_t>> counters_;  // Worker::taken of every matmul; 0 between ops
};

}  // namespace quire
