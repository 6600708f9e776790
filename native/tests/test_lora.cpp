// LoRA by every table of this CPU and with several numbers of threads: against double precision, and bit for bit
// against the same rows alone.

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "lora.h"
#include "pack.h"
#include "samples.h"

namespace {

using namespace quire;
using namespace quire::tests;

constexpr int64_t kInputs = 77, kOutputs = 50, kRows = 23, kSlots = 3;
constexpr int64_t kFirst[] = {0, 33}, kSizes[] = {33, 17};  // parts
constexpr int64_t kRanks[kSlots][2] = {{5, 16}, {64, 0}, {0, 1}};
constexpr int64_t kMaxHidden = 128;

std::vector<float> random_floats(int64_t n, Random& random) {
    std::vector<float> all(n);
    for (float& x : all) x = random.uniform();
    return all;
}

std::unique_ptr<Matrix> packed(const std::vector<float>& values, int64_t rows, int64_t columns) {
    const auto* data = reinterpret_cast<const uint8_t*>(values.data());
    return std::make_unique<Matrix>(Storage::F32, rows_in(data, rows, columns * int64_t(sizeof(float))), columns);
}

// The matrices of each adapter, and their slots.
struct Adapters {
    AdapterSlots slots{kInputs, kOutputs, kSlots, kMaxHidden, 2};
    std::vector<float> a[kSlots][2], b[kSlots][2];
    std::vector<std::unique_ptr<Matrix>> held;

    explicit Adapters(Random& random) {
        for (int64_t s = 0; s < kSlots; ++s) {
            LoraAdapter adapter{};
            std::vector<float> all;
            for (int p = 0; p < 2; ++p) {
                const int64_t rank = kRanks[s][p];
                if (!rank) continue;
                a[s][p] = random_floats(rank * kInputs, random);
                b[s][p] = random_floats(kSizes[p] * rank, random);
                held.push_back(packed(b[s][p], kSizes[p], rank));
                adapter.parts.push_back({held.back()->packed(), kFirst[p], int64_t(all.size()) / kInputs, scale(s, p)});
                all.insert(all.end(), a[s][p].begin(), a[s][p].end());
            }
            held.push_back(packed(all, int64_t(all.size()) / kInputs, kInputs));
            adapter.a = held.back()->packed();
            slots.put(s, adapter);
        }
    }

    static float scale(int64_t slot, int part) { return 0.5f * float(slot + 1) - float(part); }

    double expected(int64_t slot, const float* x, int64_t output) const {
        const int p = output >= kFirst[1];
        double sum = 0;
        for (int64_t r = 0; slot >= 0 && r < kRanks[slot][p]; ++r) {
            double hidden = 0;
            for (int64_t k = 0; k < kInputs; ++k) hidden += double(a[slot][p][r * kInputs + k]) * x[k];
            sum += b[slot][p][(output - kFirst[p]) * kRanks[slot][p] + r] * hidden;
        }
        return slot < 0 ? 0 : sum * scale(slot, p);
    }
};

std::vector<float> lora_delta(const AdapterSlots& slots, std::vector<float> x, const std::vector<int32_t>& adapters,
                              int threads) {
    const int64_t rows = int64_t(adapters.size());
    std::vector<float> y(rows * kOutputs, 0.0f);
    Buffer<uint8_t> panels;
    panels.reserve(threads * kPanelBytes);
    LoraRunner runner;
    runner.reserve(slots, rows, threads);
    runner.begin(adapters.data(), rows, nullptr, 0);
    run_in_pool(threads, [&](const ThreadPool& pool) {
        runner.run(slots, {x.data(), kInputs, nullptr}, {y.data(), kOutputs, nullptr}, false, pool,
                   panels.get() + pool.thread * kPanelBytes);
    });
    return y;
}

}  // namespace

void test_lora(int& passed, int& failed) {
    Random random(3);
    const Adapters adapters(random);
    const std::vector<float> x = random_floats(kRows * kInputs, random);
    std::vector<int32_t> slots;
    for (int64_t r = 0; r < kRows; ++r) slots.push_back(int32_t(random.bits() % (kSlots + 1)) - 1);
    for (const char* const* isa = available_isas(); *isa; ++isa) {
        use_isa(*isa);
        const std::vector<float> all = lora_delta(adapters.slots, x, slots, 1);
        bool near = true, same = lora_delta(adapters.slots, x, slots, 3) == all;
        for (int64_t r = 0; r < kRows; ++r) {
            const float* row = x.data() + r * kInputs;
            const std::vector<float> alone = lora_delta(adapters.slots, {row, row + kInputs}, {slots[r]}, 2);
            same = same && std::memcmp(alone.data(), all.data() + r * kOutputs, sizeof(float) * kOutputs) == 0;
            for (int64_t o = 0; o < kOutputs; ++o)
                near = near && std::fabs(all[r * kOutputs + o] - adapters.expected(slots[r], row, o)) < 1e-4;
        }
        near ? ++passed : ++failed;
        same ? ++passed : ++failed;
        if (!near || !same) std::printf("failed: lora, table %s: near %d, same %d\n", *isa, near, same);
    }
    use_isa(available_isas()[0]);
}
