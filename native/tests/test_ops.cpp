// Norms and activations of every table of this CPU against `plain`: they differ only by rounding. (Against fp64:
// tests/ops/test_native_ops.py.) Sums of weights do not differ.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <vector>

#include "kernels.h"
#include "samples.h"

namespace {

using namespace quire;
using namespace quire::tests;

constexpr int64_t kSizes[] = {1, 7, 8, 13, 64, 577};

using Run = std::function<std::vector<float>(const std::vector<float>& x)>;  // by the table in use

std::vector<std::pair<const char*, Run>> runs(int64_t n) {
    std::vector<std::pair<const char*, Run>> all;
    const auto with_out = [&](const char* name, auto op, int64_t size) {
        all.emplace_back(name, [op, size](const std::vector<float>& x) {
            std::vector<float> out(size);
            op(kernels().ops, x.data(), out.data());
            return out;
        });
    };
    with_out("rms_norm", [n](const OpKernels& o, const float* x, float* out) { o.rms_norm(x, x, 1e-5f, n, out); }, n);
    with_out(
        "layer_norm", [n](const OpKernels& o, const float* x, float* out) { o.layer_norm(x, x, x, 1e-5f, n, out); }, n);
    with_out(
        "layer_norm without weight",
        [n](const OpKernels& o, const float* x, float* out) { o.layer_norm(x, nullptr, nullptr, 1e-5f, n, out); }, n);
    with_out(
        "soft_cap",
        [n](const OpKernels& o, const float* x, float* out) {
            o.scale(x, 3.0f, n, out);
            o.soft_cap(out, 2.0f, n);
            o.add_scaled(x, 0.5f, n, out);
        },
        n);
    with_out(
        "mul and causal_conv",
        [n](const OpKernels& o, const float* x, float* out) {
            std::vector<float> squares(n);
            o.mul(x, x, n, squares.data());
            const float* inputs[] = {nullptr, x, squares.data()};
            std::vector<float> weight(x, x + n);
            weight.insert(weight.end(), squares.begin(), squares.end());
            weight.insert(weight.end(), x, x + n);
            o.causal_conv(inputs, weight.data(), n, x, 3, n, out);
        },
        n);
    for (int kind = 0; kind < kNumActivations; ++kind) {
        with_out(
            "activate",
            [=](const OpKernels& o, const float* x, float* out) { o.activate(Activation(kind), x, n, out); }, n);
        with_out(
            "activate_and_mul",
            [=](const OpKernels& o, const float* x, float* out) {
                o.activate_and_mul(Activation(kind), x, n / 2, out);
            },
            n / 2);
    }
    return all;
}

double max_difference(const std::vector<float>& x, const std::vector<float>& y) {
    double difference = 0;
    for (size_t i = 0; i < x.size(); ++i) difference = std::max(difference, std::fabs(double(x[i]) - y[i]));
    return difference;
}

// The sum of weights is the same number in every table.
void test_total_weight(int& passed, int& failed) {
    for (const int64_t n : {0, 1, 15, 33, 1000}) {
        Random random{uint64_t(n)};
        std::vector<float> x;
        for (int64_t i = 0; i < n; ++i) x.push_back(40 * random.uniform());
        if (n > 3) x[0] = NAN, x[1] = INFINITY, x[2] = -INFINITY;
        const Softmax softmax{20.0, 1.25};
        int64_t expected = 0;
        for (const float logit : x) expected += softmax.weight(logit);
        for (const char* const* isa = available_isas(); *isa; ++isa) {
            use_isa(*isa);
            const bool same = kernels().ops.total_weight(x.data(), n, softmax) == expected;
            same ? ++passed : ++failed;
            if (!same) std::printf("failed: total_weight of %lld, table %s\n", (long long)n, *isa);
        }
    }
}

// Every table leaves the winner of a race among its racers, and not many others.
void test_find_racers(int& passed, int& failed) {
    for (const int64_t n : {1, 31, 1000, 5000}) {
        Random random{uint64_t(n)};
        std::vector<float> x;
        for (int64_t i = 0; i < n; ++i) x.push_back(30 * random.uniform());
        if (n > 31) x[0] = NAN, x[1] = -INFINITY;
        float greatest = x[n - 1];
        for (const float logit : x) greatest = logit > greatest ? logit : greatest;
        const Softmax softmax{greatest, 1.25};
        for (uint32_t key = 0; key < 20; ++key) {
            const Race race{key * 0x9E3779B9u, ~key};
            RaceLeader leader(race, INFINITY);
            for (int64_t i = 0; i < n; ++i) leader.enter(int32_t(i), softmax.weight(x[i]));
            const double time = leader.time() * 1.001 * 0x1p31;
            const RaceBounds bounds{race, greatest, 1.25f, float(time * double(Softmax::one)), float(time) + 1.0f};
            for (const char* const* isa = available_isas(); *isa; ++isa) {
                use_isa(*isa);
                std::vector<int32_t> ids(n);
                ids.resize(kernels().ops.find_racers(x.data(), 0, n, bounds, ids.data()));
                const bool found = std::find(ids.begin(), ids.end(), leader.id()) != ids.end();
                const bool few = ids.size() < 64 + 20;  // what is left over at the end, and about as many as one
                found&& few ? ++passed : ++failed;
                if (!found || !few) std::printf("failed: find_racers of %lld, table %s\n", (long long)n, *isa);
            }
        }
    }
}

}  // namespace

void test_ops(int& passed, int& failed) {
    test_total_weight(passed, failed);
    test_find_racers(passed, failed);
    for (const int64_t n : kSizes) {
        Random random{uint64_t(n)};
        std::vector<float> x;
        for (int64_t i = 0; i < n; ++i) x.push_back(4 * random.uniform());
        for (const auto& [name, run] : runs(n)) {
            use_isa("plain");
            const std::vector<float> plain = run(x);
            for (const char* const* isa = available_isas(); *isa; ++isa) {
                use_isa(*isa);
                const double difference = max_difference(run(x), plain);
                const bool near = difference < 2e-5;
                near ? ++passed : ++failed;
                if (!near)
                    std::printf("failed: %s of %lld, table %s: difference %.2g\n", name, (long long)n, *isa,
                                difference);
            }
        }
    }
}
