#include "delta_rule.h"

#include <algorithm>

namespace quire {

namespace {

constexpr int64_t kColumns = 64;  // of a state that a thread takes at once: with 128 rows, 32 KB

// Columns [size] of a state at the start of a segment, whose rows are `stride` floats apart.
void begin_columns(const float* source, float* target, int64_t rows, int64_t size, int64_t stride) {
    if (source == target) return;
    for (int64_t row = 0; row < rows; ++row, target += stride) {
        if (!source) {
            std::fill_n(target, size, 0.0f);
        } else {
            std::copy_n(source, size, target);
            source += stride;
        }
    }
}

}  // namespace

void delta_rule(const SegmentedStates& s, const DeltaShape& shape, Rows q, Rows k, Rows v, TokenRows decay,
                TokenRows beta, Rows out, const ThreadPool& pool) {
    const int64_t parts = (shape.value_dim + kColumns - 1) / kColumns, group = shape.heads / shape.key_heads;
    const int64_t head_floats = shape.key_dim * shape.value_dim, head_decays = shape.decays_rows ? shape.key_dim : 1;
    const auto [first_part, last_part] = pool.share(shape.heads * parts);
    const auto run_part = [&](int64_t head, int64_t column, int64_t first, int64_t end, const float* source,
                              float* target) {
        const int64_t size = std::min(kColumns, shape.value_dim - column), offset = head * head_floats + column;
        float* const state = target + offset;
        begin_columns(source ? source + offset : nullptr, state, shape.key_dim, size, shape.value_dim);
        const int64_t key_head = shape.tiled ? head % shape.key_heads : head / group;
        const int64_t key = key_head * shape.key_dim, value = head * shape.value_dim + column;
        kernels().scan.delta_rule({end - first,
                                   {q.at(first) + key, q.stride},
                                   {k.at(first) + key, k.stride},
                                   {v.at(first) + value, v.stride},
                                   {decay.base + first * decay.stride + head * head_decays, decay.stride},
                                   shape.decays_rows ? 1 : 0,
                                   {beta.base ? beta.base + first * beta.stride + head : nullptr, beta.stride},
                                   shape.key_dim,
                                   size,
                                   shape.value_dim,
                                   state,
                                   out.at(first) + value,
                                   out.stride});
    };
    for_each_segment(s.states, s.segments, s.num_segments, s.layer, 0,
                     [&](int64_t first, int64_t end, const float* source, float* target) {
                         for (int64_t part = first_part; part < last_part; ++part)
                             run_part(part / parts, part % parts * kColumns, first, end, source, target);
                     });
}

}  // namespace quire
