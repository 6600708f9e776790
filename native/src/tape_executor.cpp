// Runs the ops of a tape in one thread, for one step.

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "compressed_attention.h"
#include "paged_attention.h"
#include "sparse_attention.h"

namespace quire {

namespace {

constexpr int64_t kMinDividedRows = 16;  // of a matmul, for ranks to quantize them together

// An op reads, or writes, its own rows if every thread touches only its share of the rows. (Pages are written by rows
// too: only attention reads them, after a barrier.)
template <class T>
constexpr bool kScans = std::is_same_v<T, CausalConv> || std::is_same_v<T, Mamba2Scan> ||
                        std::is_same_v<T, MambaScan> || std::is_same_v<T, DeltaRule> || std::is_same_v<T, Wkv7>;
template <class T>
constexpr bool kIsSparse =
    std::is_same_v<T, TopPositions> || std::is_same_v<T, SparseMla> || std::is_same_v<T, PoolGroup> ||
    std::is_same_v<T, TopEntries> || std::is_same_v<T, AttendCompressed>;
template <class T>
constexpr bool kReadsOwnRows =
    !kIsSparse<T> && !std::is_same_v<T, Attention> && !std::is_same_v<T, SelfAttention> && !kScans<T> &&
    !std::is_same_v<T, Logits> && !std::is_same_v<T, Adapt> && !std::is_same_v<T, RankBarrier>;
template <class T>
constexpr bool kWritesOwnRows = std::is_same_v<T, Adapt> || std::is_same_v<T, RankBarrier> ||
                                (kReadsOwnRows<T> && !std::is_same_v<T, Linear> && !std::is_same_v<T, LinearHeads>);

// x [columns] -> out, for n streams; see OpSet.stream_weights.
void stream_weights(const float* x, int64_t columns, const float* scale, const float* base, int64_t n, float eps,
                    int64_t iterations, float* out) {
    const auto sigmoid = [](float y) { return 1.0f / (1.0f + std::exp(-y)); };
    for (int64_t i = 0; i < n; ++i) out[i] = sigmoid(x[i] * scale[0] + base[i]) + eps;
    if (columns == n) return;
    for (int64_t i = n; i < 2 * n; ++i) out[i] = 2.0f * sigmoid(x[i] * scale[1] + base[i]);
    float* const mixing = out + 2 * n;
    for (int64_t i = 0; i < n; ++i) {
        float* const to = mixing + i * n;
        float most = -INFINITY, sum = 0.0f;
        for (int64_t j = 0; j < n; ++j) {
            to[j] = x[2 * n + i * n + j] * scale[2] + base[2 * n + i * n + j];
            most = std::max(most, to[j]);
        }
        for (int64_t j = 0; j < n; ++j) sum += to[j] = std::exp(to[j] - most);
        for (int64_t j = 0; j < n; ++j) to[j] = to[j] / sum + eps;
    }
    // Numbers `step` apart are divided by their sum.
    const auto normalize = [&](float* first, int64_t step) {
        float sum = 0.0f;
        for (int64_t i = 0; i < n; ++i) sum += first[i * step];
        for (int64_t i = 0; i < n; ++i) first[i * step] /= sum + eps;
    };
    for (int64_t round = 0; round < iterations; ++round) {
        for (int64_t i = 0; round && i < n; ++i) normalize(mixing + i * n, 1);
        for (int64_t j = 0; j < n; ++j) normalize(mixing + j, n);
    }
}

}  // namespace

class TapeExecutor {
 public:
    TapeExecutor(Tape& tape, const Step& step, const ThreadPool& pool)
        : tape_(tape), step_(step), pool_(pool), kernels_(kernels()), attention_(tape, step, pool_) {}

