#include "tape.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace quire {

namespace {

// The most entries that a token of a context of this length sees, in any layer.
int64_t most_entries(const CompressedPages& pages, int64_t length) {
    int64_t most = 0;
    for (const CompressedLayer& layer : pages.layers)
        if (layer.group) most = std::max(most, length / layer.group);
    return most;
}

}  // namespace

Weight::Weight(std::vector<PackedMatrix> parts, const float* bias) : segments(std::move(parts)), bias(bias) {
    for (const PackedMatrix& part : segments) {
        num_inputs = part.num_inputs;
        num_outputs += part.num_outputs;
        reads_groups = reads_groups && part.is_integer() && !part.input_order && part.threshold == 0;
    }
}

Tape::Tape(const Pages& pages, int64_t max_tokens, int64_t arena_size, int num_threads, RankGroup* group, float* shared,
           QuantizedGroup* shared_groups, int64_t num_shared_groups)
    : pages_(pages),
      max_tokens_(max_tokens),
      num_threads_(num_threads),
      ranks_(group),
      shared_(shared),
      shared_groups_(shared_groups),
      num_shared_groups_(num_shared_groups),
      self_attention_(pages.type) {
    arena_.reserve(arena_size);
    panels_.reserve(num_threads * kPanelBytes);
    attention_scratch_.reserve(num_threads * attention_scratch(pages.head_dim, pages.block_size));
}

void Tape::add(Op op) {
    const auto reserve = [&](Weight& w, const View& x, bool logits_only) {
        w.counters = add_counters(w.segments.size() * size_t(num_threads_));
        const int64_t num_groups = GroupOrder(max_tokens_, kernels().matrix.row_block, w.num_inputs).size(max_tokens_);
        groups_.reserve(num_groups);
        fp16_groups_.reserve(num_groups);
        const bool reorders = std::any_of(w.segments.begin(), w.segments.end(),
                                          [](const PackedMatrix& m) { return m.input_order != nullptr; });
        if (reorders || (logits_only && !x.logits_only)) gathered_.reserve(max_tokens_ * w.num_inputs);
        if (std::any_of(w.segments.begin(), w.segments.end(), [](const PackedMatrix& m) { return m.threshold > 0; }))
            outliers_.reserve(max_tokens_, w.num_inputs, num_threads_);
    };
    if (auto* embedding = std::get_if<Embedding>(&op)) {
        int64_t& limit = embedding->of_positions ? num_positions_ : num_ids_;
        limit = std::min(limit, embedding->total_rows);
    }
    if (auto* hidden = std::get_if<HiddenRows>(&op)) {
        num_hidden_ = std::min(num_hidden_, hidden->num_rows);
        reads_hidden_ = true;
    }
    if (auto* linear = std::get_if<Linear>(&op)) reserve(linear->weight, linear->x, linear->out.logits_only);
    if (auto* heads = std::get_if<LinearHeads>(&op)) {
        heads->counters = add_counters(heads->heads.size() * size_t(num_threads_));
        const GroupOrder order(max_tokens_, kernels().matrix.row_block, heads->heads[0].num_inputs);
        fp16_groups_.reserve(int64_t(heads->heads.size()) * order.size(max_tokens_));
        if (heads->out.logits_only && !heads->x.logits_only) gathered_.reserve(max_tokens_ * heads->x.columns);
    }
    if (auto* attention = std::get_if<Attention>(&op)) {
        attention->counter = add_counters(1);
        reads_sources_ = reads_sources_ || attention->of_source;
        if (!attention->group) attention->group = attention->q.columns / pages_.value_dim() / pages_.num_kv_heads;
        group_ = std::max(group_, attention->group);
    }
    if (auto* chosen = std::get_if<TopPositions>(&op)) {
        chosen->counter = add_counters(1);
        top_k_ = std::max(top_k_, chosen->out.columns);
    }
    if (auto* sparse = std::get_if<SparseMla>(&op)) sparse->counter = add_counters(1);
    if (auto* chosen = std::get_if<TopEntries>(&op)) {
        chosen->counter = add_counters(1);
        chooses_entries_ = true;
    }
    if (auto* attention = std::get_if<AttendCompressed>(&op)) {
        attention->counter = add_counters(1);
        window_ = std::max(window_, attention->window);
    }
    if (auto* keep = std::get_if<KeepKV>(&op))
        self_attention_.reserve(keep->num_kv_heads, keep->head_dim, num_threads_);
    if (auto* attention = std::get_if<SelfAttention>(&op)) {
        attention->counter = add_counters(1);
        if (attention->rows) self_attention_.read_distances(attention->reach);
    }
    if (auto* moe = std::get_if<Moe>(&op))
        moe_.reserve(moe->routing, moe->gate_up, moe->down, max_tokens_, num_threads_);
    if (auto* adapt = std::get_if<Adapt>(&op)) {
        lora_.reserve(*adapt->slots, max_tokens_, num_threads_);
        num_adapters_ = std::min(num_adapters_, adapt->slots->num_slots());
    }
    if (auto* logits = std::get_if<Logits>(&op)) reserve(logits->weight, logits->x, true);
    ops_.push_back(std::move(op));
}

