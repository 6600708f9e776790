// The time mixing of RWKV 7, for the segments of a step: see OpSet.wkv7. Threads take heads.
#pragma once

#include "kernels.h"
#include "mamba.h"
#include "moe.h"
#include "thread_pool.h"

namespace quire {

struct Wkv7Weights {
    const float *remove_scale, *learn_scale, *bonus;  // [heads * head_dim]
    const float *norm, *norm_bias;                    // [heads * head_dim]
    int64_t heads, head_dim;
    float eps;
};

constexpr int64_t kMaxWkvDim = 256;  // columns of a head

// r, w, k, v, a and out [heads * head_dim]. The state of a layer is [heads, head_dim, head_dim].
void wkv7(const SegmentedStates& s, const Wkv7Weights& weights, Rows r, Rows w, Rows k, Rows v, Rows a, Rows out,
          const ThreadPool& pool);

}  // namespace quire
