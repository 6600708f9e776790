// How a thread carries out the ops of a tape, in one step.

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "ahead.h"
#include "tape.h"

namespace quire {

namespace {

// An op is split by rows on a side where every thread touches its share of the rows and no others. (Pages are written
// by rows too: only attention reads them, and it waits for everybody.)
template <class T>
constexpr bool kReadsOwnRows = !std::is_same_v<T, Attention> && !std::is_same_v<T, SelfAttention> &&
                               !std::is_same_v<T, Logits> && !std::is_same_v<T, Adapt>;
template <class T>
constexpr bool kWritesOwnRows =
    std::is_same_v<T, Adapt> || (kReadsOwnRows<T> && !std::is_same_v<T, Linear> && !std::is_same_v<T, LinearHeads>);

}  // namespace

// One thread's way through the tape in one step.
class Walk {
 public:
    Walk(Tape& tape, const Step& step, const Team& team) : tape_(tape), step_(step), team_(team), kernels_(kernels()) {}

    void run() {
        bool own_rows = true;  // what was written since the last barrier
        for (const Op& op : tape_.ops_) {
            if (std::holds_alternative<Linear>(op)) aim(&op + 1);
            std::visit(
                [&](const auto& o) {
                    using T = std::decay_t<decltype(o)>;
                    if (!own_rows || !kReadsOwnRows<T> || gathers(o)) {
                        meet();
                        own_rows = true;
                    }
                    run(o);
                    own_rows = own_rows && kWritesOwnRows<T>;
                },
                op);
        }
    }

 private:
    // Nobody passes before everybody is here.
    void meet() {
        team_.barrier([&] { return ahead_.fetch(); });
    }

    // While one token's row is worked on, all threads but one wait: they fetch what they will attend to first, from the
    // last product before attention on.
    void aim(const Op* next) {
        const Op* const end = tape_.ops_.data() + tape_.ops_.size();
        while (next != end && !std::holds_alternative<Linear>(*next) && !std::holds_alternative<Attention>(*next))
            ++next;
        const Attention* op = next != end ? std::get_if<Attention>(next) : nullptr;
        if (!op || step_.num_tokens > 1 || tape_.max_parts_ == 1 || op->window) return;
        const Pages& pages = tape_.pages_;
        const int64_t part_blocks = attention_part(pages.block_size) / pages.block_size;
        int64_t item = 0;
        each_tile(*op, group_of(*op), [&](const Run& run, int64_t kv_head, int64_t, int64_t num_parts) {
            each_piece(0, num_parts, [&](int64_t first, int64_t last) {
                if (item++ != team_.thread) return;
                const int64_t last_block = std::min(last * part_blocks, ceil_div(run.context, pages.block_size));
                ahead_ = Ahead(pages, op->layer, kv_head, run.block_table + first * part_blocks,
                               run.block_table + last_block);
            });
        });
    }

    float* row(const View& v, int64_t r) const { return tape_.arena_.get() + v.offset + r * v.stride; }

    // Where an op with this output finds the input of its row r.
    const float* input(const View& v, const View& out, int64_t r) const {
        return row(v, out.few && !v.few ? step_.logit_rows[r] : r);
    }
    int64_t num_rows(const View& v) const { return v.few ? step_.num_logits : step_.num_tokens; }
    Range mine(const View& out) const { return team_.share(num_rows(out)); }

    // Rows of few are taken from all: others may have written them.
    template <class T>
    static bool gathers(const T&) {
        return false;
    }
    static bool gathers(const RmsNorm& op) { return op.out.few && !op.x.few; }
    static bool gathers(const LayerNorm& op) { return op.out.few && !op.x.few; }
    static bool gathers(const Activate& op) { return op.out.few && !op.x.few; }
    static bool gathers(const ActivateAndMul& op) { return op.out.few && !op.x.few; }
    static bool gathers(const Mixture& op) { return op.out.few && !(op.x.few && op.logits.few); }
    static bool gathers(const MulSigmoid& op) { return op.out.few && !(op.x.few && op.gate.few); }
    static bool gathers(const Scale& op) { return op.out.few && !op.x.few; }
    static bool gathers(const Clamp& op) { return op.out.few && !op.x.few; }
    static bool gathers(const Add& op) { return op.out.few && !(op.x.few && op.y.few); }
    static bool gathers(const Linear& op) { return op.out.few && !op.x.few; }
    static bool gathers(const LinearHeads& op) { return op.out.few && !op.x.few; }
    static bool gathers(const Take& op) { return !op.x.few; }

