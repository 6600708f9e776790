// How a thread carries out the ops of a tape, in one step.

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "paged_attention.h"

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
    Walk(Tape& tape, const Step& step, const Team& team)
        : tape_(tape), step_(step), team_(team), kernels_(kernels()), attention_(tape, step, team_) {}

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
        if (op && step_.num_tokens == 1) ahead_ = attention_.first_of_mine(*op);
    }

    float* row(const View& v, int64_t r) const { return tape_.row(v, r); }
    const float* input(const View& v, const View& out, int64_t r) const { return tape_.input(v, out, r, step_); }
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
        bool apart = false;  // some inputs are
        for (const PackedMatrix& segment : w.segments) {
            const PackedMatrix* before = &segment == w.segments.data() ? nullptr : &segment - 1;
            if (!before || segment.input_order != before->input_order || segment.threshold != before->threshold) {
                if (before) meet();
                a = prepared(w, segment, from, few, num_rows);
                meet();
                apart = segment.threshold > 0 && tape_.outliers_.any(num_rows);  // before anybody goes on to the next
            }
            const Worker worker{team_.thread, team_.num_threads, tape_.panels_.get() + team_.thread * kPanelBytes,
                                &tape_.counters_[taken]};
            kernels_.matrix.multiply(segment, a, num_rows, out + column, out_stride, worker);
            if (apart) {
                meet();
                tape_.outliers_.add(segment, a.x, a.stride, 0, num_rows, out + column, out_stride, team_);
            }
            column += segment.num_outputs;
            taken += tape_.num_threads_;
        }
        if (w.bias == nullptr) return;
        meet();
        for (int64_t r = rows.first; r < rows.last; ++r)
            kernels_.ops.add(out + r * out_stride, w.bias, w.num_outputs, out + r * out_stride);
    }

    // The rows of a product as this segment and those like it read them; this thread does its share.
    Activations prepared(const Weight& w, const PackedMatrix& segment, const View& from, bool few, int64_t num_rows) {
        const Range rows = team_.share(num_rows);
        const auto [x, stride] = gathered(from, few, rows, segment.input_order);
        const float threshold = segment.threshold;
        QuantizedGroup* groups = tape_.groups_.get();
        HalfGroup* halves = tape_.halves_.get();
        const MatrixKernels& matrix = kernels_.matrix;
        const GroupOrder places(num_rows, matrix.row_block, w.num_inputs);
        if (std::any_of(w.segments.begin(), w.segments.end(), [](const PackedMatrix& m) { return m.is_integer(); }))
            for (int64_t r = rows.first; r < rows.last; ++r) {
                const float* row = x + r * stride;
                if (threshold > 0) row = tape_.outliers_.without(row, w.num_inputs, threshold, r, team_.thread);
                matrix.quantize(row, w.num_inputs, groups + places.start(r), places.block_rows);
            }
        if (std::any_of(w.segments.begin(), w.segments.end(),
                        [&](const PackedMatrix& m) { return matrix.reads_halves(m); }))
            for (int64_t r = rows.first; r < rows.last; ++r)
                matrix.to_halves(x + r * stride, w.num_inputs, halves + places.start(r), places.block_rows);
        return {x, stride, groups, halves};
    }

    void run(const Attention& op) {
        ahead_ = Ahead();
        attention_.run(op);
    }

    Tape& tape_;
    const Step& step_;
    const Team team_;
    const Kernels& kernels_;
    AttentionWalk attention_;
    Ahead ahead_;
};

void Tape::walk(const Step& step, const Team& team) { Walk(*this, step, team).run(); }

}  // namespace quire
