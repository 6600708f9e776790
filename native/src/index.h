// The scores of an indexer, by which sparse attention chooses positions.
#pragma once

#include "ops.h"

namespace quire {

struct IndexKernels {
    // scores[i] = the sum over heads, in order, of weights[head] * max(0, q[head] . keys[i]), for `count` keys [dim] of
    // this type, one behind the other. A dot product is summed in lanes (column mod kLanes), then the lanes.
    void (*scores)(PageType type, const float* q, const float* weights, int64_t heads, int64_t dim, const uint8_t* keys,
                   int64_t count, float* scores);
};

}  // namespace quire
