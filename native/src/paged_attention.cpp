#include "paged_attention.h"

#include <algorithm>

namespace quire {

void AttentionWalk::run(const Attention& op) {
    const int64_t group = group_of(op);
    const bool cascades = op.window == 0 && !op.of_source && !tape_.cascade_.groups().empty();
    int64_t num_tiles = 0;
    each_tile(op, group, [&](const Run& run, int64_t, int64_t, int64_t) {
        num_tiles += !cascades || tape_.cascade_.member(run.seq) < 0;
    });
    const bool in_parts = num_tiles < kTilesAThread * team_.num_threads && tape_.max_parts_ > 1;
    std::atomic<int64_t>& counter = tape_.counters_[op.counter];
    const int64_t runs = num_runs(op.out.few);
    if (!in_parts && !cascades && runs >= kRunsAThread * team_.num_threads && (op.out.few || runs == step_.num_tokens))
        return run_tokens(op, group, counter);
    int64_t mine = team_.thread, item = 0;
    const auto is_mine = [&] { return item++ == mine; };
    const auto take_next = [&] { mine = team_.num_threads + counter.fetch_add(1, std::memory_order_relaxed); };
    if (cascades)
        each_shared_part([&](const Cascade::Group& shared, int64_t kv_head, int64_t part) {
            if (!is_mine()) return;
            attend_together(op, group, shared, kv_head, part);
            take_next();
        });
    int64_t num_alone = 0;  // tiles that share nothing, whose places are taken
    each_tile(op, group, [&](const Run& run, int64_t kv_head, int64_t first, int64_t num_parts) {
        const bool shares = cascades && tape_.cascade_.member(run.seq) >= 0;
        const int64_t begin = shares ? tape_.cascade_.shared_parts(run.seq) : 0;
        const Places places = shares ? places_of(run.seq, kv_head, group) : places_alone(num_alone);
        each_piece(begin, shares || in_parts ? num_parts : 1, [&](int64_t part, int64_t end) {
            if (!is_mine()) return;
            const AttentionTile tile = tile_at(op, run, kv_head, group, first);
            if (shares || in_parts) {
                kernels_.ops.attend_parts(tile, part, end, places.at(part), places.stride);
                fold_if_last(tile, places, end - part, num_parts);
            } else {
                kernels_.ops.attend(tile);
            }
            take_next();
        });
        num_alone += in_parts && !shares;
    });
}

void AttentionWalk::run_tokens(const Attention& op, int64_t group, std::atomic<int64_t>& counter) const {
    const Pages& pages = tape_.pages_;
    const int64_t num = num_runs(op.out.few), num_heads = pages.num_kv_heads;
    const auto first_block = [&](const Run& run, int64_t kv_head) {
        const int64_t seen = op.window ? std::max<int64_t>(0, run.context - op.window) : 0;
        const int32_t* block = run.block_table + seen / pages.block_size;
        return Ahead(pages, op.layer, kv_head, block, block + 1);
    };
    for (int64_t i = team_.thread; i < num;) {
        const Run run = run_at(op, i);
        i = team_.num_threads + counter.fetch_add(1, std::memory_order_relaxed);
        for (int64_t kv_head = 0; kv_head < num_heads; ++kv_head) {
            Ahead next;
            if (kv_head + 1 < num_heads)
                next = first_block(run, kv_head + 1);
            else if (i < num)
                next = first_block(run_at(op, i), 0);
            while (next.fetch()) continue;
            for (int64_t first = 0; first < group; first += kTileQueries)
                kernels_.ops.attend(tile_at(op, run, kv_head, group, first));
        }
    }
}

Ahead AttentionWalk::first_of_mine(const Attention& op) const {
    if (tape_.max_parts_ == 1 || op.window) return {};
    const Pages& pages = tape_.pages_;
    const int64_t part_blocks = attention_part(pages.block_size) / pages.block_size;
    Ahead found;
    int64_t item = 0;
    each_tile(op, group_of(op), [&](const Run& run, int64_t kv_head, int64_t, int64_t num_parts) {
        each_piece(0, num_parts, [&](int64_t first, int64_t last) {
            if (item++ != team_.thread) return;
            const int64_t last_block = std::min(last * part_blocks, ceil_div(run.context, pages.block_size));
            found =
                Ahead(pages, op.layer, kv_head, run.block_table + first * part_blocks, run.block_table + last_block);
        });
    });
    return found;
}

AttentionWalk::Run AttentionWalk::run_at(const Attention& op, int64_t index) const {
    const bool few = op.out.few;
    const int64_t seq = few ? tape_.logit_seqs_[index] : index;
    const int64_t start = step_.seq_starts[seq], end = step_.seq_starts[seq + 1], context = step_.context_lens[seq];
    const int32_t* table = step_.block_tables + seq * step_.table_stride;
    if (op.of_source)
        return {seq, few ? index : start, few ? 1 : end - start, step_.source_lens[seq],
                step_.source_tables + seq * step_.source_stride};
    if (few) return {seq, index, 1, context - (end - 1 - step_.logit_rows[index]), table};
    return {seq, start, end - start, context, table};
}

template <class Visit>
void AttentionWalk::each_tile(const Attention& op, int64_t group, const Visit& visit) const {
    const int64_t part_size = attention_part(tape_.pages_.block_size);
    for (int64_t i = 0; i < num_runs(op.out.few); ++i) {
        const Run run = run_at(op, i);
        for (int64_t tile = ceil_div(run.count * group, kTileQueries) - 1; tile >= 0; --tile) {
            const int64_t last_query = std::min((tile + 1) * kTileQueries, run.count * group) - 1;
            const int64_t position = last_seen(op, run, last_query / group);
            for (int64_t kv_head = 0; kv_head < tape_.pages_.num_kv_heads; ++kv_head)
                visit(run, kv_head, tile * kTileQueries, position / part_size + 1);
        }
    }
}

template <class Visit>
void AttentionWalk::each_piece(int64_t begin, int64_t end, const Visit& visit) const {
    const int64_t count = end - begin, at_once = std::clamp<int64_t>(end / team_.num_threads, 1, 4);
    const int64_t num_pieces = std::max<int64_t>(count > 0, count / at_once);
    for (int64_t i = num_pieces - 1; i >= 0; --i)
        visit(begin + count * i / num_pieces, begin + count * (i + 1) / num_pieces);
}

template <class Visit>
void AttentionWalk::each_shared_part(const Visit& visit) const {
    for (const Cascade::Group& shared : tape_.cascade_.groups())
        for (int64_t kv_head = 0; kv_head < tape_.pages_.num_kv_heads; ++kv_head)
            for (int64_t part = 0; part < shared.num_parts; ++part) visit(shared, kv_head, part);
}

AttentionWalk::Places AttentionWalk::places_alone(int64_t tile) const {
    const int64_t stride = attention_findings(tape_.pages_.value_dim());
    return {tape_.findings_.get() + tile * tape_.max_parts_ * stride, stride, tape_.num_found_[tile]};
}

AttentionWalk::Places AttentionWalk::places_of(int64_t seq, int64_t kv_head, int64_t group) const {
    const int64_t stride = group * query_findings(tape_.pages_.value_dim());
    const int64_t tile = tape_.cascade_.member(seq) * tape_.pages_.num_kv_heads + kv_head;
    return {tape_.shared_findings_.get() + tile * tape_.max_parts_ * stride, stride,
            tape_.num_found_[kTilesAThread * team_.num_threads + tile]};
}

AttentionTile AttentionWalk::tile_at(const Attention& op, const Run& run, int64_t kv_head, int64_t group,
                                     int64_t first) const {
    const Pages& pages = tape_.pages_;
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
    tile.scratch = tape_.attention_scratch_.get() + team_.thread * attention_scratch(pages.head_dim, pages.block_size);
    for (int i = 0; i < tile.num_queries; ++i) {
        const int64_t token = (first + i) / group, head = kv_head * group + (first + i) % group;
        const int64_t position = last_seen(op, run, token);
        tile.q[i] = tape_.input(op.q, op.out, run.start + token, step_) + head * pages.value_dim();
        tile.turned[i] = pages.latent ? tape_.input(op.turned, op.out, run.start + token, step_) +
                                            head * (pages.head_dim - pages.latent)
                                      : nullptr;
        tile.out[i] = tape_.row(op.out, run.start + token) + head * pages.value_dim();
        tile.last[i] = tile.position[i] = int32_t(position);
        tile.slope[i] = op.slopes ? op.slopes[head] : 0.0f;
        tile.sink[i] = op.sinks ? op.sinks[head] : 0.0f;
        tile.bias[i] = op.biases ? op.biases + head * (2 * op.reach + 1) + op.reach : nullptr;
        tile.first[i] = int32_t(op.window ? std::max<int64_t>(0, position - op.window + 1) : 0);
    }
    return tile;
}

void AttentionWalk::fold_if_last(const AttentionTile& tile, const Places& places, int64_t count,
                                 int64_t num_parts) const {
    if (places.num_found.fetch_add(count, std::memory_order_acq_rel) + count < num_parts) return;
    places.num_found.store(0, std::memory_order_relaxed);
    kernels_.ops.fold_parts(tile, places.at(0), num_parts, places.stride);
}

void AttentionWalk::attend_together(const Attention& op, int64_t group, const Cascade::Group& shared, int64_t kv_head,
                                    int64_t part) const {
    AttentionTile all;
    all.num_queries = 0;
    for (const int32_t seq : shared.seqs) {
        const int64_t index = op.out.few ? tape_.seq_logits_[seq] : seq;
        if (index < 0) continue;  // its logits are not wanted
        const AttentionTile one = tile_at(op, run_at(op, index), kv_head, group, 0);
        if (all.num_queries == 0) {
            all = one;
            all.num_queries = 0;
        }
        for (int i = 0; i < one.num_queries; ++i, ++all.num_queries) {
            all.q[all.num_queries] = one.q[i];
            all.turned[all.num_queries] = one.turned[i];
            all.first[all.num_queries] = one.first[i];
            all.slope[all.num_queries] = one.slope[i];
            all.bias[all.num_queries] = one.bias[i];
            all.position[all.num_queries] = one.position[i];
            all.last[all.num_queries] = int32_t((part + 1) * attention_part(tape_.pages_.block_size) - 1);
        }
    }
    if (all.num_queries == 0) return;
    float* found = tape_.tile_findings_.get() + team_.thread * attention_findings(tape_.pages_.value_dim());
    kernels_.ops.attend_parts(all, part, part + 1, found, 0);
    for (const int32_t seq : shared.seqs) {
        const int64_t index = op.out.few ? tape_.seq_logits_[seq] : seq;
        if (index < 0) continue;
        const Places places = places_of(seq, kv_head, group);
        std::copy_n(found, places.stride, places.at(part));
        found += places.stride;
        const Run run = run_at(op, index);
        fold_if_last(tile_at(op, run, kv_head, group, 0), places, 1,
                     ceil_div(run.context, attention_part(tape_.pages_.block_size)));
    }
}

}  // namespace quire
