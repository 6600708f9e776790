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

}  // namespace

Experts::Experts(std::vector<Segments> given, const float* biases) : matrices(std::move(given)), biases(biases) {
    for (const PackedMatrix& segment : matrices.front()) {
        num_inputs = segment.num_inputs;
        num_outputs += segment.num_outputs;
    }
    for (const Segments& segments : matrices) have_threshold = have_threshold || threshold_of(segments) > 0;
}

void MixtureRunner::reserve(const Routing& routing, const Experts& gate_up, const Experts& down, int64_t max_rows,
                            int num_threads) {
    const int64_t num_routes = max_rows * routing.top_k;
    scratch_.reserve(num_threads * routing_scratch(routing.num_experts));
    ids_.reserve(num_routes);
    weights_.reserve(num_routes);
    places_.reserve(num_routes);
    routes_.reserve(num_routes);
    first_.resize(std::max(first_.size(), size_t(routing.num_experts) + 1));
    padded_.resize(std::max(padded_.size(), size_t(routing.num_experts)));
    hidden_.reserve(num_routes * gate_up.num_outputs);
    parts_.reserve(num_routes * down.num_outputs);
    const int64_t padding = routing.num_experts * kernels().matrix.row_block;
    size_t num_segments = 0;
    for (const Experts* experts : {&gate_up, &down}) {
        const int64_t num_groups = (experts->num_inputs + kGroupInputs - 1) / kGroupInputs;
        prepared_.floats.reserve(num_routes * experts->num_inputs);
        prepared_.groups.reserve((num_routes + padding) * num_groups);
        prepared_.halves.reserve((num_routes + padding) * num_groups);
        if (experts->have_threshold) outliers_.reserve(num_routes, experts->num_inputs, num_threads);
        reordered_stride_ = std::max(reordered_stride_, experts->num_inputs);
        for (const Segments& segments : experts->matrices) num_segments += segments.size();
    }
    reordered_.reserve(num_threads * reordered_stride_);
    if (counters_.size() < num_segments * num_threads)
        counters_ = std::vector<std::atomic<int64_t>>(num_segments * num_threads);
}

void MixtureRunner::run(const Routing& routing, const Experts& gate_up, const Experts& down, Activation activation,
                        Rows x, Rows logits, Rows out, int64_t num_rows, const Team& team, uint8_t* panel) {
    const OpKernels& ops = kernels().ops;
    const int64_t top_k = routing.top_k;
    const Range rows = team.share(num_rows), routes = team.share(num_rows * top_k);
    float* scratch = scratch_.get() + team.thread * routing_scratch(routing.num_experts);
    for (int64_t r = rows.first; r < rows.last; ++r)
        choose_experts(routing, logits.at(r), scratch, ids_.get() + r * top_k, weights_.get() + r * top_k);
    team.barrier();
    if (team.thread == 0) sort_routes(routing, num_rows);
    team.barrier();
    for (int64_t place = routes.first; place < routes.last; ++place)
        prepare(gate_up, place, x.at(routes_.get()[place] / top_k), team.thread);
    team.barrier();
    size_t num_segments = 0;
    for (const Segments& segments : gate_up.matrices) num_segments += segments.size();
    multiply(gate_up, hidden_.get(), counters_.data(), team, panel);
    team.barrier();
    for (int64_t place = routes.first; place < routes.last; ++place) {
        float* hidden = hidden_.get() + place * gate_up.num_outputs;
        add_bias(gate_up, place, hidden);
        ops.activate_and_mul(activation, hidden, down.num_inputs, hidden);
        prepare(down, place, hidden, team.thread);
    }
    team.barrier();
    multiply(down, parts_.get(), counters_.data() + num_segments * team.num_threads, team, panel);
    team.barrier();
    for (int64_t r = rows.first; r < rows.last; ++r) {
        std::fill_n(out.at(r), down.num_outputs, 0.0f);
        for (int64_t route = r * top_k; route < (r + 1) * top_k; ++route) {
            float* part = parts_.get() + places_.get()[route] * down.num_outputs;
            add_bias(down, places_.get()[route], part);
            ops.add_scaled(part, weights_.get()[route], down.num_outputs, out.at(r));
        }
    }
}

