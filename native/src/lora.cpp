#include "lora.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace quire {

AdapterSlots::AdapterSlots(int64_t num_inputs, int64_t num_outputs, int64_t num_slots, int64_t max_hidden,
                           int64_t max_parts)
    : num_inputs(num_inputs),
      num_outputs(num_outputs),
      max_hidden(max_hidden),
      max_parts(max_parts),
      slots_(size_t(num_slots)) {}

void AdapterSlots::put(int64_t slot, LoraAdapter adapter) {
    const auto expect = [](bool holds, const char* what) {
        if (!holds) throw std::invalid_argument(what);
    };
    expect(slot >= 0 && slot < num_slots(), "there is no such adapter slot");
    expect(int64_t(adapter.parts.size()) <= max_parts, "a LoRA adapter has more parts than its layer");
    if (!adapter.parts.empty()) {
        expect(adapter.a.num_inputs == num_inputs && !adapter.a.is_integer(),
               "LoRA A does not have the inputs of this layer");
        expect(adapter.a.num_outputs <= max_hidden, "LoRA A has more rows than the slot has room for");
        adapter.a.fp16_sums = false;
    }
    for (LoraPart& part : adapter.parts) {
        expect(part.first_output >= 0 && part.first_output + part.b.num_outputs <= num_outputs && !part.b.is_integer(),
               "LoRA B does not have the outputs of this layer");
        expect(part.first_hidden >= 0 && part.first_hidden + part.b.num_inputs <= adapter.a.num_outputs,
               "LoRA A and B have different ranks");
        part.b.fp16_sums = false;
    }
    slots_[slot] = std::move(adapter);
}

void LoraRunner::reserve(const AdapterSlots& slots, int64_t max_rows, int num_threads) {
    gathered_.reserve(max_rows * slots.num_inputs);
    hidden_.reserve(max_rows * slots.max_hidden);
    deltas_.reserve(max_rows * slots.num_outputs);
    num_slots_ = std::max(num_slots_, slots.num_slots());
    num_threads_ = num_threads;
    const size_t num_matmuls = size_t(slots.num_slots() * (1 + slots.max_parts) * num_threads);
    if (counters_.size() < num_matmuls) counters_ = std::vector<std::atomic<int64_t>>(num_matmuls);
}

void LoraRunner::begin(const int32_t* adapters, int64_t num_tokens, const int32_t* logit_rows, int64_t num_logits) {
    if (num_slots_ == 0) return;
    token_order_.sort(adapters ? num_tokens : 0, num_slots_, [&](int64_t r) { return adapters[r]; });
    logit_order_.sort(adapters ? num_logits : 0, num_slots_, [&](int64_t r) { return adapters[logit_rows[r]]; });
}

template <class SlotOf>
void LoraRunner::Order::sort(int64_t num_rows, int64_t num_slots, const SlotOf& slot_of) {
    first.assign(size_t(num_slots) + 1, 0);
    contiguous.assign(size_t(num_slots), true);
    positions.assign(size_t(num_rows), -1);
    for (int64_t r = 0; r < num_rows; ++r)
        if (slot_of(r) >= 0) ++first[size_t(slot_of(r)) + 1];
    for (int64_t s = 0; s < num_slots; ++s) first[s + 1] += first[s];
    rows.resize(size_t(first[num_slots]));
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t r = 0; r < num_rows; ++r) {
        const int32_t slot = slot_of(r);
        if (slot < 0) continue;
        const int64_t position = next[slot]++;
        if (position > first[slot] && rows[position - 1] != r - 1) contiguous[slot] = false;
        rows[position] = int32_t(r);
        positions[r] = int32_t(position);
    }
}

void LoraRunner::run(const AdapterSlots& slots, Rows x, Rows y, bool logits_only, const ThreadPool& pool,
                     uint8_t* panel) {
    const Order& order = logits_only ? logit_order_ : token_order_;
    const OpKernels& ops = kernels().ops;
    const MatrixKernels& matrix = kernels().matrix;
    const int64_t num_inputs = slots.num_inputs, num_outputs = slots.num_outputs, max_hidden = slots.max_hidden;
    const auto adds = [&](int64_t slot) { return order.count(slot) > 0 && !slots.at(slot).parts.empty(); };
    const auto in_place = [&](int64_t slot) { return !x.index && order.contiguous[slot]; };
    bool any = false, gathers = false;
    for (int64_t s = 0; s < slots.num_slots(); ++s) {
        any = any || adds(s);
        gathers = gathers || (adds(s) && !in_place(s));
    }
    if (!any) return;  // the same decision in all threads
    const auto worker = [&](int64_t slot, int64_t matmul) {
        const int64_t at = (slot * (1 + slots.max_parts) + matmul) * num_threads_;
        return Worker{pool.thread, pool.num_threads, panel, &counters_[at]};
    };
    if (gathers) {
        for (int64_t s = 0; s < slots.num_slots(); ++s) {
            if (!adds(s) || in_place(s)) continue;
            const Range mine = pool.share(order.count(s));
            for (int64_t position = order.first[s] + mine.first; position < order.first[s] + mine.last; ++position)
                std::copy_n(x.at(order.rows[position]), num_inputs, gathered_.get() + position * num_inputs);
        }
        pool.barrier();
    }
    for (int64_t s = 0; s < slots.num_slots(); ++s) {
        if (!adds(s)) continue;
        const int64_t first = order.first[s];
        const Activations a = in_place(s)
                                  ? Activations{x.at(order.rows[first]), x.stride, nullptr, nullptr}
                                  : Activations{gathered_.get() + first * num_inputs, num_inputs, nullptr, nullptr};
        matrix.multiply(slots.at(s).a, a, order.count(s), hidden_.get() + first * max_hidden, max_hidden, worker(s, 0));
    }
    pool.barrier();
    for (int64_t s = 0; s < slots.num_slots(); ++s) {
        if (!adds(s)) continue;
        const int64_t first = order.first[s];
        for (size_t p = 0; p < slots.at(s).parts.size(); ++p) {
            const LoraPart& part = slots.at(s).parts[p];
            const Activations a{hidden_.get() + first * max_hidden + part.first_hidden, max_hidden, nullptr, nullptr};
            matrix.multiply(part.b, a, order.count(s), deltas_.get() + first * num_outputs + part.first_output,
                            num_outputs, worker(s, 1 + int64_t(p)));
        }
    }
    pool.barrier();
    if (pool.thread == 0)
        for (std::atomic<int64_t>& counter : counters_) counter.store(0, std::memory_order_relaxed);
    const Range rows = pool.share(int64_t(order.positions.size()));
    for (int64_t r = rows.first; r < rows.last; ++r) {
        const int64_t position = order.positions[r];
        if (position < 0) continue;
        const auto after = std::upper_bound(order.first.begin(), order.first.end(), position);
        for (const LoraPart& part : slots.at(after - order.first.begin() - 1).parts)
            ops.add_scaled(deltas_.get() + position * num_outputs + part.first_output, part.scale, part.b.num_outputs,
                           y.at(r) + part.first_output);
    }
}

}  // namespace quire
