// How the runs of a step become flat arrays. What they mean is said in ops/opset.py, StepBatch.
#pragma once

#include <cstdint>

namespace quire {

// What is known of every row: [num_rows] or [num_rows, columns].
struct KnownRows {
    const int32_t *tokens, *tables;  // rows tokens_width and tables_width apart
    int64_t num_rows, tokens_width, tables_width;
    const int32_t *num_known, *num_blocks;
    int64_t block_size;
};

// `count` tokens of a row, from position `start` on.
struct RunOfTokens {
    int32_t row, start, count;
};

// Where the arrays of a step are written; sizes follow from the runs.
struct StepArrays {
    int32_t *ids, *positions, *slots;    // [tokens]
    int32_t *seq_starts, *context_lens;  // [runs + 1], [runs]
    int32_t* block_tables;               // [runs, width]
    int64_t width;                       // blocks of the longest run
    int32_t *logit_rows, *drawing;       // [runs]: those that reach the end of what is known, as a token and as a row
    int64_t num_drawing = 0;
};

// Throws std::invalid_argument where a run goes past what is known of its row, or past its blocks.
void assemble(const KnownRows& known, const RunOfTokens* runs, int64_t num_runs, StepArrays& out);

}  // namespace quire