int64_t Tape::add_counters(size_t count) {
    const size_t first = counters_.size();
    counters_ = std::vector<std::atomic<int64_t>>(first + count);
    return int64_t(first);
}

size_t Tape::use_window_pages(uint8_t* data, int64_t num_pages, int64_t num_layers) {
    window_pages_ = pages_;
    window_pages_.data = data;
    window_pages_.num_blocks = num_pages;
    window_pages_.num_layers = num_layers;
    return window_pages_.block_bytes() * num_pages;
}

void Tape::run(const Step& step) {
    check(step);
    if (step.num_tokens == 0) return;
    for (std::atomic<int64_t>& counter : counters_) counter.store(0, std::memory_order_relaxed);
    int32_t longest = *std::max_element(step.context_lens, step.context_lens + step.num_seqs);
    if (step.source_lens)
        longest = std::max(longest, *std::max_element(step.source_lens, step.source_lens + step.num_seqs));
    logit_seqs_.resize(step.num_logits);
    for (int64_t i = 0; i < step.num_logits; ++i) {
        const int32_t* end = std::upper_bound(step.seq_starts, step.seq_starts + step.num_seqs, step.logit_rows[i]);
        logit_seqs_[i] = int32_t(end - step.seq_starts) - 1;
    }
    longest_ = longest;
    if (top_k_ || chooses_entries_) reserve_index();
    if (top_k_) reserve_gathered(top_k_);
    if (window_) reserve_gathered(std::min(window_, longest_) + most_entries(compressed_, longest_));
    max_splits_ = ceil_div(longest, attention_split(pages_.block_size));
    partials_.reserve(kTilesPerThread * num_threads_ * max_splits_ * tile_partial_floats(pages_.value_dim()));
    find_shared_prefixes(step);
    draft_trees_.find(step, pages_, num_threads_);
    const size_t num_tiles = kTilesPerThread * num_threads_ + shared_prefixes_.num_members() * pages_.num_kv_heads;
    if (splits_done_.size() < num_tiles) splits_done_ = std::vector<std::atomic<int64_t>>(num_tiles);
    lora_.begin(step.adapters, step.num_tokens, step.logit_rows, step.num_logits);
    self_attention_.begin(step.seq_starts, step.num_seqs, step.logit_rows, step.num_logits);
    run_in_pool(num_threads_, [&](const ThreadPool& pool) { execute(step, pool); });
    if (ranks_ && ranks_->aborted()) throw RankLost("another rank is gone");
}

void Tape::use_index(uint8_t* data, size_t size, int64_t columns) {
    index_ = pages_;
    index_.data = data;
    index_.head_dim = columns;
    index_.latent = columns / 2;  // a key is written as two parts, side by side
    index_.conv_layers = 0;
    if (columns < 2 || !pages_.latent || size < index_.block_bytes() * index_.num_blocks)
        throw std::invalid_argument("the pages of an indexer are smaller than their shape, or beside no latent pages");
}

void Tape::use_compressed(std::vector<CompressedLayer> layers, uint8_t* blocks, size_t num_bytes, uint8_t* pages,
                          size_t num_page_bytes) {
    CompressedPages& c = compressed_;
    c = CompressedPages{};
    c.layers = std::move(layers);
    c.block_size = pages_.block_size;
    c.type = pages_.type;
    size_t entry_bytes = 0, token_bytes = 0;
    c.lay_out(entry_bytes, token_bytes);
    c.windowed = pages != nullptr;
    c.blocks = blocks;
    c.pages = pages ? pages : blocks + entry_bytes;
    c.block_bytes = entry_bytes + (pages ? 0 : token_bytes);
    c.page_bytes = pages ? token_bytes : c.block_bytes;
    if (num_bytes < c.block_bytes * pages_.num_blocks ||
        (pages && num_page_bytes < c.page_bytes * window_pages_.num_blocks))
        throw std::invalid_argument("the pages of compressed attention are smaller than their shape");
}

void Tape::reserve_index() {
    index_scores_.reserve(num_threads_ * longest_);
    index_order_.reserve(num_threads_ * longest_);
}

void Tape::reserve_gathered(int64_t num_keys) {
    const int64_t num_blocks = ceil_div(num_keys, pages_.block_size);
    gathered_stride_ = (num_blocks * pages_.head_bytes() + kPagesSlack + 63) / 64 * 64;
    gathered_keys_.reserve(num_threads_ * gathered_stride_);
    consecutive_.resize(num_blocks);
    std::iota(consecutive_.begin(), consecutive_.end(), 0);
}

void Tape::find_shared_prefixes(const Step& step) {
    const int64_t split = attention_split(pages_.block_size);
    shared_prefixes_.find(step, split / pages_.block_size, pages_.block_size, kTileQueries / group_);
    if (shared_prefixes_.groups().empty()) return;
    shared_partials_.reserve(shared_prefixes_.num_members() * pages_.num_kv_heads * max_splits_ * group_ *
                             partial_floats(pages_.value_dim()));
    tile_partials_.reserve(num_threads_ * tile_partial_floats(pages_.value_dim()));
    seq_logits_.assign(step.num_seqs, -1);
    for (int64_t i = 0; i < step.num_logits; ++i) seq_logits_[logit_seqs_[i]] = int32_t(i);
}

