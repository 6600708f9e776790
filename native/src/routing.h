// MoE routing: which experts process a token, and with which weights.
#pragma once

#include <cstdint>

namespace quire {

enum class Scoring : int { Softmax, Sigmoid, SqrtSoftplus };

// See Routing in ops/opset.py.
struct Routing {
    int64_t num_experts, top_k;
    Scoring scoring;
    bool renormalize;
    float scale;
    int64_t num_groups, top_groups;
    int64_t group_best;       // the score of a group is the sum of its 1 or 2 best experts
    float near;               // 0: weights are scores; see Routing.near in ops/opset.py
    const float* correction;  // [num_experts], or null
    bool weigh_inputs;        // weights multiply the inputs of experts instead of their outputs
    int64_t num_zero;         // the last so many experts pass on their input, and have no matrices
    float limit;              // the two factors of a gated activation are clamped to -limit .. limit; 0: they are not
    float gate_limit;         // the activated one to these limits instead; 0: to `limit`
};

// Scratch floats of select_experts.
constexpr int64_t routing_scratch(int64_t num_experts) { return 3 * num_experts; }

// logits [num_experts] -> ids and weights [top_k], the best expert first, ties to the lower id. The ids are valid and
// distinct even if logits are NaN. `chosen` [top_k]: these experts, in this order; null: those with the best scores.
void select_experts(const Routing& routing, const float* logits, const float* chosen, float* scratch, int32_t* ids,
                    float* weights);

}  // namespace quire