// By one thread, while the others wait.
void MixtureRunner::sort_routes(const Routing& routing, int64_t num_rows) {
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
        const int64_t place = next_[ids_.get()[route]]++;
        places_.get()[route] = int32_t(place);
        routes_.get()[place] = int32_t(route);
    }
    for (std::atomic<int64_t>& counter : counters_) counter.store(0, std::memory_order_relaxed);
}

// A row becomes the input of its expert's product.
void MixtureRunner::prepare(const Experts& experts, int64_t place, const float* row, int thread) {
    const MatrixKernels& matrix = kernels().matrix;
    const int64_t expert = ids_.get()[routes_.get()[place]], num_inputs = experts.num_inputs;
    const Segments& segments = experts.matrices[expert];
    if (const int32_t* inputs = segments.front().input_order) {
        float* reordered = reordered_.get() + thread * reordered_stride_;
        for (int64_t k = 0; k < num_inputs; ++k) reordered[k] = row[inputs[k]];
        row = reordered;
    }
    const GroupOrder order(first_[expert + 1] - first_[expert], matrix.row_block, num_inputs);
    const int64_t start = padded_[expert] * order.num_groups + order.start(place - first_[expert]);
    const float threshold = threshold_of(segments);
    const float* rest = row;
    if (experts.have_threshold) rest = outliers_.without(row, num_inputs, threshold, place, thread);
    if (any_segment(segments, [&](const PackedMatrix& m) { return m.is_integer(); }))
        matrix.quantize(rest, num_inputs, prepared_.groups.get() + start, order.block_rows);
    if (any_segment(segments, [&](const PackedMatrix& m) { return matrix.reads_halves(m); }))
        matrix.to_halves(row, num_inputs, prepared_.halves.get() + start, order.block_rows);
    const auto reads_floats = [&](const PackedMatrix& m) { return !m.is_integer() && !matrix.reads_halves(m); };
    if (threshold > 0 || any_segment(segments, reads_floats))
        std::copy_n(row, num_inputs, prepared_.floats.get() + place * num_inputs);
}

void MixtureRunner::add_bias(const Experts& experts, int64_t place, float* row) const {
    if (!experts.biases) return;
    const float* bias = experts.biases + ids_.get()[routes_.get()[place]] * experts.num_outputs;
    for (int64_t i = 0; i < experts.num_outputs; ++i) row[i] += bias[i];
}

// Every expert's routes with its matrix: out [routes, outputs], in the order of experts. Threads share each product,
// and go on to the next one without waiting; inputs that are apart come last.
void MixtureRunner::multiply(const Experts& experts, float* out, std::atomic<int64_t>* counters, const Team& team,
                             uint8_t* panel) {
    const MatrixKernels& matrix = kernels().matrix;
    const int64_t num_groups = (experts.num_inputs + kGroupInputs - 1) / kGroupInputs;
    const bool apart = experts.have_threshold && outliers_.any(first_[experts.matrices.size()]);
    for (size_t e = 0; e < experts.matrices.size(); ++e) {
        const int64_t first = first_[e], num_rows = first_[e + 1] - first;
        int64_t column = 0;
        for (const PackedMatrix& segment : experts.matrices[e]) {
            if (num_rows) {
                const Activations a{prepared_.floats.get() + first * experts.num_inputs, experts.num_inputs,
                                    prepared_.groups.get() + padded_[e] * num_groups,
                                    prepared_.halves.get() + padded_[e] * num_groups};
                const Worker worker{team.thread, team.num_threads, panel, counters};
                matrix.multiply(segment, a, num_rows, out + first * experts.num_outputs + column, experts.num_outputs,
                                worker);
            }
            column += segment.num_outputs;
            counters += team.num_threads;
        }
    }
    if (!apart) return;
    team.barrier();
    for (size_t e = 0; e < experts.matrices.size(); ++e) {
        const int64_t first = first_[e], num_rows = first_[e + 1] - first;
        float* to = out + first * experts.num_outputs;
        for (const PackedMatrix& segment : experts.matrices[e]) {
            if (segment.threshold > 0)
                outliers_.add(segment, prepared_.floats.get() + first * experts.num_inputs, experts.num_inputs, first,
                              num_rows, to, experts.num_outputs, team);
            to += segment.num_outputs;
        }
    }
}

}  // namespace quire