    void run() {
        bool own_rows = true;  // since the last barrier, threads have written only their own rows
        for (const Op& op : tape_.ops_) {
            if (std::holds_alternative<Linear>(op)) plan_prefetch(&op + 1);
            std::visit(
                [&](const auto& o) {
                    using T = std::decay_t<decltype(o)>;
                    if (!own_rows || !kReadsOwnRows<T> || gathers(o)) {
                        wait();
                        own_rows = true;
                    }
                    run(o);
                    own_rows = own_rows && kWritesOwnRows<T>;
                },
                op);
        }
    }

 private:
    // A barrier. While it waits, the thread prefetches.
    void wait() {
        pool_.barrier([&] { return prefetch_.prefetch_lines(); });
    }

    // In a step of one token, all threads but one wait while element-wise ops run. From the last matmul before
    // attention on, they prefetch the keys and values that they will read first.
    void plan_prefetch(const Op* next) {
        const Op* const end = tape_.ops_.data() + tape_.ops_.size();
        while (next != end && !std::holds_alternative<Linear>(*next) && !std::holds_alternative<Attention>(*next))
            ++next;
        const Attention* op = next != end ? std::get_if<Attention>(next) : nullptr;
        if (op && step_.num_tokens == 1) prefetch_ = attention_.first_prefetch(*op);
    }

    float* row(const View& v, int64_t r) const { return tape_.row(v, r); }
    const float* input(const View& v, const View& out, int64_t r) const { return tape_.input(v, out, r, step_); }
    int64_t num_rows(const View& v) const { return v.logits_only ? step_.num_logits : step_.num_tokens; }
    Range mine(const View& out) const { return pool_.share(num_rows(out)); }

    // Whether the op takes rows of logits from rows of all tokens: other threads may have written these.
    template <class T>
    static bool gathers(const T&) {
        return false;
    }
    static bool gathers(const RmsNorm& op) { return op.out.logits_only && !op.x.logits_only; }
    static bool gathers(const LayerNorm& op) { return op.out.logits_only && !op.x.logits_only; }
    static bool gathers(const Activate& op) { return op.out.logits_only && !op.x.logits_only; }
    static bool gathers(const ActivateAndMul& op) { return op.out.logits_only && !op.x.logits_only; }
    static bool gathers(const Moe& op) {
        return op.out.logits_only &&
               !(op.x.logits_only && op.logits.logits_only && (op.chosen.logits_only || !op.chosen.columns));
    }
    static bool gathers(const MulSigmoid& op) {
        return op.out.logits_only && !(op.x.logits_only && op.gate.logits_only);
    }
    static bool gathers(const StreamWeights& op) { return op.out.logits_only && !op.x.logits_only; }
    static bool gathers(const MergeStreams& op) {
        return op.out.logits_only && !(op.x.logits_only && op.weights.logits_only);
    }
    static bool gathers(const UpdateStreams& op) {
        return op.out.logits_only &&
               !(op.x.logits_only && op.y.logits_only && op.post.logits_only && op.mixing.logits_only);
    }
    static bool gathers(const Scale& op) { return op.out.logits_only && !op.x.logits_only; }
    static bool gathers(const Decay& op) { return op.out.logits_only && !op.x.logits_only; }
    static bool gathers(const Clamp& op) { return op.out.logits_only && !op.x.logits_only; }
    static bool gathers(const Add& op) { return op.out.logits_only && !(op.x.logits_only && op.y.logits_only); }
    static bool gathers(const Mul& op) { return op.out.logits_only && !(op.x.logits_only && op.y.logits_only); }
    static bool gathers(const Linear& op) { return op.out.logits_only && !op.x.logits_only; }
    static bool gathers(const LinearHeads& op) { return op.out.logits_only && !op.x.logits_only; }
    static bool gathers(const TakeRows& op) { return !op.x.logits_only; }
    static bool gathers(const CopyColumns& op) { return op.out.logits_only && !op.x.logits_only; }

    void run(const Embedding& op) {
        const auto [first, last] = mine(op.out);
        const int32_t* ids = op.of_positions ? step_.positions : step_.ids;
        for (int64_t r = first; r < last; ++r) {
            const int64_t id = (op.row_order ? op.row_order[ids[r]] : ids[r]) - op.first_row;
            if (id < 0 || id >= op.num_rows) continue;
            dequantize_row(op.storage, op.data + id * op.row_bytes, row(op.out, r), op.out.columns);
        }
    }

