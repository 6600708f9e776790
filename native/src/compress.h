// The pooling of compressed attention: tokens of a group become one entry.
#pragma once

#include "ops.h"

namespace quire {

struct CompressKernels {
    // out [n] = the sum over `count` tokens, in order, of softmax(gates[i] + biases[i]) * vectors[i], column by column,
    // where the softmax is over the tokens. Vectors and gates [n] are of this type.
    void (*pool)(PageType type, const uint8_t* const* vectors, const uint8_t* const* gates, const float* const* biases,
                 int64_t count, int64_t n, float* out);
};

}  // namespace quire
