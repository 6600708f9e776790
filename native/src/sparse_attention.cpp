#include "sparse_attention.h"

#include <algorithm>
#include <cstring>

namespace quire {

namespace {

// Orders as the floats do; NaN comes first.
uint32_t ordered_bits(float x) {
    if (x != x) return 0;
    uint32_t bits;
    const float positive_zero = x + 0.0f;
    std::memcpy(&bits, &positive_zero, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

}  // namespace

void choose_best(const float* scores, int64_t count, int64_t top_k, uint64_t* order, float* out) {
    if (count <= top_k) {
        for (int64_t i = 0; i < top_k; ++i) out[i] = i < count ? float(i) : -1.0f;
        return;
    }
    for (int64_t i = 0; i < count; ++i) order[i] = uint64_t(~ordered_bits(scores[i])) << 32 | uint64_t(i);
    std::nth_element(order, order + top_k, order + count);
    for (int64_t i = 0; i < top_k; ++i) order[i] &= 0xffffffffu;
    std::sort(order, order + top_k);
    for (int64_t i = 0; i < top_k; ++i) out[i] = float(order[i]);
}

SparseAttention::Seen SparseAttention::seen_by(const View& out, int64_t r) const {
    const int64_t token = out.logits_only ? step_.logit_rows[r] : r;
    const int32_t* after = std::upper_bound(step_.seq_starts, step_.seq_starts + step_.num_seqs, int32_t(token));
    const int64_t seq = after - step_.seq_starts - 1;
    const int64_t count = step_.context_lens[seq] - (step_.seq_starts[seq + 1] - 1 - token);
    return {count, step_.block_tables + seq * step_.table_stride};
}

void SparseAttention::choose(const TopPositions& op) const {
    const int64_t rows = num_rows(op.out), longest = tape_.longest_;
    float* const all_scores = tape_.index_scores_.get();
    if (rows >= pool_.num_threads) {
        float* const scores = all_scores + pool_.thread * longest;
        std::atomic<int64_t>& counter = tape_.counters_[op.counter];
        for (int64_t r = pool_.thread; r < rows;
             r = pool_.num_threads + counter.fetch_add(1, std::memory_order_relaxed)) {
            score(op, r, 0, ceil_div(seen_by(op.out, r).count, tape_.index_.block_size), scores);
            select(op, r, scores);
        }
        return;
    }
    for (int64_t r = 0; r < rows; ++r) {
        const Range blocks = pool_.share(ceil_div(seen_by(op.out, r).count, tape_.index_.block_size));
        score(op, r, blocks.first, blocks.last, all_scores + r * longest);
    }
    pool_.barrier();
    if (pool_.thread < rows) select(op, pool_.thread, all_scores + pool_.thread * longest);
}

void SparseAttention::score(const TopPositions& op, int64_t r, int64_t first, int64_t end, float* scores) const {
    const Seen seen = seen_by(op.out, r);
    if (seen.count <= op.out.columns) return;  // all are chosen
    const Pages& index = tape_.index_;
    const float *q = tape_.input(op.q, op.out, r, step_), *weights = tape_.input(op.weights, op.out, r, step_);
    for (int64_t block = first; block < end; ++block) {
        const int64_t start = block * index.block_size, count = std::min(index.block_size, seen.count - start);
        kernels_.index.scores(index.type, q, weights, op.weights.columns, index.head_dim,
                              index.keys(seen.block_table[block], op.layer, 0), count, scores + start);
    }
}

void SparseAttention::select(const TopPositions& op, int64_t r, const float* scores) const {
    uint64_t* const order = tape_.index_order_.get() + pool_.thread * tape_.longest_;
    choose_best(scores, seen_by(op.out, r).count, op.out.columns, order, tape_.row(op.out, r));
}

void SparseAttention::attend(const SparseMla& op) const {
    const Pages& pages = tape_.pages_;
    const int64_t heads = op.q.columns / pages.latent, tiles = ceil_div(heads, kTileQueries);
    std::atomic<int64_t>& counter = tape_.counters_[op.counter];
    int64_t gathered_row = -1;
    Pages gathered{};
    for (int64_t item = pool_.thread; item < num_rows(op.out) * tiles;
         item = pool_.num_threads + counter.fetch_add(1, std::memory_order_relaxed)) {
        const int64_t r = item / tiles, first = item % tiles * kTileQueries;
        const Seen seen = seen_by(op.out, r);
        const float* positions = tape_.input(op.chosen, op.out, r, step_);
        const int64_t count = std::min(seen.count, op.chosen.columns);
        if (count < seen.count && gathered_row != r) {
            gathered = gather(op.layer, seen, positions, count);
            gathered_row = r;
        }
        AttentionTile tile{};
        const bool in_place = count == seen.count;
        tile.pages = in_place ? &pages : &gathered;
        tile.layer = in_place ? op.layer : 0;
        tile.block_table = in_place ? seen.block_table : tape_.consecutive_.data();
        tile.num_queries = int(std::min<int64_t>(kTileQueries, heads - first));
        tile.scale = op.scale;
        tile.scratch =
            tape_.attention_scratch_.get() + pool_.thread * attention_scratch(pages.head_dim, pages.block_size);
        for (int i = 0; i < tile.num_queries; ++i) {
            const int64_t head = first + i;
            tile.q[i] = tape_.input(op.q, op.out, r, step_) + head * pages.latent;
            tile.q_rope[i] = tape_.input(op.q_rope, op.out, r, step_) + head * (pages.head_dim - pages.latent);
            tile.out[i] = tape_.row(op.out, r) + head * pages.latent;
            tile.first[i] = 0;
            tile.last[i] = tile.position[i] = int32_t(count - 1);
        }
        kernels_.ops.attend(tile);
    }
}

Pages SparseAttention::gather(int64_t layer, const Seen& seen, const float* positions, int64_t count) const {
    const Pages& pages = tape_.pages_;
    Pages gathered = pages;
    gathered.data = tape_.gathered_keys_.get() + pool_.thread * tape_.gathered_stride_;
    gathered.num_layers = 1;
    gathered.conv_layers = 0;
    const size_t bytes = pages.head_bytes() / pages.block_size;  // of a vector
    for (int64_t i = 0; i < count; ++i) {
        const int64_t position = int64_t(positions[i]);
        const uint8_t* block = pages.keys(seen.block_table[position / pages.block_size], layer, 0);
        std::memcpy(gathered.data + i * bytes, block + position % pages.block_size * bytes, bytes);
    }
    return gathered;
}

}  // namespace quire