    void run(const Embedding& op) {
        const auto [first, last] = mine(op.out);
        const int32_t* ids = op.of_positions ? step_.positions : step_.ids;
        for (int64_t r = first; r < last; ++r) {
            const int32_t id = op.row_order ? op.row_order[ids[r]] : ids[r];
            dequantize_row(op.storage, op.data + id * op.row_bytes, row(op.out, r), op.out.columns);
        }
    }

    void run(const RmsNorm& op) {
        const auto [first, last] = mine(op.out);
        for (int64_t r = first; r < last; ++r)
            for (int64_t c = 0; c < op.x.columns; c += op.size)
                kernels_.ops.rms_norm(input(op.x, op.out, r) + c, op.weight, op.eps, op.size, row(op.out, r) + c);
    }

    void run(const LayerNorm& op) {
        const auto [first, last] = mine(op.out);
        const auto at = [](const float* vector, int64_t size, int64_t c) {
            return vector ? vector + c % size : nullptr;
        };
        for (int64_t r = first; r < last; ++r)
            for (int64_t c = 0; c < op.x.columns; c += op.size)
                kernels_.ops.layer_norm(input(op.x, op.out, r) + c, at(op.weight, op.weight_size, c),
                                        at(op.bias, op.bias_size, c), op.eps, op.size, row(op.out, r) + c);
    }

    void run(const RopeAngles& op) {
        const auto [first, last] = mine(op.out);
        for (int64_t r = first; r < last; ++r)
            kernels_.ops.rope_angles(step_.positions[r], op.inv_freq, op.scale, op.out.columns / 2, row(op.out, r));
    }

    void run(const Rope& op) {
        const int64_t num_heads = op.x.columns / op.head_dim;
        const auto [first, last] = mine(op.x);
        for (int64_t r = first; r < last; ++r)
            kernels_.ops.rope(row(op.x, r), row(op.angles, r), op.angles.columns / 2, num_heads, op.head_dim);
    }

    void run(const WriteKV& op) {
        const auto [first, last] = mine(op.k);
        const int64_t block_size = tape_.pages_.block_size;
        for (int64_t r = first, count; r < last; r += count) {
            const int32_t slot = step_.slots[r];
            const auto follows = [&](int64_t n) { return r + n < last && step_.slots[r + n] == slot + n; };
            for (count = 1; slot % block_size + count < block_size && follows(count);) ++count;
            kernels_.ops.write_kv(tape_.pages_, op.layer, slot, count, row(op.k, r), op.k.stride, row(op.v, r),
                                  op.v.stride);
        }
    }

    void run(const WriteLatent& op) {
        const auto [first, last] = mine(op.latent);
        for (int64_t r = first; r < last; ++r)
            kernels_.ops.write_latent(tape_.pages_, op.layer, step_.slots[r], row(op.latent, r), row(op.turned, r));
    }

    void run(const Activate& op) {
        const auto [first, last] = mine(op.out);
        for (int64_t r = first; r < last; ++r)
            kernels_.ops.activate(op.kind, input(op.x, op.out, r), op.out.columns, row(op.out, r));
    }

    void run(const ActivateAndMul& op) {
        const auto [first, last] = mine(op.out);
        for (int64_t r = first; r < last; ++r)
            kernels_.ops.activate_and_mul(op.kind, input(op.x, op.out, r), op.out.columns, row(op.out, r));
    }

    // The rows of a value, for an op with this output.
    Rows rows(const View& v, const View& out) const {
        return {row(v, 0), v.stride, out.few && !v.few ? step_.logit_rows : nullptr};
    }

    void run(const Mixture& op) {
        tape_.mixtures_.run(op.routing, op.gate_up, op.down, op.kind, rows(op.x, op.out), rows(op.logits, op.out),
                            rows(op.out, op.out), num_rows(op.out), team_,
                            tape_.panels_.get() + team_.thread * kPanelBytes);
    }

    void run(const Adapt& op) {
        tape_.low_rank_.run(*op.slots, rows(op.x, op.y), rows(op.y, op.y), op.y.few, team_,
                            tape_.panels_.get() + team_.thread * kPanelBytes);
    }

    void run(const KeepKV& op) {
        tape_.self_attention_.keep(op.num_kv_heads, op.head_dim, rows(op.k, op.k), rows(op.v, op.v), mine(op.k));
    }

    void run(const SelfAttention& op) {
        tape_.self_attention_.attend(op.shape, rows(op.q, op.out), rows(op.out, op.out), op.out.few, team_,
                                     tape_.counters_[op.counter]);
    }

