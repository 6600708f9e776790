#include "paged_attention.h"

#include <algorithm>

namespace quire {

void PagedAttention::run(const Attention& op) {
    const bool shares_prefixes = op.window == 0 && !op.of_source && !tape_.shared_prefixes_.groups().empty();
    int64_t num_tiles = 0;
    each_tile(op, [&](const Run& run, int64_t, int64_t, int64_t) {
        num_tiles += !shares_prefixes || tape_.shared_prefixes_.member(run.seq) < 0;
    });
    const bool splits_contexts = num_tiles < kTilesPerThread * pool_.num_threads && tape_.max_splits_ > 1;
    std::atomic<int64_t>& counter = tape_.counters_[op.counter];
    const int64_t runs = num_runs(op);
    if (!splits_contexts && !shares_prefixes && runs >= kRunsPerThread * pool_.num_threads &&
        (op.out.logits_only || runs == step_.num_tokens))
        return run_tokens(op, counter);
    int64_t mine = pool_.thread, item = 0;
    const auto is_mine = [&] { return item++ == mine; };
    const auto take_next = [&] { mine = pool_.num_threads + counter.fetch_add(1, std::memory_order_relaxed); };
    if (shares_prefixes)
        each_shared_split([&](const SharedPrefixes::Group& shared, int64_t kv_head, int64_t split) {
            if (!is_mine()) return;
            attend_shared_split(op, shared, kv_head, split);
            take_next();
        });
    int64_t num_alone = 0;  // tiles without a shared prefix, whose slots for partials are taken
    each_tile(op, [&](const Run& run, int64_t kv_head, int64_t first, int64_t num_splits) {
        const bool shares = shares_prefixes && tape_.shared_prefixes_.member(run.seq) >= 0;
        const int64_t begin = shares ? tape_.shared_prefixes_.shared_splits(run.seq) : 0;
        const PartialSlots partials = shares ? partials_of_seq(op, run.seq, kv_head) : partials_of_tile(num_alone);
        each_piece(begin, shares || splits_contexts ? num_splits : 1, [&](int64_t split, int64_t end) {
            if (!is_mine()) return;
            const AttentionTile tile = tile_at(op, run, kv_head, first);
            if (shares || splits_contexts) {
                kernels_.ops.attend_splits(tile, split, end, partials.at(split), partials.stride);
                merge_if_last(tile, partials, end - split, num_splits);
            } else {
                kernels_.ops.attend(tile);
            }
            take_next();
        });
        num_alone += splits_contexts && !shares;
    });
}

void PagedAttention::run_tokens(const Attention& op, std::atomic<int64_t>& counter) const {
    const Pages& pages = tape_.pages(op.windowed);
    const int64_t num = num_runs(op), num_heads = pages.num_kv_heads;
    const auto first_block = [&](const Run& run, int64_t kv_head) {
        const int32_t* block = run.block_table + first_seen(op, run.context - 1) / pages.block_size;
        return KVPrefetch(pages, op.layer, kv_head, block, block + 1);
    };
    for (int64_t i = pool_.thread; i < num;) {
        const Run run = run_at(op, i);
        i = pool_.num_threads + counter.fetch_add(1, std::memory_order_relaxed);
        for (int64_t kv_head = 0; kv_head < num_heads; ++kv_head) {
            KVPrefetch next;
            if (kv_head + 1 < num_heads)
                next = first_block(run, kv_head + 1);
            else if (i < num)
                next = first_block(run_at(op, i), 0);
            while (next.prefetch_lines()) continue;
            for (int64_t first = 0, count = heads_of(op, kv_head).count; first < count; first += kTileQueries)
                kernels_.ops.attend(tile_at(op, run, kv_head, first));
        }
    }
}

KVPrefetch PagedAttention::first_prefetch(const Attention& op) const {
    if (tape_.max_splits_ == 1 || op.window) return {};
    const Pages& pages = tape_.pages(op.windowed);
    const int64_t split_blocks = attention_split(pages.block_size) / pages.block_size;
    KVPrefetch prefetch;
    int64_t item = 0;
    each_tile(op, [&](const Run& run, int64_t kv_head, int64_t, int64_t num_splits) {
        each_piece(0, num_splits, [&](int64_t first, int64_t last) {
            if (item++ != pool_.thread) return;
            const int64_t last_block = std::min(last * split_blocks, ceil_div(run.context, pages.block_size));
            prefetch = KVPrefetch(pages, op.layer, kv_head, run.block_table + first * split_blocks,
                                  run.block_table + last_block);
        });
    });
    return prefetch;
}

PagedAttention::Run PagedAttention::run_at(const Attention& op, int64_t index) const {
    const bool logits_only = op.out.logits_only;
    if (has_trees(op)) {
        const DraftTrees& trees = tape_.draft_trees_;
        const DraftTrees::Branch& branch = logits_only ? trees.of_token(step_.logit_rows[index]) : trees.run(index);
        return {branch.seq,     logits_only ? index : branch.start, branch.count,
                branch.context, block_table(op, branch.seq),        branch.moves() ? &branch : nullptr};
    }
    const int64_t seq = logits_only ? tape_.logit_seqs_[index] : index;
    const int64_t start = step_.seq_starts[seq], end = step_.seq_starts[seq + 1], context = step_.context_lens[seq];
    const int32_t* table = block_table(op, seq);
    if (op.of_source)
        return {seq, logits_only ? index : start, logits_only ? 1 : end - start, step_.source_lens[seq],
                step_.source_tables + seq * step_.source_stride};
    if (logits_only) return {seq, index, 1, context - (end - 1 - step_.logit_rows[index]), table};
    return {seq, start, end - start, context, table};
}

template <class Visit>
void PagedAttention::each_tile(const Attention& op, const Visit& visit) const {
    const int64_t split_size = attention_split(tape_.pages_.block_size);
    for (int64_t i = 0; i < num_runs(op); ++i) {
        const Run run = run_at(op, i);
        for (int64_t tile = ceil_div(run.count * op.group, kTileQueries) - 1; tile >= 0; --tile)
            for (int64_t kv_head = 0; kv_head < tape_.pages_.num_kv_heads; ++kv_head) {
                const int64_t group = heads_of(op, kv_head).count;
                if (tile * kTileQueries >= run.count * group) continue;
                const int64_t last_query = std::min((tile + 1) * kTileQueries, run.count * group) - 1;
                const int64_t position = last_seen(op, run, last_query / group);
                visit(run, kv_head, tile * kTileQueries, position / split_size + 1);
            }
    }
}

template <class Visit>
void PagedAttention::each_piece(int64_t begin, int64_t end, const Visit& visit) const {
    const int64_t count = end - begin, at_once = std::clamp<int64_t>(end / pool_.num_threads, 1, 4);
    const int64_t num_pieces = std::max<int64_t>(count > 0, count / at_once);
    for (int64_t i = num_pieces - 1; i >= 0; --i)
        visit(begin + count * i / num_pieces, begin + count * (i + 1) / num_pieces);
}

template <class Visit>
void PagedAttention::each_shared_split(const Visit& visit) const {
    for (const SharedPrefixes::Group& shared : tape_.shared_prefixes_.groups())
        for (int64_t kv_head = 0; kv_head < tape_.pages_.num_kv_heads; ++kv_head)
            for (int64_t split = 0; split < shared.num_splits; ++split) visit(shared, kv_head, split);
}

PagedAttention::PartialSlots PagedAttention::partials_of_tile(int64_t tile) const {
    const int64_t stride = tile_partial_floats(tape_.pages_.value_dim());
    return {tape_.partials_.get() + tile * tape_.max_splits_ * stride, stride, tape_.splits_done_[tile]};
}

PagedAttention::PartialSlots PagedAttention::partials_of_seq(const Attention& op, int64_t seq, int64_t kv_head) const {
    const int64_t size = partial_floats(tape_.pages_.value_dim());
    const int64_t tile = tape_.shared_prefixes_.member(seq) * tape_.pages_.num_kv_heads + kv_head;
    return {tape_.shared_partials_.get() + tile * tape_.max_splits_ * op.group * size,
            heads_of(op, kv_head).count * size, tape_.splits_done_[kTilesPerThread * pool_.num_threads + tile]};
}

AttentionTile PagedAttention::tile_at(const Attention& op, const Run& run, int64_t kv_head, int64_t first) const {
    const Pages& pages = tape_.pages(op.windowed);
    const auto [first_head, group] = heads_of(op, kv_head);
    AttentionTile tile;
    tile.pages = &pages;
    tile.layer = op.layer;
    tile.kv_head = kv_head;
    tile.block_table = run.block_table;
    tile.num_queries = int(std::min<int64_t>(kTileQueries, run.count * group - first));
    tile.scale = op.scale;
    tile.softcap = op.softcap;
    tile.has_slopes = op.slopes != nullptr;
    tile.has_sinks = op.sinks != nullptr;
    tile.reach = op.reach;
    tile.scratch = tape_.attention_scratch_.get() + pool_.thread * attention_scratch(pages.head_dim, pages.block_size);
    for (int i = 0; i < tile.num_queries; ++i) {
        const int64_t token = (first + i) / group, head = first_head + (first + i) % group;
        const int64_t position = last_seen(op, run, token);
        tile.q[i] = tape_.input(op.q, op.out, run.start + token, step_) + head * pages.value_dim();
        tile.q_rope[i] = pages.latent ? tape_.input(op.q_rope, op.out, run.start + token, step_) +
                                            head * (pages.head_dim - pages.latent)
                                      : nullptr;
        tile.out[i] = tape_.row(op.out, run.start + token) + head * pages.value_dim();
        tile.last[i] = tile.position[i] = int32_t(position);
        tile.slope[i] = op.slopes ? op.slopes[head] : 0.0f;
        tile.sink[i] = op.sinks ? op.sinks[head] : 0.0f;
        tile.bias[i] = op.biases ? op.biases + head * (2 * op.reach + 1) + op.reach : nullptr;
        tile.first[i] = int32_t(first_seen(op, position));
    }
    if (run.branch) tape_.draft_trees_.read_tail(*run.branch, run.block_table, pool_.thread, tile);
    return tile;
}

void PagedAttention::merge_if_last(const AttentionTile& tile, const PartialSlots& partials, int64_t count,
                                   int64_t num_splits) const {
    if (partials.num_done.fetch_add(count, std::memory_order_acq_rel) + count < num_splits) return;
    partials.num_done.store(0, std::memory_order_relaxed);
    kernels_.ops.merge_splits(tile, partials.at(0), num_splits, partials.stride);
}

void PagedAttention::attend_shared_split(const Attention& op, const SharedPrefixes::Group& shared, int64_t kv_head,
                                         int64_t split) const {
    AttentionTile all;
    all.num_queries = 0;
    for (const int32_t seq : shared.seqs) {
        const int64_t index = op.out.logits_only ? tape_.seq_logits_[seq] : seq;
        if (index < 0) continue;  // its logits are not requested
        const AttentionTile one = tile_at(op, run_at(op, index), kv_head, 0);
        if (all.num_queries == 0) {
            all = one;
            all.num_queries = 0;
        }
        for (int i = 0; i < one.num_queries; ++i, ++all.num_queries) {
            all.q[all.num_queries] = one.q[i];
            all.q_rope[all.num_queries] = one.q_rope[i];
            all.first[all.num_queries] = one.first[i];
            all.slope[all.num_queries] = one.slope[i];
            all.bias[all.num_queries] = one.bias[i];
            all.position[all.num_queries] = one.position[i];
            all.last[all.num_queries] = int32_t((split + 1) * attention_split(tape_.pages_.block_size) - 1);
        }
    }
    if (all.num_queries == 0) return;
    float* partial = tape_.tile_partials_.get() + pool_.thread * tile_partial_floats(tape_.pages_.value_dim());
    kernels_.ops.attend_splits(all, split, split + 1, partial, 0);
    for (const int32_t seq : shared.seqs) {
        const int64_t index = op.out.logits_only ? tape_.seq_logits_[seq] : seq;
        if (index < 0) continue;
        const PartialSlots partials = partials_of_seq(op, seq, kv_head);
        std::copy_n(partial, partials.stride, partials.at(split));
        partial += partials.stride;
        const Run run = run_at(op, index);
        merge_if_last(tile_at(op, run, kv_head, 0), partials, 1,
                      ceil_div(run.context, attention_split(tape_.pages_.block_size)));
    }
}

}  // namespace quire
