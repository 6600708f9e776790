// What adapters add to linear layers: y += scale * B (A x), for the rows that have an adapter.
//
// A step's rows are put in the order of their adapters, once; each adapter's matrices are then multiplied with its rows
// only, by all threads together. A row's results are those of a product of one row, so they do not depend on who else
// is there, or with which adapter. Sums are fp32 whatever the matrices are stored in.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "moe.h"
#include "thread_pool.h"

namespace quire {

// What one adapter adds to neighbouring outputs of a linear layer.
struct LowRankPart {
    PackedMatrix b;        // [outputs, rank]
    int64_t first_output;  // the first of the outputs
    int64_t first_hidden;  // the first of `rank` rows of A
    float scale;
};

// What one adapter adds to a linear layer; nothing, where there are no parts.
struct LowRank {
    PackedMatrix a;  // [hidden, inputs]: the parts' ones, one below the other
    std::vector<LowRankPart> parts;
};

// The adapters of one linear layer, by slot. They are exchanged between steps, and must outlive their stay.
class AdapterSlots {
 public:
    AdapterSlots(int64_t num_inputs, int64_t num_outputs, int64_t num_slots, int64_t max_hidden, int64_t max_parts);

    // Throws std::invalid_argument where shapes are not those of the layer.
    void put(int64_t slot, LowRank adapter);

    const LowRank& at(int64_t slot) const { return slots_[slot]; }
    int64_t num_slots() const { return int64_t(slots_.size()); }

    const int64_t num_inputs, num_outputs;
    const int64_t max_hidden, max_parts;  // of one adapter: rows of A, parts

 private:
    std::vector<LowRank> slots_;
};

// Memory for the layer under way, and its arithmetic. One object serves all layers of a tape, one after the other.
class LowRankRunner {
 public:
    void reserve(const AdapterSlots& slots, int64_t max_rows, int num_threads);

    // A step begins. `adapters` [num_tokens]: each token's slot, or below zero; null: nobody has one.
    void begin(const int32_t* adapters, int64_t num_tokens, const int32_t* logit_rows, int64_t num_logits);

    // y[r] += what r's adapter adds. Rows are tokens, or where `few`, rows of logits. Called by all threads of the team
    // at once, after a barrier; a thread writes its share of the rows of y, after all have read x.
    void run(const AdapterSlots& slots, Rows x, Rows y, bool few, const Team& team, uint8_t* panel);

 private:
    // The rows of a step by slot.
    struct Order {
        std::vector<int32_t> rows;        // [places]
        std::vector<int32_t> places;      // [num_rows] where a row stands, or -1
        std::vector<int64_t> first;       // [num_slots + 1] where a slot's rows begin
        std::vector<uint8_t> neighbours;  // [num_slots] whether its rows follow each other

        template <class SlotOf>
        void sort(int64_t num_rows, int64_t num_slots, const SlotOf& slot_of);
        int64_t count(int64_t slot) const { return first[slot + 1] - first[slot]; }
    };

    Order all_, few_;
    int64_t num_slots_ = 0, num_threads_ = 1;
    Buffer<float> gathered_;                      // [places, inputs]
    Buffer<float> hidden_;                        // [places, max_hidden]
    Buffer<float> added_;                         // [places, outputs]
    std::vector<std::atomic<int64_t>> counters_;  // Worker::taken of every product; 0 between ops
};

}  // namespace quire
