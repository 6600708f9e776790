// Makes the flat arrays of a step from its runs. They are described at StepBatch in ops/opset.py.
#pragma once

#include <cstdint>

namespace quire {

// The known tokens and the blocks of every row: [num_rows] or [num_rows, columns].
struct KnownRows {
    const int32_t *tokens, *tables;  // rows tokens_width and tables_width apart
    int64_t num_rows, tokens_width, tables_width;
    const int32_t *num_known, *num_blocks;
    int64_t block_size;
};

// `count` tokens of a row, from position `start` on.
struct TokenRun {
    int32_t row, start, count;
};

// The output arrays. Their sizes follow from the runs.
struct StepArrays {
    int32_t *ids, *positions, *slots;     // [tokens]
    int32_t *seq_starts, *context_lens;   // [runs + 1], [runs]
    int32_t* block_tables;                // [runs, width]
    int64_t width;                        // blocks of the longest run
    int32_t *logit_rows, *sampling_rows;  // [runs]: tokens and rows of the runs that reach the last known token
    int64_t num_sampling = 0;
};

// Throws std::invalid_argument if a run goes past the known tokens of its row, or past its blocks.
void assemble(const KnownRows& known, const TokenRun* runs, int64_t num_runs, StepArrays& out);

}  // namespace quire
