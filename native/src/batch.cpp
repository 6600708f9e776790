#include "batch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace quire {

void assemble(const KnownRows& known, const TokenRun* runs, int64_t num_runs, StepArrays& out) {
    int32_t token = 0;
    for (int64_t i = 0; i < num_runs; ++i) {
        const auto [row, start, count] = runs[i];
        const int64_t end = int64_t(start) + count;
        if (row < 0 || row >= known.num_rows || start < 0 || count < 1 || end > known.num_known[row] ||
            end > int64_t(known.num_blocks[row]) * known.block_size)
            throw std::invalid_argument("a run of " + std::to_string(count) + " tokens from " + std::to_string(start) +
                                        " goes past the known tokens of row " + std::to_string(row));
        const int32_t* tokens = known.tokens + row * known.tokens_width;
        const int32_t* table = known.tables + row * known.tables_width;
        out.seq_starts[i] = token;
        out.context_lens[i] = int32_t(end);
        std::copy_n(table, out.width, out.block_tables + i * out.width);
        for (int64_t position = start; position < end; ++position, ++token) {
            out.ids[token] = tokens[position];
            out.positions[token] = int32_t(position);
            out.slots[token] =
                int32_t(table[position / known.block_size] * known.block_size + position % known.block_size);
        }
        if (end == known.num_known[row]) {
            out.logit_rows[out.num_sampling] = token - 1;
            out.sampling_rows[out.num_sampling++] = row;
        }
    }
    out.seq_starts[num_runs] = token;
}

}  // namespace quire
