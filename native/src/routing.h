// Which experts a token goes to, and with which weights.
#pragma once

#include <cstdint>

namespace quire {

// See Routing in ops/opset.py.
struct Routing {
    int64_t num_experts, top_k;
    bool sigmoid;  // else softmax
    bool renormalize;
    float scale;
    int64_t num_groups, top_groups;
    int64_t group_best;       // how many of a group's experts it is judged by: 1 or 2
    float near;               // 0: weights are scores
    const float* correction;  // [num_experts], or null
};

// Floats that choose_experts needs to work in.
constexpr int64_t routing_scratch(int64_t num_experts) { return 3 * num_experts; }

// logits [num_experts] -> ids and weights [top_k], the best expert first, ties to the lower one. Whatever the logits
// are, numbers or not, the ids are experts and differ.
void choose_experts(const Routing& routing, const float* logits, float* scratch, int32_t* ids, float* weights);

}  // namespace quire