    void run(const MulSigmoid& op) {
        const auto [first, last] = mine(op.out);
        for (int64_t r = first; r < last; ++r) {
            const float factor = 1.0f / (1.0f + std::exp(-*input(op.gate, op.out, r)));
            kernels_.ops.scale(input(op.x, op.out, r), factor, op.out.columns, row(op.out, r));
        }
    }

    void run(const Scale& op) {
        const auto [first, last] = mine(op.out);
        for (int64_t r = first; r < last; ++r)
            kernels_.ops.scale(input(op.x, op.out, r), op.factor, op.out.columns, row(op.out, r));
    }

    void run(const ScaleByPosition& op) {
        const auto [first, last] = mine(op.x);
        for (int64_t r = first; r < last; ++r) {
            const float factor = 1.0f + op.growth * std::log1p(std::floor(float(step_.positions[r]) / op.length));
            kernels_.ops.scale(row(op.x, r), factor, op.x.columns, row(op.x, r));
        }
    }

    void run(const Clamp& op) {
        const auto [first, last] = mine(op.out);
        for (int64_t r = first; r < last; ++r)
            kernels_.ops.clamp(input(op.x, op.out, r), op.most, op.out.columns, row(op.out, r));
    }

    void run(const Add& op) {
        const auto [first, last] = mine(op.out);
        for (int64_t r = first; r < last; ++r)
            kernels_.ops.add(input(op.x, op.out, r), input(op.y, op.out, r), op.x.columns, row(op.out, r));
    }

    void run(const Linear& op) { multiply(op.weight, op.x, op.out.few, row(op.out, 0), op.out.stride); }

    void run(const Logits& op) {
        multiply(op.weight, op.x, true, step_.logits, op.weight.num_outputs);
        if (op.softcap == 0.0f) return;
        meet();
        const Range all = team_.share(step_.num_logits * op.weight.num_outputs);
        kernels_.ops.soft_cap(step_.logits + all.first, op.softcap, all.last - all.first);
    }

    void run(const Take& op) {
        const auto [first, last] = team_.share(step_.num_logits);
        for (int64_t r = first; r < last; ++r)
            std::copy_n(row(op.x, op.x.few ? r : step_.logit_rows[r]), op.x.columns, step_.logits + r * op.x.columns);
    }

    // Columns of a value as a product reads them: where it is of few rows and the value of all, this thread's are
    // gathered.
    struct Input {
        const float* x;
        int64_t stride;
    };
    Input gathered(const View& from, bool few, const Range& rows, const int32_t* order = nullptr) {
        const bool takes_few = few && !from.few;
        if (!order && !takes_few) return {row(from, 0), from.stride};
        float* to = tape_.gathered_.get();
        for (int64_t r = rows.first; r < rows.last; ++r) {
            const float* x = row(from, takes_few ? step_.logit_rows[r] : r);
            if (!order) std::copy_n(x, from.columns, to + r * from.columns);
            for (int64_t k = 0; order && k < from.columns; ++k) to[r * from.columns + k] = x[order[k]];
        }
        return {to, from.columns};
    }

    // Every head's columns times its matrix. Threads share each product, and go on to the next one without waiting.
    void run(const LinearHeads& op) {
        const int64_t num_rows = this->num_rows(op.out);
        if (num_rows == 0) return;
        const Range rows = team_.share(num_rows);
        const auto [x, stride] = gathered(op.x, op.out.few, rows);
        const MatrixKernels& matrix = kernels_.matrix;
        const int64_t num_inputs = op.heads[0].num_inputs, num_outputs = op.heads[0].num_outputs;
        const GroupOrder order(num_rows, matrix.row_block, num_inputs);
        const auto halves = [&](size_t head) { return tape_.halves_.get() + head * order.size(num_rows); };
        for (size_t h = 0; h < op.heads.size(); ++h)
            if (matrix.reads_halves(op.heads[h]))
                for (int64_t r = rows.first; r < rows.last; ++r)
                    matrix.to_halves(x + r * stride + h * num_inputs, num_inputs, halves(h) + order.start(r),
                                     order.block_rows);
        meet();
        for (size_t h = 0; h < op.heads.size(); ++h) {
            const Activations a{x + h * num_inputs, stride, nullptr, halves(h)};
            const Worker worker{team_.thread, team_.num_threads, tape_.panels_.get() + team_.thread * kPanelBytes,
                                &tape_.counters_[op.counters + h * team_.num_threads]};
            matrix.multiply(op.heads[h], a, num_rows, row(op.out, 0) + h * num_outputs, op.out.stride, worker);
        }
    }

