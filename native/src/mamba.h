// The recurrences of Mamba and Mamba 2, for the segments of a step. Threads take heads, or channels.
#pragma once

#include "kernels.h"
#include "moe.h"
#include "states.h"
#include "thread_pool.h"

namespace quire {

// What a scan works on: the segments of a step, and the states of one layer.
struct SegmentedStates {
    const States& states;
    const Segment* segments;
    int64_t num_segments, layer;
};

struct Mamba2Weights {
    const float *a, *dt_bias, *skip;  // [heads]
    int64_t heads;
    float min_delta, max_delta;
};
// x [heads * head_dim], dt [heads], b and c [groups * columns], out [heads * head_dim]
void mamba2_scan(const SegmentedStates& s, const Mamba2Weights& w, int64_t head_dim, int64_t groups, int64_t columns,
                 Rows x, Rows dt, Rows b, Rows c, Rows out, const ThreadPool& pool);

struct MambaWeights {
    const float *a, *skip;  // [columns, channels], [channels]
    int64_t columns, channels;
};
// x, dt and out [channels], b and c [columns]
void mamba_scan(const SegmentedStates& s, const MambaWeights& w, Rows x, Rows dt, Rows b, Rows c, Rows out,
                const ThreadPool& pool);

}  // namespace quire
