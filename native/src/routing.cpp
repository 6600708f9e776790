#include "routing.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace quire {

namespace {

// Merits are numbers or kClosed; what has been chosen is marked with kTaken.
constexpr float kClosed = -std::numeric_limits<float>::infinity(), kTaken = std::numeric_limits<float>::quiet_NaN();
constexpr float kLeastSum = 1e-20f;  // of sigmoids that all are 0: what is divided by it stays 0

void score(const Routing& routing, const float* logits, float* scores) {
    const int64_t n = routing.num_experts;
    if (routing.near > 0.0f) {
        std::copy_n(logits, n, scores);
        return;
    }
    if (routing.sigmoid) {
        for (int64_t i = 0; i < n; ++i) scores[i] = 1.0f / (1.0f + std::exp(-logits[i]));
        return;
    }
    const float most = *std::max_element(logits, logits + n);
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) sum += scores[i] = std::exp(logits[i] - most);
    for (int64_t i = 0; i < n; ++i) scores[i] /= sum;
}

// Takes the first of the greatest values.
int64_t take_best(float* values, int64_t n) {
    int64_t found = 0;
    for (int64_t i = 1; i < n; ++i)
        if (values[i] > values[found] || std::isnan(values[found])) found = i;
    values[found] = kTaken;
    return found;
}

// Of a group: the sum of its `count` greatest merits.
float group_merit(const float* merits, int64_t n, int64_t count) {
    float first = kClosed, second = kClosed;
    for (int64_t i = 0; i < n; ++i) {
        if (merits[i] > first) {
            second = first;
            first = merits[i];
        } else if (merits[i] > second) {
            second = merits[i];
        }
    }
    return count == 2 ? first + second : first;
}

// Experts outside of the best groups cannot be chosen.
void close_groups(const Routing& routing, float* merits, float* group_merits) {
    const int64_t size = routing.num_experts / routing.num_groups;
    for (int64_t g = 0; g < routing.num_groups; ++g)
        group_merits[g] = group_merit(merits + g * size, size, routing.group_best);
    for (int64_t i = 0; i < routing.top_groups; ++i) take_best(group_merits, routing.num_groups);
    for (int64_t g = 0; g < routing.num_groups; ++g)
        if (!std::isnan(group_merits[g])) std::fill_n(merits + g * size, size, kClosed);
}

// Of an expert that has just been taken: its share of a softmax over those that are left and near it.
float share(const Routing& routing, const float* logits, const float* merits, float most) {
    float sum = 1.0f;
    for (int64_t i = 0; i < routing.num_experts; ++i) {
        const bool near = most - logits[i] <= routing.near * std::max(std::abs(logits[i]), most);
        if (near && !std::isnan(merits[i])) sum += std::exp(logits[i] - most);
    }
    return 1.0f / sum;
}

}  // namespace

void choose_experts(const Routing& routing, const float* logits, float* scratch, int32_t* ids, float* weights) {
    const int64_t n = routing.num_experts;
    float *scores = scratch, *merits = scratch + n, *group_merits = scratch + 2 * n;
    score(routing, logits, scores);
    for (int64_t i = 0; i < n; ++i) {
        merits[i] = routing.correction && routing.near == 0.0f ? scores[i] + routing.correction[i] : scores[i];
        if (std::isnan(merits[i])) merits[i] = kClosed;
    }
    if (routing.num_groups > 1) close_groups(routing, merits, group_merits);
    float sum = 0.0f;
    for (int64_t j = 0; j < routing.top_k; ++j) {
        const int64_t expert = take_best(merits, n);
        ids[j] = int32_t(expert);
        sum += weights[j] = routing.near > 0.0f ? share(routing, logits, merits, logits[expert]) : scores[expert];
    }
    const float factor = routing.renormalize ? routing.scale / (sum + kLeastSum) : routing.scale;
    for (int64_t j = 0; j < routing.top_k; ++j) weights[j] *= factor;
}

}  // namespace quire
