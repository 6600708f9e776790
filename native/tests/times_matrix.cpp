// Speed of matmuls: all matrices of one token of a model of 135 M weights, read from memory, as in a step.

#include <omp.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "pack.h"
#include "samples.h"

namespace {

using namespace quire;
using namespace quire::tests;

struct Shape {
    int64_t outputs, inputs;
};
constexpr Shape kLayer[] = {{960, 576}, {576, 576}, {3072, 576}, {576, 1536}};
constexpr int kLayers = 30;
constexpr Shape kHead = {49152, 576};

struct Model {
    std::vector<std::unique_ptr<Matrix>> matrices;
    double bytes = 0, weights = 0;

    void add(Storage storage, Shape shape) {
        Random random(1);
        const std::vector<uint8_t> rows = sample_rows(storage, shape.outputs, shape.inputs, random);
        matrices.push_back(std::make_unique<Matrix>(
            storage, rows_in(rows.data(), shape.outputs, row_bytes(storage, shape.inputs)), shape.inputs));
        bytes += double(matrices.back()->packed().nbytes);
        weights += double(shape.outputs * shape.inputs);
    }
};

double seconds_of_pass(const Model& model, const Activations& a, int64_t rows, float* out, uint8_t* panels,
                       int num_threads) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::atomic<int64_t>> taken(model.matrices.size() * size_t(num_threads));
#pragma omp parallel num_threads(num_threads)
    for (size_t i = 0; i < model.matrices.size(); ++i) {
        const PackedMatrix& w = model.matrices[i]->packed();
        const int thread = omp_get_thread_num();
        const Worker worker{thread, num_threads, panels + thread * kPanelBytes, &taken[i * size_t(num_threads)]};
        kernels().matrix.multiply(w, a, rows, out, w.num_outputs, worker);
#pragma omp barrier
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void print_model(const char* name, const Model& model) {
    constexpr int64_t kMaxInputs = 1536, kMaxRows = 512;
    Random random(2);
    const std::vector<float> x = sample_activations(kMaxRows, kMaxInputs, random);
    std::vector<QuantizedGroup> groups(size_t((kMaxRows + kernels().matrix.row_block) * kMaxInputs / kGroupInputs));
    std::vector<float> out(size_t(kMaxRows * kHead.outputs));
    kernels().matrix.quantize(x.data(), kMaxRows * kMaxInputs, groups.data(), 1);
    std::vector<Fp16Group> fp16(groups.size());
    if (kernels().matrix.to_fp16) kernels().matrix.to_fp16(x.data(), kMaxRows * kMaxInputs, fp16.data(), 1);
    const Activations a{x.data(), kMaxInputs, groups.data(), fp16.data()};
    const int num_threads = omp_get_max_threads();
    Buffer<uint8_t> panels;
    panels.reserve(num_threads * kPanelBytes);
    for (int64_t rows : {1, 4, 8, 12, 32, 512}) {
        double best = 1e9;
        for (int i = 0; i < (rows < 16 ? 20 : 3); ++i) {
            const double seconds = seconds_of_pass(model, a, rows, out.data(), panels.get(), num_threads);
            best = seconds < best ? seconds : best;
        }
        std::printf("%-8s %-18s %3lld rows %2d threads %9.2f ms %8.1f tokens/s %7.1f GB/s %7.1f GMAC/s\n",
                    kernels().name, name, (long long)rows, num_threads, best * 1e3, double(rows) / best,
                    model.bytes / best / 1e9, double(rows) * model.weights / best / 1e9);
    }
}

// The layers of the model, or others with as many weights if its rows are not whole blocks.
Model layers_of(Storage storage) {
    Model layers;
    for (int i = 0; i < kLayers; ++i) {
        if (storage_info(storage).block == 256)
            layers.add(storage, {4608, 768});
        else
            for (Shape shape : kLayer) layers.add(storage, shape);
    }
    return layers;
}

}  // namespace

// Prints the speeds of the named tables and storage types. Without names, of all tables, or of a choice of types.
void print_times(const std::vector<std::string>& names) {
    std::vector<std::string> tables, types;
    for (const std::string& name : names) (find_storage(name.c_str()) ? types : tables).push_back(name);
    if (tables.empty())
        for (const char* const* isa = available_isas(); *isa; ++isa)
            if (*isa != std::string("plain") || isa == available_isas())  // the specification, not meant to be fast
                tables.push_back(*isa);
    const auto print_all = [&](const char* name, const Model& model) {
        for (const std::string& table : tables) {
            if (use_isa(table.c_str()))
                print_model(name, model);
            else
                std::printf("%s is no storage type, and no table that runs here\n", table.c_str());
        }
    };
    if (types.empty()) {
        Model mixed = layers_of(Storage::Q4_1);
        mixed.add(Storage::Q8_0, kHead);
        print_all("Q4_1, head Q8_0", mixed);
        types = {"Q4_0", "Q4_1", "IQ4_NL", "MXFP4", "Q8_0", "F16", "BF16", "F32", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"};
    }
    for (const std::string& type : types) print_all(type.c_str(), layers_of(find_storage(type.c_str())->storage));
}
