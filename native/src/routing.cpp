#include "routing.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace quire {

namespace {

// A choice score is a number or kExcluded. kTaken marks an expert that is selected already.
constexpr float kExcluded = -std::numeric_limits<float>::infinity(), kTaken = std::numeric_limits<float>::quiet_NaN();
constexpr float kMinSum = 1e-20f;  // the divisor if all sigmoids are 0: weights stay 0

void score(const Routing& routing, const float* logits, float* scores) {
    const int64_t n = routing.num_experts;
    if (routing.near > 0.0f) {
        std::copy_n(logits, n, scores);
        return;
    }
    if (routing.scoring == Scoring::Sigmoid) {
        for (int64_t i = 0; i < n; ++i) scores[i] = 1.0f / (1.0f + std::exp(-logits[i]));
        return;
    }
    if (routing.scoring == Scoring::SqrtSoftplus) {
        for (int64_t i = 0; i < n; ++i)
            scores[i] = std::sqrt(std::max(logits[i], 0.0f) + std::log1p(std::exp(-std::abs(logits[i]))));
        return;
    }
    const float max_logit = *std::max_element(logits, logits + n);
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) sum += scores[i] = std::exp(logits[i] - max_logit);
    for (int64_t i = 0; i < n; ++i) scores[i] /= sum;
}

// Returns the index of the greatest value, the first among equals, and marks it as taken.
int64_t take_best(float* values, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; ++i)
        if (values[i] > values[best] || std::isnan(values[best])) best = i;
    values[best] = kTaken;
    return best;
}

// The sum of the `count` greatest choice scores of a group.
float group_score(const float* choice_scores, int64_t n, int64_t count) {
    float first = kExcluded, second = kExcluded;
    for (int64_t i = 0; i < n; ++i) {
        if (choice_scores[i] > first) {
            second = first;
            first = choice_scores[i];
        } else if (choice_scores[i] > second) {
            second = choice_scores[i];
        }
    }
    return count == 2 ? first + second : first;
}

// Excludes the experts outside of the best groups.
void exclude_groups(const Routing& routing, float* choice_scores, float* group_scores) {
    const int64_t size = routing.num_experts / routing.num_groups;
    for (int64_t g = 0; g < routing.num_groups; ++g)
        group_scores[g] = group_score(choice_scores + g * size, size, routing.group_best);
    for (int64_t i = 0; i < routing.top_groups; ++i) take_best(group_scores, routing.num_groups);
    for (int64_t g = 0; g < routing.num_groups; ++g)
        if (!std::isnan(group_scores[g])) std::fill_n(choice_scores + g * size, size, kExcluded);
}

// The weight of an expert that is just taken: its softmax share among the remaining experts with a logit near its own.
float share(const Routing& routing, const float* logits, const float* choice_scores, float max_logit) {
    float sum = 1.0f;
    for (int64_t i = 0; i < routing.num_experts; ++i) {
        const bool near = max_logit - logits[i] <= routing.near * std::max(std::abs(logits[i]), max_logit);
        if (near && !std::isnan(choice_scores[i])) sum += std::exp(logits[i] - max_logit);
    }
    return 1.0f / sum;
}

}  // namespace

void select_experts(const Routing& routing, const float* logits, const float* chosen, float* scratch, int32_t* ids,
                    float* weights) {
    const int64_t n = routing.num_experts;
    float *scores = scratch, *choice_scores = scratch + n, *group_scores = scratch + 2 * n;
    score(routing, logits, scores);
    for (int64_t i = 0; i < n; ++i) {
        choice_scores[i] = routing.correction && routing.near == 0.0f ? scores[i] + routing.correction[i] : scores[i];
        if (std::isnan(choice_scores[i])) choice_scores[i] = kExcluded;
    }
    if (routing.num_groups > 1) exclude_groups(routing, choice_scores, group_scores);
    float sum = 0.0f;
    for (int64_t j = 0; j < routing.top_k; ++j) {
        const int64_t expert =
            chosen ? std::min(std::max<int64_t>(int64_t(chosen[j]), 0), n - 1) : take_best(choice_scores, n);
        ids[j] = int32_t(expert);
        sum += weights[j] =
            routing.near > 0.0f ? share(routing, logits, choice_scores, logits[expert]) : scores[expert];
    }
    const float factor = routing.renormalize ? routing.scale / (sum + kMinSum) : routing.scale;
    for (int64_t j = 0; j < routing.top_k; ++j) weights[j] *= factor;
}

}  // namespace quire