void Tape::check(const Step& s) const {
    const auto fail = [](const char* what, int64_t index, int64_t value, int64_t limit) {
        throw std::invalid_argument(std::string(what) + "[" + std::to_string(index) + "] is " + std::to_string(value) +
                                    ", and must be in [0, " + std::to_string(limit) + ")");
    };
    const auto within = [&](const char* what, const int32_t* values, int64_t n, int64_t limit) {
        for (int64_t i = 0; i < n; ++i)
            if (values[i] < 0 || values[i] >= limit) fail(what, i, values[i], limit);
    };
    if (s.num_tokens > max_tokens_)
        throw std::invalid_argument("a step of " + std::to_string(s.num_tokens) +
                                    " tokens, and the program was compiled for " + std::to_string(max_tokens_));
    if (s.num_logits > max_tokens_)
        throw std::invalid_argument(std::to_string(s.num_logits) +
                                    " rows of logits, and the program was compiled for " + std::to_string(max_tokens_));
    within("ids", s.ids, s.num_tokens, num_ids_);
    within("positions", s.positions, s.num_tokens, num_positions_);
    within("slots", s.slots, s.num_tokens, pages_.num_blocks * pages_.block_size);
    if (window_pages_.num_blocks && !s.window_slots)
        throw std::invalid_argument("the program has window pages: give window_slots and window_tables");
    if (window_pages_.num_blocks)
        within("window_slots", s.window_slots, s.num_tokens, window_pages_.num_blocks * pages_.block_size);
    within("logit_rows", s.logit_rows, s.num_logits, s.num_tokens);
    if ((top_k_ || window_) && s.ancestors)
        throw std::invalid_argument("an indexer chooses among positions, and not in a tree");
    if (reads_hidden_ && !s.hidden_rows)
        throw std::invalid_argument("the program reads hidden states: give hidden_rows");
    if (reads_hidden_) within("hidden_rows", s.hidden_rows, s.num_tokens, num_hidden_);
    check_segments(s);
    for (int64_t i = 0; s.adapters && i < s.num_tokens; ++i)
        if (s.adapters[i] != -1) within("adapters", s.adapters + i, 1, num_adapters_);
    if (s.seq_starts[0] != 0 || s.seq_starts[s.num_seqs] != s.num_tokens)
        throw std::invalid_argument("seq_starts runs from " + std::to_string(s.seq_starts[0]) + " to " +
                                    std::to_string(s.seq_starts[s.num_seqs]) + ", and the step has " +
                                    std::to_string(s.num_tokens) + " tokens");
    for (int64_t seq = 0; seq < s.num_seqs; ++seq) {
        const int64_t count = int64_t(s.seq_starts[seq + 1]) - s.seq_starts[seq], context = s.context_lens[seq];
        const int64_t room = s.table_width * pages_.block_size;
        if (count < 0 || context < count || context > room)
            throw std::invalid_argument("sequence " + std::to_string(seq) + " has " + std::to_string(count) +
                                        " tokens in a context of " + std::to_string(context) +
                                        " and a block table for " + std::to_string(room));
        if (s.ancestors && count <= kMaxTreeTokens) DraftTrees::check(s, seq);
        within("block_tables", s.block_tables + seq * s.table_stride, ceil_div(context, pages_.block_size),
               pages_.num_blocks);
        if (window_pages_.num_blocks)
            within("window_tables", s.window_tables + seq * s.table_stride, ceil_div(context, pages_.block_size),
                   window_pages_.num_blocks);
        if (!reads_sources_) continue;
        const int64_t length = s.source_lens ? s.source_lens[seq] : 0;
        if (length < 1 || length > s.source_width * pages_.block_size)
            throw std::invalid_argument("sequence " + std::to_string(seq) + " has a source of " +
                                        std::to_string(length) + " tokens and a block table for " +
                                        std::to_string(s.source_width * pages_.block_size));
        within("source_tables", s.source_tables + seq * s.source_stride, ceil_div(length, pages_.block_size),
               pages_.num_blocks);
    }
}

void Tape::check_segments(const Step& s) const {
    if (states_.num_slots == 0) return;
    int64_t end = 0;
    for (int64_t i = 0; i < s.num_segments; ++i) {
        const Segment& segment = s.segments[i];
        if (segment.end < end || segment.source >= states_.num_slots || segment.target < 0 ||
            segment.target >= states_.num_slots)
            throw std::invalid_argument("segment " + std::to_string(i) + " ends at token " +
                                        std::to_string(segment.end) + ", from slot " + std::to_string(segment.source) +
                                        " to slot " + std::to_string(segment.target) + " of " +
                                        std::to_string(states_.num_slots));
        end = segment.end;
    }
    if (end != s.num_tokens)
        throw std::invalid_argument("the segments end at token " + std::to_string(end) + " of " +
                                    std::to_string(s.num_tokens));
}

}  // namespace quire