    void run(const HiddenRows& op) {
        const auto [first, last] = mine(op.out);
        for (int64_t r = first; r < last; ++r)
            std::copy_n(op.data + step_.hidden_rows[r] * op.out.columns, op.out.columns, row(op.out, r));
    }

    void run(const Keep& op) {
        const auto [first, last] = mine(op.x);
        for (int64_t r = first; r < last; ++r) std::copy_n(row(op.x, r), op.x.columns, op.to + r * op.x.columns);
    }

    void run(const RmsNorm& op) {
        const auto [first, last] = mine(op.out);
        for (int64_t r = first; r < last; ++r)
            for (int64_t c = 0; c < op.x.columns; c += op.size)
                kernels_.ops.rms_norm(input(op.x, op.out, r) + c, op.weight + c % op.weight_size, op.eps, op.size,
                                      row(op.out, r) + c);
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
            kernels_.ops.rope_angles(int32_t(step_.positions[r] / op.group * op.group), op.inv_freq, op.scale,
                                     op.out.columns / 2, row(op.out, r));
    }

    void run(const Rope& op) {
        const int64_t num_heads = op.x.columns / op.head_dim;
        const auto [first, last] = mine(op.x);
        for (int64_t r = first; r < last; ++r)
            kernels_.ops.rope(row(op.x, r), row(op.angles, r), op.angles.columns / 2, num_heads, op.head_dim);
    }

    void run(const WriteKV& op) {
        const auto [first, last] = mine(op.k);
        const Pages& pages = tape_.pages(op.windowed);
        const int64_t block_size = pages.block_size;
        const int32_t* slots = op.windowed ? step_.window_slots : step_.slots;
        for (int64_t r = first, count; r < last; r += count) {
            const int32_t slot = slots[r];
            const auto follows = [&](int64_t n) { return r + n < last && slots[r + n] == slot + n; };
            for (count = 1; slot % block_size + count < block_size && follows(count);) ++count;
            kernels_.ops.write_kv(pages, op.layer, slot, count, row(op.k, r), op.k.stride, row(op.v, r), op.v.stride);
        }
    }

    void run(const WriteLatent& op) {
        const auto [first, last] = mine(op.latent);
        for (int64_t r = first; r < last; ++r)
            kernels_.ops.write_latent(tape_.pages_, op.layer, step_.slots[r], row(op.latent, r), row(op.k_rope, r));
    }

    void run(const WriteIndexKey& op) {
        const auto [first, last] = mine(op.k);
        for (int64_t r = first; r < last; ++r)
            kernels_.ops.write_latent(tape_.index_, op.layer, step_.slots[r], row(op.k, r),
                                      row(op.k, r) + tape_.index_.latent);
    }

    void run(const TopPositions& op) { SparseAttention(tape_, step_, pool_).choose(op); }
    void run(const SparseMla& op) { SparseAttention(tape_, step_, pool_).attend(op); }

    void run(const WriteTokens& op) { CompressedAttention(tape_, step_, pool_).write(op); }
    void run(const PoolGroup& op) { CompressedAttention(tape_, step_, pool_).pool(op); }
    void run(const WriteEntry& op) { CompressedAttention(tape_, step_, pool_).write(op); }
    void run(const TopEntries& op) { CompressedAttention(tape_, step_, pool_).choose(op); }
    void run(const AttendCompressed& op) { CompressedAttention(tape_, step_, pool_).attend(op); }

    void run(const StreamWeights& op) {
        const auto [first, last] = mine(op.out);
        for (int64_t r = first; r < last; ++r)
            stream_weights(input(op.x, op.out, r), op.x.columns, op.scale, op.base, op.streams, op.eps, op.iterations,
                           row(op.out, r));
    }

