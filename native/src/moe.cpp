#include "moe.h"

#include <algorithm>
#include <utility>

namespace quire {

namespace {

template <class Predicate>
bool any_segment(const Segments& segments, const Predicate& predicate) {
    return std::any_of(segments.begin(), segments.end(), predicate);
}

float threshold_of(const Segments& segments) {
    float most = 0;
    for (const PackedMatrix& segment : segments) most = std::max(most, segment.threshold);
    return most;
}

// All threads of all ranks wait for each other.
void rank_barrier(const ThreadPool& pool, RankGroup* group) {
    pool.barrier();
    if (pool.thread == 0) group->barrier();
    pool.barrier();
}

}  // namespace

Experts::Experts(std::vector<Segments> given, const float* biases, int64_t first)
    : matrices(std::move(given)), biases(biases), first(first) {
    for (const PackedMatrix& segment : matrices.front()) {
        num_inputs = segment.num_inputs;
        num_outputs += segment.num_outputs;
    }
    for (const Segments& segments : matrices) have_threshold = have_threshold || threshold_of(segments) > 0;
}

void MoeRunner::reserve(const Routing& routing, const Experts& gate_up, const Experts& down, int64_t max_rows,
                        int num_threads) {
    const int64_t num_routes = max_rows * routing.top_k;
    scratch_.reserve(num_threads * routing_scratch(routing.num_experts));
    ids_.reserve(num_routes);
    weights_.reserve(num_routes);
    positions_.reserve(num_routes);
    routes_.reserve(num_routes);
    first_.resize(std::max(first_.size(), size_t(routing.num_experts) + 1));
    padded_.resize(std::max(padded_.size(), size_t(routing.num_experts)));
    hidden_.reserve(num_routes * gate_up.num_outputs);
    expert_outputs_.reserve(num_routes * down.num_outputs);
    const int64_t padding = routing.num_experts * kernels().matrix.row_block;
    size_t num_segments = 0;
    for (const Experts* experts : {&gate_up, &down}) {
        const int64_t num_groups = (experts->num_inputs + kGroupInputs - 1) / kGroupInputs;
        prepared_.floats.reserve(num_routes * experts->num_inputs);
        prepared_.groups.reserve((num_routes + padding) * num_groups);
        prepared_.fp16.reserve((num_routes + padding) * num_groups);
        if (experts->have_threshold) outliers_.reserve(num_routes, experts->num_inputs, num_threads);
        reordered_stride_ = std::max(reordered_stride_, experts->num_inputs);
        for (const Segments& segments : experts->matrices) num_segments += segments.size();
    }
    reordered_.reserve(num_threads * reordered_stride_);
    if (routing.weigh_inputs) weighed_.reserve(num_threads * reordered_stride_);
    if (counters_.size() < num_segments * num_threads)
        counters_ = std::vector<std::atomic<int64_t>>(num_segments * num_threads);
}

void MoeRunner::run(const Routing& routing, const Experts& gate_up, const Experts& down, Activation activation, Rows x,
                    Rows logits, Rows chosen, Rows out, int64_t num_rows, const ThreadPool& pool, uint8_t* panel,
                    const SharedRoutes& shared) {
    const OpKernels& ops = kernels().ops;
    const int64_t top_k = routing.top_k;
    const Range rows = pool.share(num_rows);
    float* scratch = scratch_.get() + pool.thread * routing_scratch(routing.num_experts);
    for (int64_t r = rows.first; r < rows.last; ++r)
        select_experts(routing, logits.at(r), chosen.base ? chosen.at(r) : nullptr, scratch, ids_.get() + r * top_k,
                       weights_.get() + r * top_k);
    pool.barrier();
    if (pool.thread == 0) sort_routes(routing, num_rows);
    pool.barrier();
    const Range routes = own_routes(gate_up, pool);
    for (int64_t position = routes.first; position < routes.last; ++position) {
        const int64_t route = routes_.get()[position];
        const float* row = x.at(route / top_k);
        if (routing.weigh_inputs) {
            float* weighed = weighed_.get() + pool.thread * reordered_stride_;
            ops.scale(row, weights_.get()[route], gate_up.num_inputs, weighed);
            row = weighed;
        }
        prepare(gate_up, position, row, pool.thread);
    }
    pool.barrier();
    size_t num_segments = 0;
    for (const Segments& segments : gate_up.matrices) num_segments += segments.size();
    multiply(gate_up, hidden_.get(), counters_.data(), pool, panel);
    pool.barrier();
    const auto activated = [&](int64_t position) {
        return shared.hidden ? shared.hidden + position * down.num_inputs
                             : hidden_.get() + position * gate_up.num_outputs;
    };
    const bool is_gated = shared.hidden || gate_up.num_outputs != down.num_inputs;
    for (int64_t position = routes.first; position < routes.last; ++position) {
        float* hidden = hidden_.get() + position * gate_up.num_outputs;
        add_bias(gate_up, position, hidden);
        if (is_gated)
            activate(routing, activation, hidden, gate_up.num_outputs / 2, activated(position) + shared.first_hidden);
        else
            ops.activate(activation, hidden, gate_up.num_outputs, activated(position));
        if (!shared.hidden) prepare(down, position, hidden, pool.thread);
    }
    if (shared.hidden) {
        rank_barrier(pool, shared.group);
        for (int64_t position = routes.first; position < routes.last; ++position)
            prepare(down, position, activated(position), pool.thread);
    }
    pool.barrier();
    float* outputs = shared.outputs ? shared.outputs : expert_outputs_.get();
    multiply(down, outputs, counters_.data() + num_segments * pool.num_threads, pool, panel);
    pool.barrier();
    if (shared.outputs) {  // a bias is where its expert is
        for (int64_t position = routes.first; position < routes.last; ++position)
            add_bias(down, position, outputs + position * down.num_outputs);
        rank_barrier(pool, shared.group);
    }
    for (int64_t r = rows.first; r < rows.last; ++r) {
        std::fill_n(out.at(r), down.num_outputs, 0.0f);
        for (int64_t route = r * top_k; route < (r + 1) * top_k; ++route) {
            if (ids_.get()[route] >= routing.num_experts - routing.num_zero) {
                ops.add_scaled(x.at(r), weights_.get()[route], down.num_outputs, out.at(r));
                continue;
            }
            float* output = outputs + positions_.get()[route] * down.num_outputs;
            if (!shared.outputs) add_bias(down, positions_.get()[route], output);
            const float weight = routing.weigh_inputs ? 1.0f : weights_.get()[route];
            ops.add_scaled(output, weight, down.num_outputs, out.at(r));
        }
    }
}

// hidden [2 * num_outputs] -> out [num_outputs], which may be its first half.
void MoeRunner::activate(const Routing& routing, Activation activation, float* hidden, int64_t num_outputs,
                         float* out) const {
    const OpKernels& ops = kernels().ops;
    if (routing.limit == 0.0f) return ops.activate_and_mul(activation, hidden, num_outputs, out);
    ops.activate(activation, hidden, num_outputs, hidden);
    const float gate_limit = routing.gate_limit == 0.0f ? routing.limit : routing.gate_limit;
    ops.clamp(hidden, gate_limit, num_outputs, hidden);
    ops.clamp(hidden + num_outputs, routing.limit, num_outputs, hidden + num_outputs);
    ops.mul(hidden, hidden + num_outputs, num_outputs, out);
}

// Called by one thread, while the others wait.
void MoeRunner::sort_routes(const Routing& routing, int64_t num_rows) {
    const int64_t num_routes = num_rows * routing.top_k, row_block = kernels().matrix.row_block;
    std::fill(first_.begin(), first_.end(), 0);
    for (int64_t route = 0; route < num_routes; ++route) ++first_[ids_.get()[route] + 1];
    int64_t padded = 0;
    for (int64_t e = 0; e < routing.num_experts; ++e) {
        padded_[e] = padded;
        padded += GroupOrder(first_[e + 1], row_block, kGroupInputs).size(first_[e + 1]);
        first_[e + 1] += first_[e];
    }
    next_.assign(first_.begin(), first_.end());
    for (int64_t route = 0; route < num_routes; ++route) {
        const int64_t position = next_[ids_.get()[route]]++;
        positions_.get()[route] = int32_t(position);
        routes_.get()[position] = int32_t(route);
    }
    for (std::atomic<int64_t>& counter : counters_) counter.store(0, std::memory_order_relaxed);
}

// This thread's share of the sorted routes of the experts that are here.
Range MoeRunner::own_routes(const Experts& experts, const ThreadPool& pool) const {
    const int64_t first = first_[experts.first], last = first_[experts.first + experts.count()];
    const Range share = pool.share(last - first);
    return {first + share.first, first + share.last};
}

// Prepares a row as the input of its expert's matmul.
void MoeRunner::prepare(const Experts& experts, int64_t position, const float* row, int thread) {
    const MatrixKernels& matrix = kernels().matrix;
    const int64_t expert = ids_.get()[routes_.get()[position]], num_inputs = experts.num_inputs;
    const Segments& segments = experts.matrices[expert - experts.first];
    if (const int32_t* inputs = segments.front().input_order) {
        float* reordered = reordered_.get() + thread * reordered_stride_;
        for (int64_t k = 0; k < num_inputs; ++k) reordered[k] = row[inputs[k]];
        row = reordered;
    }
    const GroupOrder order(first_[expert + 1] - first_[expert], matrix.row_block, num_inputs);
    const int64_t start = padded_[expert] * order.num_groups + order.start(position - first_[expert]);
    const float threshold = threshold_of(segments);
    const float* rest = row;
    if (experts.have_threshold) rest = outliers_.without(row, num_inputs, threshold, position, thread);
    if (any_segment(segments, [&](const PackedMatrix& m) { return m.is_integer(); }))
        matrix.quantize(rest, num_inputs, prepared_.groups.get() + start, order.block_rows);
    if (any_segment(segments, [&](const PackedMatrix& m) { return matrix.reads_fp16(m); }))
        matrix.to_fp16(row, num_inputs, prepared_.fp16.get() + start, order.block_rows);
    const auto reads_floats = [&](const PackedMatrix& m) { return !m.is_integer() && !matrix.reads_fp16(m); };
    if (threshold > 0 || any_segment(segments, reads_floats))
        std::copy_n(row, num_inputs, prepared_.floats.get() + position * num_inputs);
}

void MoeRunner::add_bias(const Experts& experts, int64_t position, float* row) const {
    if (!experts.biases) return;
    const int64_t expert = ids_.get()[routes_.get()[position]] - experts.first;
    const float* bias = experts.biases + expert * experts.num_outputs;
    for (int64_t i = 0; i < experts.num_outputs; ++i) row[i] += bias[i];
}

// Multiplies every expert's routes with its matrix: out [routes, outputs], sorted by expert. Threads share each matmul
// and go on to the next one without a barrier. Outliers are added last.
void MoeRunner::multiply(const Experts& experts, float* out, std::atomic<int64_t>* counters, const ThreadPool& pool,
                         uint8_t* panel) {
    const MatrixKernels& matrix = kernels().matrix;
    const int64_t num_groups = (experts.num_inputs + kGroupInputs - 1) / kGroupInputs;
    const int64_t end = experts.first + experts.count();
    const bool has_outliers = experts.have_threshold && outliers_.any(first_[experts.first], first_[end]);
    for (int64_t e = experts.first; e < end; ++e) {
        const int64_t first = first_[e], num_rows = first_[e + 1] - first;
        int64_t column = 0;
        for (const PackedMatrix& segment : experts.matrices[e - experts.first]) {
            if (num_rows) {
                const Activations a{prepared_.floats.get() + first * experts.num_inputs, experts.num_inputs,
                                    prepared_.groups.get() + padded_[e] * num_groups,
                                    prepared_.fp16.get() + padded_[e] * num_groups};
                const Worker worker{pool.thread, pool.num_threads, panel, counters};
                matrix.multiply(segment, a, num_rows, out + first * experts.num_outputs + column, experts.num_outputs,
                                worker);
            }
            column += segment.num_outputs;
            counters += pool.num_threads;
        }
    }
    if (!has_outliers) return;
    pool.barrier();
    for (int64_t e = experts.first; e < end; ++e) {
        const int64_t first = first_[e], num_rows = first_[e + 1] - first;
        float* to = out + first * experts.num_outputs;
        for (const PackedMatrix& segment : experts.matrices[e - experts.first]) {
            if (segment.threshold > 0)
                outliers_.add(segment, prepared_.floats.get() + first * experts.num_inputs, experts.num_inputs, first,
                              num_rows, to, experts.num_outputs, pool);
            to += segment.num_outputs;
        }
    }
}

}  // namespace quire
