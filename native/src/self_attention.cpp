#include "self_attention.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace quire {

namespace {

constexpr int64_t kBlockSize = 16;  // tokens; on average half a block of a sequence is unused

}  // namespace

void SelfAttentionRunner::reserve(int64_t num_kv_heads, int64_t head_dim, int num_threads) {
    block_bytes_ = std::max(block_bytes_, pages(num_kv_heads, head_dim).block_bytes());
    scratch_.reserve(num_threads * attention_scratch(head_dim, kBlockSize));
    num_threads_ = num_threads;
}

void SelfAttentionRunner::begin(const int32_t* seq_starts, int64_t num_seqs, const int32_t* logit_rows,
                                int64_t num_logits) {
    if (block_bytes_ == 0) return;
    longest_ = 0;
    first_.resize(num_seqs);
    lengths_.resize(num_seqs);
    seqs_.resize(seq_starts[num_seqs]);
    positions_.resize(seq_starts[num_seqs]);
    int32_t num_blocks = 0;
    for (int64_t seq = 0; seq < num_seqs; ++seq) {
        lengths_[seq] = seq_starts[seq + 1] - seq_starts[seq];
        longest_ = std::max<int64_t>(longest_, lengths_[seq]);
        first_[seq] = num_blocks;
        num_blocks += int32_t((lengths_[seq] + kBlockSize - 1) / kBlockSize);
        for (int32_t position = 0; position < lengths_[seq]; ++position) {
            seqs_[seq_starts[seq] + position] = int32_t(seq);
            positions_[seq_starts[seq] + position] = position;
        }
    }
    for (int32_t block = int32_t(blocks_.size()); block < num_blocks; ++block) blocks_.push_back(block);
    data_.reserve(num_blocks * block_bytes_ + kPagesSlack);
    if (reach_ && longest_ > reach_)
        throw std::invalid_argument("a text of " + std::to_string(longest_) + " tokens, and distances reach " +
                                    std::to_string(reach_));
    if (reach_) added_.reserve(num_threads_ * kTileQueries * (2 * longest_ + 1));
    logit_rows_.assign(logit_rows, logit_rows + num_logits);
    all_runs_.clear();
    for (int64_t seq = 0; seq < num_seqs; ++seq) all_runs_.push_back({seq, seq_starts[seq], lengths_[seq]});
    logit_runs_.clear();
    for (int64_t r = 0; r < num_logits; ++r) {
        const int64_t seq = seqs_[logit_rows[r]];
        // A run is ordered by token, as the kernels require of queries.
        const bool follows = r > 0 && logit_runs_.back().seq == seq && logit_rows[r] > logit_rows[r - 1];
        if (follows)
            ++logit_runs_.back().count;
        else
            logit_runs_.push_back({seq, r, 1});
    }
}

Pages SelfAttentionRunner::pages(int64_t num_kv_heads, int64_t head_dim) const {
    return {data_.get(), int64_t(blocks_.size()), 1, num_kv_heads, head_dim, kBlockSize, type_, 0};
}

void SelfAttentionRunner::keep(int64_t num_kv_heads, int64_t head_dim, Rows k, Rows v, Range tokens) {
    const Pages to = pages(num_kv_heads, head_dim);
    for (int64_t t = tokens.first; t < tokens.last; ++t) {
        const int32_t slot = int32_t(first_[seqs_[t]] * kBlockSize) + positions_[t];
        kernels().ops.write_kv(to, 0, slot, 1, k.at(t), k.stride, v.at(t), v.stride);
    }
}

void SelfAttentionRunner::add_distances(const DistanceScores& distances, float scale, const float* by_query,
                                        int64_t first_token, int64_t head, int64_t position, int64_t length,
                                        float* out) const {
    std::fill_n(out - longest_, 2 * longest_ + 1, 0.0f);
    const int32_t* rows = distances.rows + distances.reach + position;
    for (int64_t key = 0; key < length; ++key) {
        const int64_t row = head * distances.count + rows[-key];
        out[key - position] = (by_query[row] + distances.by_key.at(first_token + key)[row]) * scale;
    }
}

void SelfAttentionRunner::attend(const SelfAttentionShape& shape, const DistanceScores& distances, Rows q, Rows out,
                                 bool logits_only, const ThreadPool& pool, std::atomic<int64_t>& counter) {
    const int64_t group = shape.group, head_dim = shape.head_dim;
    const Pages from = pages(shape.num_kv_heads, head_dim);
    float* scratch = scratch_.get() + pool.thread * attention_scratch(head_dim, kBlockSize);
    int64_t mine = counter.fetch_add(1, std::memory_order_relaxed), item = 0;
    for (const Run& run : logits_only ? logit_runs_ : all_runs_) {
        const int64_t num_queries = run.count * group, length = lengths_[run.seq];
        const int64_t num_tiles = (num_queries + kTileQueries - 1) / kTileQueries;
        if (mine >= item + num_tiles * shape.num_kv_heads) {
            item += num_tiles * shape.num_kv_heads;
            continue;
        }
        for (int64_t first = 0; first < num_queries; first += kTileQueries)
            for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
                if (item++ != mine) continue;
                AttentionTile tile;
                tile.pages = &from;
                tile.layer = 0;
                tile.kv_head = kv_head;
                tile.block_table = blocks_.data() + first_[run.seq];
                tile.num_queries = int(std::min<int64_t>(kTileQueries, num_queries - first));
                tile.scale = shape.scale;
                tile.softcap = 0.0f;
                tile.has_slopes = false;
                tile.has_sinks = false;
                tile.reach = distances.rows ? longest_ : shape.reach;
                float* added = added_.get() + pool.thread * kTileQueries * (2 * longest_ + 1) + longest_;
                tile.scratch = scratch;
                for (int i = 0; i < tile.num_queries; ++i) {
                    const int64_t row = run.first + (first + i) / group, head = kv_head * group + (first + i) % group;
                    const int64_t position = positions_[logits_only ? logit_rows_[row] : row];
                    const int64_t reach = shape.window ? shape.window - 1 : length;
                    tile.q[i] = q.at(row) + head * head_dim;
                    tile.out[i] = out.at(row) + head * head_dim;
                    tile.position[i] = int32_t(position);
                    tile.bias[i] = shape.biases ? shape.biases + head * (2 * shape.reach + 1) + shape.reach : nullptr;
                    if (distances.rows) {
                        float* own = added + i * (2 * longest_ + 1);
                        add_distances(distances, shape.scale, distances.by_query.at(row), all_runs_[run.seq].first,
                                      head, position, length, own);
                        tile.bias[i] = own;
                    }
                    tile.first[i] = int32_t(std::max<int64_t>(0, position - reach));
                    tile.last[i] = int32_t(std::min(length - 1, position + (shape.causal ? 0 : reach)));
                }
                kernels().ops.attend(tile);
                mine = counter.fetch_add(1, std::memory_order_relaxed);
            }
    }
}

}  // namespace quire