    void run(const MergeStreams& op) {
        const auto [first, last] = mine(op.out);
        const int64_t n = op.out.columns;
        for (int64_t r = first; r < last; ++r) {
            const float *x = input(op.x, op.out, r), *weights = input(op.weights, op.out, r);
            kernels_.ops.scale(x, weights[0], n, row(op.out, r));
            for (int64_t i = 1; i < op.weights.columns; ++i)
                kernels_.ops.add_scaled(x + i * n, weights[i], n, row(op.out, r));
        }
    }

    void run(const UpdateStreams& op) {
        const auto [first, last] = mine(op.out);
        const int64_t streams = op.post.columns, n = op.y.columns;
        for (int64_t r = first; r < last; ++r) {
            const float *x = input(op.x, op.out, r), *mixing = input(op.mixing, op.out, r);
            for (int64_t i = 0; i < streams; ++i) {
                float* const out = row(op.out, r) + i * n;
                kernels_.ops.scale(input(op.y, op.out, r), input(op.post, op.out, r)[i], n, out);
                for (int64_t j = 0; j < streams; ++j)
                    kernels_.ops.add_scaled(x + j * n, mixing[j * streams + i], n, out);
            }
        }
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
        return {row(v, 0), v.stride, out.logits_only && !v.logits_only ? step_.logit_rows : nullptr};
    }

    void run(const Moe& op) {
        const auto shared = [&](const View& v) { return v.columns ? row(v, 0) : nullptr; };
        const SharedRoutes routes{shared(op.hidden), op.first_hidden, shared(op.outputs), tape_.ranks_};
        const Rows chosen = op.chosen.columns ? rows(op.chosen, op.out) : Rows{};
        tape_.moe_.run(op.routing, op.gate_up, op.down, op.kind, rows(op.x, op.out), rows(op.logits, op.out), chosen,
                       rows(op.out, op.out), num_rows(op.out), pool_, tape_.panels_.get() + pool_.thread * kPanelBytes,
                       routes);
    }

    void run(const Adapt& op) {
        tape_.lora_.run(*op.slots, rows(op.x, op.y), rows(op.y, op.y), op.y.logits_only, pool_,
                        tape_.panels_.get() + pool_.thread * kPanelBytes);
    }

    void run(const KeepKV& op) {
        tape_.self_attention_.keep(op.num_kv_heads, op.head_dim, rows(op.k, op.k), rows(op.v, op.v), mine(op.k));
    }

    void run(const SelfAttention& op) {
        const int64_t count = op.by_query.columns / std::max<int64_t>(op.shape.num_kv_heads, 1);
        const DistanceScores distances{rows(op.by_query, op.out), rows(op.by_key, op.by_key), op.rows, op.reach, count};
        tape_.self_attention_.attend(op.shape, distances, rows(op.q, op.out), rows(op.out, op.out), op.out.logits_only,
                                     pool_, tape_.counters_[op.counter]);
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
            const float position = float(step_.positions[r]) + op.offset;
            const float factor = 1.0f + op.growth * std::log1p(std::floor(position / op.length));
            kernels_.ops.scale(row(op.x, r), factor, op.x.columns, row(op.x, r));
        }
    }

    void run(const Clamp& op) {
        const auto [first, last] = mine(op.out);
        for (int64_t r = first; r < last; ++r)
            kernels_.ops.clamp(input(op.x, op.out, r), op.limit, op.out.columns, row(op.out, r));
    }

    void run(const Add& op) {
        const auto [first, last] = mine(op.out);
        for (int64_t r = first; r < last; ++r)
            kernels_.ops.add(input(op.x, op.out, r), input(op.y, op.out, r), op.x.columns, row(op.out, r));
    }

    void run(const Mul& op) {
        const auto [first, last] = mine(op.out);
        for (int64_t r = first; r < last; ++r)
            kernels_.ops.mul(input(op.x, op.out, r), input(op.y, op.out, r), op.x.columns, row(op.out, r));
    }

