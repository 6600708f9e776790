// Recurrent states, in slots: see StateSpec in ops/kv_spec.py.
#pragma once

#include <cstdint>

#include "ops.h"

namespace quire {

// A slot has, for every layer, the last inputs of its convolution [conv_rows, conv_channels], the oldest first, and
// what its recurrence keeps: `size` floats. Both begin at whole vectors.
struct States {
    float* data = nullptr;
    int64_t num_slots = 0, num_layers = 0, conv_rows = 0, conv_channels = 0, size = 0;

    int64_t conv_floats() const { return whole_vectors(conv_rows * conv_channels); }
    int64_t layer_floats() const { return conv_floats() + whole_vectors(size); }
    int64_t slot_floats() const { return num_layers * layer_floats(); }
    float* conv(int64_t slot, int64_t layer) const { return data + slot * slot_floats() + layer * layer_floats(); }
    float* recurrent(int64_t slot, int64_t layer) const { return conv(slot, layer) + conv_floats(); }
};

// Tokens of a sequence, from the end of the segment before them up to `end`.
struct Segment {
    int32_t end;
    int32_t source;  // the slot with the state before the segment; below zero: the state is zeros
    int32_t target;  // the slot for the state after it; may be `source`
};

// Calls run(first token, end, source or null, target) for each segment, in order. `part` is where a thread's share of a
// layer's recurrence begins: pointers are to there. Threads take different parts, and a later segment may continue what
// an earlier one has left: so every thread goes through all segments in order.
template <class Run>
void for_each_segment(const States& states, const Segment* segments, int64_t num_segments, int64_t layer, int64_t part,
                      const Run& run) {
    int64_t first = 0;
    for (const Segment* s = segments; s < segments + num_segments; ++s) {
        const float* source = s->source < 0 ? nullptr : states.recurrent(s->source, layer) + part;
        run(first, int64_t(s->end), source, states.recurrent(s->target, layer) + part);
        first = s->end;
    }
}

}  // namespace quire
