// Linear attention with a state, for the segments of a step: the gated delta rule, Kimi delta attention and lightning
// attention. Threads take heads, and columns of a head.
#pragma once

#include "kernels.h"
#include "mamba.h"
#include "moe.h"
#include "thread_pool.h"

namespace quire {

struct DeltaShape {
    int64_t heads, key_heads, key_dim, value_dim;
    bool tiled;        // heads take the key heads in turn; else neighbours share one
    bool decays_rows;  // each row of a state has a decay of its own
};

// q and k [key_heads * key_dim], v and out [heads * value_dim], decay [heads] or [heads * key_dim], beta [heads]: its
// base is null where values are added as they are. The state of a layer is [heads, key_dim, value_dim].
void delta_rule(const SegmentedStates& s, const DeltaShape& shape, Rows q, Rows k, Rows v, TokenRows decay,
                TokenRows beta, Rows out, const ThreadPool& pool);

}  // namespace quire