    void run(const CausalConv& op) {
        const ConvRunner conv{tape_.pages_, op.layer, op.weights, rows(op.x, op.x), rows(op.out, op.out), pool_};
        if (tape_.states_.num_slots) return conv.run(segmented(op.layer));
        for (int64_t seq = 0; seq < step_.num_seqs; ++seq)
            conv.run(step_.seq_starts[seq], step_.seq_starts[seq + 1], step_.context_lens[seq],
                     step_.block_tables + seq * step_.table_stride);
    }

    SegmentedStates segmented(int64_t layer) const {
        return {tape_.states_, step_.segments, step_.num_segments, layer};
    }

    void run(const Mamba2Scan& op) {
        const int64_t head_dim = op.x.columns / op.weights.heads, columns = op.b.columns / op.groups;
        mamba2_scan(segmented(op.layer), op.weights, head_dim, op.groups, columns, rows(op.x, op.x), rows(op.dt, op.dt),
                    rows(op.b, op.b), rows(op.c, op.c), rows(op.out, op.out), pool_);
    }

    void run(const MambaScan& op) {
        mamba_scan(segmented(op.layer), op.weights, rows(op.x, op.x), rows(op.dt, op.dt), rows(op.b, op.b),
                   rows(op.c, op.c), rows(op.out, op.out), pool_);
    }

    void run(const Decay& op) {
        const auto [first, last] = mine(op.out);
        for (int64_t r = first; r < last; ++r)
            kernels_.scan.decay(input(op.x, op.out, r), op.bias, op.rate, op.out.columns, row(op.out, r));
    }

    void run(const DeltaRule& op) {
        const auto tokens = [&](const View& v) -> TokenRows { return {v.columns ? row(v, 0) : nullptr, v.stride}; };
        const DeltaShape shape{op.heads, op.q.columns / op.key_dim,  op.key_dim, op.v.columns / op.heads,
                               op.tiled, op.decay.columns > op.heads};
        delta_rule(segmented(op.layer), shape, rows(op.q, op.q), rows(op.k, op.k), rows(op.v, op.v),
                   op.decays ? TokenRows{op.decays, 0} : tokens(op.decay), tokens(op.beta), rows(op.out, op.out),
                   pool_);
    }

    void run(const Wkv7& op) {
        wkv7(segmented(op.layer), op.weights, rows(op.r, op.r), rows(op.w, op.w), rows(op.k, op.k), rows(op.v, op.v),
             rows(op.a, op.a), rows(op.out, op.out), pool_);
    }

    void run(const Linear& op) { multiply(op.weight, op.x, op.out.logits_only, row(op.out, 0), op.out.stride); }

    void run(const Logits& op) {
        float* const out = step_.logits + op.first_column;
        multiply(op.weight, op.x, true, out, op.num_columns);
        if (op.softcap == 0.0f) return;
        wait();
        const Range columns = pool_.share(op.weight.num_outputs);
        for (int64_t r = 0; r < step_.num_logits; ++r)
            kernels_.ops.soft_cap(out + r * op.num_columns + columns.first, op.softcap, columns.last - columns.first);
    }

    void run(const CopyColumns& op) {
        const auto [first, last] = mine(op.out);
        for (int64_t r = first; r < last; ++r) std::copy_n(input(op.x, op.out, r), op.out.columns, row(op.out, r));
    }

    // The threads of this rank have met already.
    void run(const RankBarrier&) {
        if (pool_.thread == 0) tape_.ranks_->barrier();
        wait();
    }

    void run(const TakeRows& op) {
        const auto [first, last] = pool_.share(step_.num_logits);
        for (int64_t r = first; r < last; ++r)
            std::copy_n(row(op.x, op.x.logits_only ? r : step_.logit_rows[r]), op.x.columns,
                        step_.logits + r * op.x.columns);
    }