    // out = x . w^T + bias: rows are prepared by rows, outputs multiplied by outputs, the bias added by rows.
    void multiply(const Weight& w, const View& from, bool few, float* out, int64_t out_stride) {
        const int64_t num_rows = few ? step_.num_logits : step_.num_tokens;
        if (num_rows == 0) return;
        const Range rows = team_.share(num_rows);
        int64_t column = 0, taken = w.counters;
        Activations a{};
        for (const PackedMatrix& segment : w.segments) {
            const bool is_first = &segment == w.segments.data();
            if (is_first || segment.input_order != (&segment)[-1].input_order) {
                if (!is_first) meet();
                a = prepared(w, segment.input_order, from, few, num_rows);
                meet();
            }
            const Worker worker{team_.thread, team_.num_threads, tape_.panels_.get() + team_.thread * kPanelBytes,
                                &tape_.counters_[taken]};
            kernels_.matrix.multiply(segment, a, num_rows, out + column, out_stride, worker);
            column += segment.num_outputs;
            taken += tape_.num_threads_;
        }
        if (w.bias == nullptr) return;
        meet();
        for (int64_t r = rows.first; r < rows.last; ++r)
            kernels_.ops.add(out + r * out_stride, w.bias, w.num_outputs, out + r * out_stride);
    }

    // The rows of a product as its segments read them, with their inputs in `order`; this thread does its share.
    Activations prepared(const Weight& w, const int32_t* order, const View& from, bool few, int64_t num_rows) {
        const Range rows = team_.share(num_rows);
        const auto [x, stride] = gathered(from, few, rows, order);
        QuantizedGroup* groups = tape_.groups_.get();
        HalfGroup* halves = tape_.halves_.get();
        const MatrixKernels& matrix = kernels_.matrix;
        const GroupOrder places(num_rows, matrix.row_block, w.num_inputs);
        if (std::any_of(w.segments.begin(), w.segments.end(), [](const PackedMatrix& m) { return m.is_integer(); }))
            for (int64_t r = rows.first; r < rows.last; ++r)
                matrix.quantize(x + r * stride, w.num_inputs, groups + places.start(r), places.block_rows);
        if (std::any_of(w.segments.begin(), w.segments.end(),
                        [&](const PackedMatrix& m) { return matrix.reads_halves(m); }))
            for (int64_t r = rows.first; r < rows.last; ++r)
                matrix.to_halves(x + r * stride, w.num_inputs, halves + places.start(r), places.block_rows);
        return {x, stride, groups, halves};
    }

