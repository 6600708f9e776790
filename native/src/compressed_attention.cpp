#include "compressed_attention.h"

#include <algorithm>
#include <cstring>

#include "sparse_attention.h"

namespace quire {

namespace {

// Writes x [n] as numbers of this type.
void write_numbers(const Kernels& kernels, PageType type, const float* x, int64_t n, uint8_t* to) {
    const Pages pages{to, 1, 1, 1, n, 1, type, n};
    kernels.ops.write_latent(pages, 0, 0, x, x);
}

}  // namespace

CompressedAttention::Token CompressedAttention::token_at(int64_t token) const {
    const int32_t* after = std::upper_bound(step_.seq_starts, step_.seq_starts + step_.num_seqs, int32_t(token));
    const int64_t seq = after - step_.seq_starts - 1;
    const int64_t position = step_.context_lens[seq] - (step_.seq_starts[seq + 1] - token);
    const int32_t* tables = pages_.windowed ? step_.window_tables : step_.block_tables;
    return {position, step_.block_tables + seq * step_.table_stride, tables + seq * step_.table_stride};
}

void CompressedAttention::write(const WriteTokens& op) const {
    const CompressedLayer& layer = pages_.layers[op.layer];
    const auto [first, last] = pool_.share(num_rows(op.x));
    const int32_t* slots = pages_.windowed ? step_.window_slots : step_.slots;
    for (int64_t r = first; r < last; ++r) {
        uint8_t* const to = pages_.token(layer, slots[r] / pages_.block_size, slots[r] % pages_.block_size);
        write_numbers(kernels_, pages_.type, tape_.row(op.x, r), op.x.columns, to + op.first * pages_.number_bytes());
    }
}

void CompressedAttention::pool(const PoolGroup& op) const {
    const CompressedLayer& layer = pages_.layers[op.layer];
    const int64_t group = layer.group, columns = op.out.columns, stored = op.overlap ? 2 * columns : columns;
    const size_t bytes = pages_.number_bytes();
    std::vector<const uint8_t*> vectors, gates;
    std::vector<const float*> biases;
    const auto [first, last] = pool_.share(num_rows(op.out));
    for (int64_t r = first; r < last; ++r) {
        const Token token = token_at(r);
        if (!ends_group(layer, token.position)) {
            std::fill_n(tape_.row(op.out, r), columns, 0.0f);
            continue;
        }
        vectors.clear(), gates.clear(), biases.clear();
        const auto take = [&](int64_t start, int64_t column) {
            for (int64_t i = 0; i < group; ++i) {
                const uint8_t* from = kept(layer, token, start + i) + (op.first + column) * bytes;
                vectors.push_back(from);
                gates.push_back(from + stored * bytes);
                biases.push_back(op.bias + i * stored + column);
            }
        };
        const int64_t start = token.position + 1 - group;
        if (op.overlap && start >= group) take(start - group, 0);
        take(start, op.overlap ? columns : 0);
        kernels_.compress.pool(pages_.type, vectors.data(), gates.data(), biases.data(), int64_t(vectors.size()),
                               columns, tape_.row(op.out, r));
    }
}

void CompressedAttention::write(const WriteEntry& op) const {
    const CompressedLayer& layer = pages_.layers[op.layer];
    const auto [first, last] = pool_.share(num_rows(op.x));
    for (int64_t r = first; r < last; ++r) {
        const Token token = token_at(r);
        if (ends_group(layer, token.position))
            write_numbers(kernels_, pages_.type, tape_.row(op.x, r), op.x.columns,
                          entry(layer, token, token.position / layer.group, op.part));
    }
}

void CompressedAttention::choose(const TopEntries& op) const {
    const int64_t rows = num_rows(op.out), longest = tape_.longest_, group = pages_.layers[op.layer].group;
    const auto seen_by = [&](int64_t r) { return (token_of(op.out, r).position + 1) / group; };
    float* const all_scores = tape_.index_scores_.get();
    if (rows >= pool_.num_threads) {
        float* const scores = all_scores + pool_.thread * longest;
        std::atomic<int64_t>& counter = tape_.counters_[op.counter];
        for (int64_t r = pool_.thread; r < rows;
             r = pool_.num_threads + counter.fetch_add(1, std::memory_order_relaxed)) {
            score(op, r, 0, seen_by(r), scores);
            select(op, r, scores);
        }
        return;
    }
    for (int64_t r = 0; r < rows; ++r) {
        const Range entries = pool_.share(seen_by(r));
        score(op, r, entries.first, entries.last, all_scores + r * longest);
    }
    pool_.barrier();
    if (pool_.thread < rows) select(op, pool_.thread, all_scores + pool_.thread * longest);
}

void CompressedAttention::score(const TopEntries& op, int64_t r, int64_t first, int64_t end, float* scores) const {
    const CompressedLayer& layer = pages_.layers[op.layer];
    const Token token = token_of(op.out, r);
    if ((token.position + 1) / layer.group <= op.out.columns) return;  // all are chosen
    const float *q = tape_.input(op.q, op.out, r, step_), *weights = tape_.input(op.weights, op.out, r, step_);
    for (int64_t i = first, count; i < end; i += count) {
        const int64_t block = pages_.block_of(layer, i);
        for (count = 1; i + count < end && pages_.block_of(layer, i + count) == block;) ++count;
        kernels_.index.scores(pages_.type, q, weights, op.weights.columns, layer.parts[1], entry(layer, token, i, 1),
                              count, scores + i);
    }
}

void CompressedAttention::select(const TopEntries& op, int64_t r, const float* scores) const {
    const int64_t count = (token_of(op.out, r).position + 1) / pages_.layers[op.layer].group;
    uint64_t* const order = tape_.index_order_.get() + pool_.thread * tape_.longest_;
    choose_best(scores, count, op.out.columns, order, tape_.row(op.out, r));
}

void CompressedAttention::attend(const AttendCompressed& op) const {
    const int64_t head_dim = tape_.pages_.head_dim, heads = op.q.columns / head_dim;
    const int64_t tiles = ceil_div(heads, kTileQueries);
    std::atomic<int64_t>& counter = tape_.counters_[op.counter];
    Pages gathered = tape_.pages_;
    gathered.data = tape_.gathered_keys_.get() + pool_.thread * tape_.gathered_stride_;
    gathered.num_layers = 1;
    int64_t gathered_row = -1, count = 0;
    for (int64_t item = pool_.thread; item < num_rows(op.out) * tiles;
         item = pool_.num_threads + counter.fetch_add(1, std::memory_order_relaxed)) {
        const int64_t r = item / tiles, first = item % tiles * kTileQueries;
        if (gathered_row != r) {
            const float* chosen = op.chosen.columns ? tape_.input(op.chosen, op.out, r, step_) : nullptr;
            count = gather(op, token_of(op.out, r), chosen, gathered.data);
            gathered_row = r;
        }
        AttentionTile tile{};
        tile.pages = &gathered;
        tile.block_table = tape_.consecutive_.data();
        tile.num_queries = int(std::min<int64_t>(kTileQueries, heads - first));
        tile.scale = op.scale;
        tile.has_sinks = true;
        tile.scratch = tape_.attention_scratch_.get() + pool_.thread * attention_scratch(head_dim, gathered.block_size);
        for (int i = 0; i < tile.num_queries; ++i) {
            const int64_t head = first + i;
            tile.q[i] = tape_.input(op.q, op.out, r, step_) + head * head_dim;
            tile.q_rope[i] = tile.q[i] + head_dim;  // no columns
            tile.out[i] = tape_.row(op.out, r) + head * head_dim;
            tile.first[i] = 0;
            tile.last[i] = tile.position[i] = int32_t(count - 1);
            tile.sink[i] = op.sinks[head];
        }
        kernels_.ops.attend(tile);
    }
}

int64_t CompressedAttention::gather(const AttendCompressed& op, const Token& token, const float* chosen,
                                    uint8_t* to) const {
    const CompressedLayer& layer = pages_.layers[op.layer];
    const size_t bytes = tape_.pages_.head_dim * pages_.number_bytes();
    int64_t count = 0;
    const auto copy = [&](const uint8_t* vector) { std::memcpy(to + count++ * bytes, vector, bytes); };
    for (int64_t position = std::max<int64_t>(token.position + 1 - op.window, 0); position <= token.position;
         ++position)
        copy(kept(layer, token, position));
    const int64_t seen = layer.group ? (token.position + 1) / layer.group : 0;
    if (!chosen)
        for (int64_t i = 0; i < seen; ++i) copy(entry(layer, token, i, 0));
    else
        for (int64_t j = 0; j < std::min(seen, op.chosen.columns); ++j)
            copy(entry(layer, token, int64_t(chosen[j]), 0));
    return count;
}

}  // namespace quire