    // A value as a matmul reads it. If the matmul wants only rows of logits of a value of all tokens, or the columns in
    // another order, this thread's share is gathered.
    struct Input {
        const float* x;
        int64_t stride;
    };
    Input gather_rows(const View& from, bool logits_only, const Range& rows, const int32_t* order = nullptr) {
        const bool gathers_rows = logits_only && !from.logits_only;
        if (!order && !gathers_rows) return {row(from, 0), from.stride};
        float* to = tape_.gathered_.get();
        for (int64_t r = rows.first; r < rows.last; ++r) {
            const float* x = row(from, gathers_rows ? step_.logit_rows[r] : r);
            if (!order) std::copy_n(x, from.columns, to + r * from.columns);
            for (int64_t k = 0; order && k < from.columns; ++k) to[r * from.columns + k] = x[order[k]];
        }
        return {to, from.columns};
    }

    // The columns of each head times its matrix. Threads share each matmul and go on to the next one without a barrier.
    void run(const LinearHeads& op) {
        const int64_t num_rows = this->num_rows(op.out);
        if (num_rows == 0) return;
        const Range rows = pool_.share(num_rows);
        const auto [x, stride] = gather_rows(op.x, op.out.logits_only, rows);
        const MatrixKernels& matrix = kernels_.matrix;
        const int64_t num_inputs = op.heads[0].num_inputs, num_outputs = op.heads[0].num_outputs;
        const GroupOrder order(num_rows, matrix.row_block, num_inputs);
        const auto fp16 = [&](size_t head) { return tape_.fp16_groups_.get() + head * order.size(num_rows); };
        for (size_t h = 0; h < op.heads.size(); ++h)
            if (matrix.reads_fp16(op.heads[h]))
                for (int64_t r = rows.first; r < rows.last; ++r)
                    matrix.to_fp16(x + r * stride + h * num_inputs, num_inputs, fp16(h) + order.start(r),
                                   order.block_rows);
        wait();
        for (size_t h = 0; h < op.heads.size(); ++h) {
            const Activations a{x + h * num_inputs, stride, nullptr, fp16(h)};
            const Worker worker{pool_.thread, pool_.num_threads, tape_.panels_.get() + pool_.thread * kPanelBytes,
                                &tape_.counters_[op.counters + h * pool_.num_threads]};
            matrix.multiply(op.heads[h], a, num_rows, row(op.out, 0) + h * num_outputs, op.out.stride, worker);
        }
    }

    // out = x . w^T + bias. Threads prepare inputs by rows, multiply by outputs, and add the bias by rows.
    void multiply(const Weight& w, const View& from, bool logits_only, float* out, int64_t out_stride) {
        const int64_t num_rows = logits_only ? step_.num_logits : step_.num_tokens;
        if (num_rows == 0) return;
        const Range rows = pool_.share(num_rows);
        int64_t column = 0, taken = w.counters;
        Activations a{};
        bool has_outliers = false;  // of this segment
        for (const PackedMatrix& segment : w.segments) {
            const PackedMatrix* before = &segment == w.segments.data() ? nullptr : &segment - 1;
            if (!before || segment.input_order != before->input_order || segment.threshold != before->threshold) {
                if (before) wait();
                if (divides_rows(w, num_rows)) {
                    a = prepare_together(w, from, logits_only, num_rows);
                } else {
                    a = prepare(w, segment, from, logits_only, num_rows);
                    wait();
                }
                has_outliers = segment.threshold > 0 &&
                               tape_.outliers_.any(0, num_rows);  // before a thread goes on to the next segment
            }
            const Worker worker{pool_.thread, pool_.num_threads, tape_.panels_.get() + pool_.thread * kPanelBytes,
                                &tape_.counters_[taken]};
            kernels_.matrix.multiply(segment, a, num_rows, out + column, out_stride, worker);
            if (has_outliers) {
                wait();
                tape_.outliers_.add(segment, a.x, a.stride, 0, num_rows, out + column, out_stride, pool_);
            }
            column += segment.num_outputs;
            taken += tape_.num_threads_;
        }
        if (w.bias == nullptr) return;
        wait();
        for (int64_t r = rows.first; r < rows.last; ++r)
            kernels_.ops.add(out + r * out_stride, w.bias, w.num_outputs, out + r * out_stride);
    }