    // Neighbouring rows of queries of one sequence: its tokens of this step, or one of few.
    struct Run {
        int64_t seq;
        int64_t start, count;
        int64_t context;  // positions the last of them sees
        const int32_t* block_table;
    };
    int64_t num_runs(bool few) const { return few ? step_.num_logits : step_.num_seqs; }
    Run run_at(const Attention& op, int64_t index) const {
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

    // The queries of a run that read one KV head, ordered by token and then by head, are cut into tiles. Whoever is
    // free takes the next one; the longest of a run come first. Where there are too few tiles to keep everybody busy,
    // their contexts are cut into parts as well. Beginnings that several runs share are attended to first, together.
    void run(const Attention& op) {
        const int64_t group = group_of(op);
        const bool cascades = op.window == 0 && !op.of_source && !tape_.cascade_.groups().empty();
        int64_t num_tiles = 0;
        each_tile(op, group, [&](const Run& run, int64_t, int64_t, int64_t) {
            num_tiles += !cascades || tape_.cascade_.member(run.seq) < 0;
        });
        const bool in_parts = num_tiles < kTilesAThread * team_.num_threads && tape_.max_parts_ > 1;
        std::atomic<int64_t>& counter = tape_.counters_[op.counter];
        ahead_ = Ahead();
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

    int64_t group_of(const Attention& op) const {
        return op.q.columns / tape_.pages_.value_dim() / tape_.pages_.num_kv_heads;
    }

    // visit(part, end): the parts [begin, end) of a tile, in pieces. Neighbours go to one thread, which fetches the
    // next one beforehand, while there are enough for all. The last piece, which may be the longest, comes first: to
    // who had time to fetch.
    template <class Visit>
    void each_piece(int64_t begin, int64_t end, const Visit& visit) const {
        const int64_t count = end - begin, at_once = std::clamp<int64_t>(end / team_.num_threads, 1, 4);
        const int64_t num_pieces = std::max<int64_t>(count > 0, count / at_once);
        for (int64_t i = num_pieces - 1; i >= 0; --i)
            visit(begin + count * i / num_pieces, begin + count * (i + 1) / num_pieces);
    }

    // Where the findings of a tile's parts lie, and how many of them are there: none between two ops.
    struct Places {
        float* data;
        int64_t stride;
        std::atomic<int64_t>& num_found;

        float* at(int64_t part) const { return data + part * stride; }
    };
    Places places_alone(int64_t tile) const {
        const int64_t stride = attention_findings(tape_.pages_.value_dim());
        return {tape_.findings_.get() + tile * tape_.max_parts_ * stride, stride, tape_.num_found_[tile]};
    }
    Places places_of(int64_t seq, int64_t kv_head, int64_t group) const {
        const int64_t stride = group * query_findings(tape_.pages_.value_dim());
        const int64_t tile = tape_.cascade_.member(seq) * tape_.pages_.num_kv_heads + kv_head;
        return {tape_.shared_findings_.get() + tile * tape_.max_parts_ * stride, stride,
                tape_.num_found_[kTilesAThread * team_.num_threads + tile]};
    }

    // `count` more parts of a tile were attended to. Whoever brings the last ones folds them all.
    void fold_if_last(const AttentionTile& tile, const Places& places, int64_t count, int64_t num_parts) const {
        if (places.num_found.fetch_add(count, std::memory_order_acq_rel) + count < num_parts) return;
        places.num_found.store(0, std::memory_order_relaxed);
        kernels_.ops.fold_parts(tile, places.at(0), num_parts, places.stride);
    }

    // visit(group of sequences, KV head, part), in one order.
    template <class Visit>
    void each_shared_part(const Visit& visit) const {
        for (const Cascade::Group& shared : tape_.cascade_.groups())
            for (int64_t kv_head = 0; kv_head < tape_.pages_.num_kv_heads; ++kv_head)
                for (int64_t part = 0; part < shared.num_parts; ++part) visit(shared, kv_head, part);
    }

    // One walk over a part for the queries of all; what each of them found goes to its own place.
    void attend_together(const Attention& op, int64_t group, const Cascade::Group& shared, int64_t kv_head,
                         int64_t part) {
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

    // The last position that a token of a run sees: its own, or the source's last.
    static int64_t last_seen(const Attention& op, const Run& run, int64_t token) {
        return op.of_source ? run.context - 1 : run.context - run.count + token;
    }

    static int64_t num_tiles_of(const Run& run, int64_t group) { return ceil_div(run.count * group, kTileQueries); }

    // visit(run, KV head, first query, number of parts) for every tile of the step, in one order.
    template <class Visit>
    void each_tile(const Attention& op, int64_t group, const Visit& visit) const {
        const int64_t part_size = attention_part(tape_.pages_.block_size);
        for (int64_t i = 0; i < num_runs(op.out.few); ++i) {
            const Run run = run_at(op, i);
            for (int64_t tile = num_tiles_of(run, group) - 1; tile >= 0; --tile) {
                const int64_t last_query = std::min((tile + 1) * kTileQueries, run.count * group) - 1;
                const int64_t position = last_seen(op, run, last_query / group);
                for (int64_t kv_head = 0; kv_head < tape_.pages_.num_kv_heads; ++kv_head)
                    visit(run, kv_head, tile * kTileQueries, position / part_size + 1);
            }
        }
    }

    AttentionTile tile_at(const Attention& op, const Run& run, int64_t kv_head, int64_t group, int64_t first) const {
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
        tile.scratch =
            tape_.attention_scratch_.get() + team_.thread * attention_scratch(pages.head_dim, pages.block_size);
        for (int i = 0; i < tile.num_queries; ++i) {
            const int64_t token = (first + i) / group, head = kv_head * group + (first + i) % group;
            const int64_t position = last_seen(op, run, token);
            tile.q[i] = input(op.q, op.out, run.start + token) + head * pages.value_dim();
            tile.turned[i] = pages.latent
                                 ? input(op.turned, op.out, run.start + token) + head * (pages.head_dim - pages.latent)
                                 : nullptr;
            tile.out[i] = row(op.out, run.start + token) + head * pages.value_dim();
            tile.last[i] = tile.position[i] = int32_t(position);
            tile.slope[i] = op.slopes ? op.slopes[head] : 0.0f;
            tile.sink[i] = op.sinks ? op.sinks[head] : 0.0f;
            tile.bias[i] = op.biases ? op.biases + head * (2 * op.reach + 1) + op.reach : nullptr;
            tile.first[i] = int32_t(op.window ? std::max<int64_t>(0, position - op.window + 1) : 0);
        }
        return tile;
    }

    Tape& tape_;
    const Step& step_;
    const Team team_;
    const Kernels& kernels_;
    Ahead ahead_;
};

void Tape::walk(const Step& step, const Team& team) { Walk(*this, step, team).run(); }

}  // namespace quire