    // Whether ranks quantize the rows of a matmul together. For a few rows a barrier takes longer than quantizing.
    bool divides_rows(const Weight& w, int64_t num_rows) const {
        return tape_.shared_groups_ && w.reads_groups && num_rows >= kMinDividedRows &&
               GroupOrder(num_rows, kernels_.matrix.row_block, w.num_inputs).size(num_rows) <= tape_.num_shared_groups_;
    }

    // Each rank quantizes some rows of the inputs of a matmul. A rank that fills a buffer has passed a barrier that all
    // ranks came to when they had multiplied with its last contents.
    Activations prepare_together(const Weight& w, const View& from, bool logits_only, int64_t num_rows) {
        QuantizedGroup* groups = tape_.shared_groups_ + num_divided_++ % 2 * tape_.num_shared_groups_;
        const int64_t rank = tape_.ranks_->rank(), size = tape_.ranks_->size();
        const int64_t begin = num_rows * rank / size, end = num_rows * (rank + 1) / size;
        const Range part = pool_.share(end - begin), rows{begin + part.first, begin + part.last};
        if (pool_.num_threads > 1) wait();  // other threads have written some of them
        const auto [x, stride] = gather_rows(from, logits_only, rows);
        const GroupOrder order(num_rows, kernels_.matrix.row_block, w.num_inputs);
        for (int64_t r = rows.first; r < rows.last; ++r)
            kernels_.matrix.quantize(x + r * stride, w.num_inputs, groups + order.start(r), order.block_rows);
        wait();
        if (pool_.thread == 0) tape_.ranks_->barrier();
        wait();
        return {nullptr, 0, groups, nullptr};
    }

    // Prepares this thread's share of the inputs of a matmul, for this segment and those with the same input order and
    // threshold.
    Activations prepare(const Weight& w, const PackedMatrix& segment, const View& from, bool logits_only,
                        int64_t num_rows) {
        const Range rows = pool_.share(num_rows);
        const auto [x, stride] = gather_rows(from, logits_only, rows, segment.input_order);
        const float threshold = segment.threshold;
        QuantizedGroup* groups = tape_.groups_.get();
        Fp16Group* fp16 = tape_.fp16_groups_.get();
        const MatrixKernels& matrix = kernels_.matrix;
        const GroupOrder partials(num_rows, matrix.row_block, w.num_inputs);
        if (std::any_of(w.segments.begin(), w.segments.end(), [](const PackedMatrix& m) { return m.is_integer(); }))
            for (int64_t r = rows.first; r < rows.last; ++r) {
                const float* row = x + r * stride;
                if (threshold > 0) row = tape_.outliers_.without(row, w.num_inputs, threshold, r, pool_.thread);
                matrix.quantize(row, w.num_inputs, groups + partials.start(r), partials.block_rows);
            }
        if (std::any_of(w.segments.begin(), w.segments.end(),
                        [&](const PackedMatrix& m) { return matrix.reads_fp16(m); }))
            for (int64_t r = rows.first; r < rows.last; ++r)
                matrix.to_fp16(x + r * stride, w.num_inputs, fp16 + partials.start(r), partials.block_rows);
        return {x, stride, groups, fp16};
    }

    void run(const Attention& op) {
        prefetch_ = KVPrefetch();
        attention_.run(op);
    }

    Tape& tape_;
    const Step& step_;
    const ThreadPool pool_;
    const Kernels& kernels_;
    PagedAttention attention_;
    KVPrefetch prefetch_;
    int64_t num_divided_ = 0;  // matmuls of this step whose rows ranks have quantized together
};

void Tape::execute(const Step& step, const ThreadPool& pool) { TapeExecutor(*this, step, pool).run(); }

}  // namespace quire
