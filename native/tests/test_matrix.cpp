// Every table of this CPU against `plain`, bit for bit, and `plain` against double precision. A table that sums in fp16
// is compared with double precision, and its rows and threads with each other.
//
//   quire_tests                   runs the checks
//   quire_tests times             prints speeds instead (times_matrix.cpp)
//   quire_tests times avx2 Q4_1   prints those of some tables and storage types

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "pack.h"
#include "samples.h"

void print_times(const std::vector<std::string>& names);
void test_attention(int& passed, int& failed);
void test_lora(int& passed, int& failed);
void test_ops(int& passed, int& failed);
void test_ranks(int& passed, int& failed);

namespace {

using namespace quire;
using namespace quire::tests;

constexpr int64_t kMaxTestRows = 64;
constexpr int64_t kRowCounts[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13,
                                  17, 31, 49, 50, 51, 53, 54, 55, 56, 57, 58, 59, 64};
constexpr int64_t kOutputs[] = {1, 7, 31, 33, 100};
constexpr int64_t kInputs[] = {32, 64, 96, 256, 288, 1536};
constexpr int64_t kFloatInputs[] = {1, 7, 32, 100, 257};
constexpr double kFp16Error = 0x1p-9;  // of fp16 sums, relative to the sum of magnitudes

int passed = 0, failed = 0;

void check(bool ok, const char* what, const char* isa, const char* type, int64_t outputs, int64_t inputs,
           int64_t rows) {
    ok ? ++passed : ++failed;
    if (!ok && failed <= 20)
        std::printf("failed: %s, table %s, %s [%lld, %lld], %lld rows\n", what, isa, type, (long long)outputs,
                    (long long)inputs, (long long)rows);
}

struct Case {
    const StorageInfo& info;
    int64_t outputs, inputs;
    Matrix matrix;
    std::vector<float> x;

    Case(const StorageInfo& type, int64_t num_outputs, int64_t num_inputs, Random& random)
        : info(type),
          outputs(num_outputs),
          inputs(num_inputs),
          matrix(type.storage,
                 rows_in(sample_rows(type.storage, outputs, inputs, random).data(), outputs,
                         row_bytes(type.storage, inputs)),
                 inputs),
          x(sample_activations(kMaxTestRows, inputs, random)) {}

    // The first `rows` rows, quantized by the table in use.
    std::vector<QuantizedGroup> quantize(int64_t rows) const {
        if (!matrix.packed().is_integer()) return {};
        const GroupOrder order(rows, kernels().matrix.row_block, inputs);
        std::vector<QuantizedGroup> groups(size_t(order.size(rows)));
        for (int64_t r = 0; r < rows; ++r)
            kernels().matrix.quantize(x.data() + r * inputs, inputs, groups.data() + order.start(r), order.block_rows);
        return groups;
    }

    // The first `rows` rows in fp16, if the table in use reads fp16.
    std::vector<Fp16Group> fp16(int64_t rows) const {
        if (!kernels().matrix.reads_fp16(matrix.packed())) return {};
        const GroupOrder order(rows, kernels().matrix.row_block, inputs);
        std::vector<Fp16Group> groups(size_t(order.size(rows)));
        for (int64_t r = 0; r < rows; ++r)
            kernels().matrix.to_fp16(x.data() + r * inputs, inputs, groups.data() + order.start(r), order.block_rows);
        return groups;
    }

    // All rows, one after the other.
    std::vector<QuantizedGroup> ordered_groups() const {
        if (!matrix.packed().is_integer()) return {};
        std::vector<QuantizedGroup> groups(size_t(kMaxTestRows * inputs / kGroupInputs));
        for (int64_t r = 0; r < kMaxTestRows; ++r)
            kernels().matrix.quantize(x.data() + r * inputs, inputs, groups.data() + r * inputs / kGroupInputs, 1);
        return groups;
    }

    // [rows, outputs + 3]; the last three of a row must come back as they were.
    std::vector<float> multiply(int64_t rows, int num_threads) const {
        std::vector<float> out(size_t(rows * (outputs + 3)), -7.0f);
        const std::vector<QuantizedGroup> groups = quantize(rows);
        const std::vector<Fp16Group> fp16_groups = fp16(rows);
        const Activations a{x.data(), inputs, groups.data(), fp16_groups.data()};
        Buffer<uint8_t> panel;
        panel.reserve(kPanelBytes);
        std::vector<std::atomic<int64_t>> taken(num_threads);
        for (int t = 0; t < num_threads; ++t)
            kernels().matrix.multiply(matrix.packed(), a, rows, out.data(), outputs + 3,
                                      Worker{t, num_threads, panel.get(), taken.data()});
        return out;
    }
};

// The largest error of `out` against double precision, relative to the sum of the magnitudes of the terms.
double relative_error(const Case& c, const std::vector<float>& out) {
    const std::vector<QuantizedGroup> groups = c.ordered_groups();
    std::vector<float> w(size_t(c.inputs));
    double worst = 0;
    for (int64_t o = 0; o < c.outputs; ++o) {
        unpack_row(c.matrix.packed(), o, w.data());
        for (int64_t r = 0; r < kMaxTestRows; ++r) {
            double sum = 0, magnitude = 1e-30;
            for (int64_t i = 0; i < c.inputs; ++i) {
                double value = c.x[size_t(r * c.inputs + i)];
                if (!groups.empty()) {
                    const QuantizedGroup& group = groups[size_t((r * c.inputs + i) / kGroupInputs)];
                    value = double(group.scale) * group.quants[i % kGroupInputs];
                }
                sum += value * w[size_t(i)];
                magnitude += std::fabs(value * w[size_t(i)]);
            }
            const double error = std::fabs(out[size_t(r * (c.outputs + 3) + o)] - sum) / magnitude;
            worst = error > worst ? error : worst;
        }
    }
    return worst;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {  // a is a prefix of b
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The expected results of the table in use, for any number of rows: those of plain or, if it sums in fp16, its own.
std::vector<float> expected_here(const Case& c, const std::vector<float>& plain) {
    if (!kernels().matrix.reads_fp16(c.matrix.packed())) return plain;
    const std::vector<float> out = c.multiply(kMaxTestRows, 1);
    check(relative_error(c, out) < kFp16Error, "fp16 sums are near double precision", kernels().name, c.info.name,
          c.outputs, c.inputs, kMaxTestRows);
    return out;
}

void test_case(Case& c) {
    use_isa("plain");
    const std::vector<QuantizedGroup> groups = c.ordered_groups();
    const std::vector<float> expected = c.multiply(kMaxTestRows, 1);
    check(relative_error(c, expected) < 1e-5, "plain is near double precision", "plain", c.info.name, c.outputs,
          c.inputs, kMaxTestRows);
    bool untouched = true;
    for (int64_t r = 0; r < kMaxTestRows; ++r)
        for (int64_t o = c.outputs; o < c.outputs + 3; ++o)
            untouched &= expected[size_t(r * (c.outputs + 3) + o)] == -7.0f;
    check(untouched, "writes only its outputs", "plain", c.info.name, c.outputs, c.inputs, kMaxTestRows);

    for (const char* const* isa = available_isas(); *isa; ++isa) {
        use_isa(*isa);
        check(groups.empty() ||
                  std::memcmp(groups.data(), c.ordered_groups().data(), groups.size() * sizeof(QuantizedGroup)) == 0,
              "quantize", *isa, c.info.name, c.outputs, c.inputs, kMaxTestRows);
        const std::vector<float> all = expected_here(c, expected);
        for (int64_t rows : kRowCounts)
            for (int num_threads : {1, 2, 3, 16})
                check(same_bits(c.multiply(rows, num_threads), all), "multiply", *isa, c.info.name, c.outputs, c.inputs,
                      rows);
    }
}

// Columns added to outputs: the same bits in every table, for any division of tiles, and no other output.
void test_columns() {
    Random random(10);
    for (Storage storage : {Storage::Q8_0, Storage::Q8_F})
        for (int64_t outputs : kOutputs)
            for (int64_t count : {0, 1, 2, 17}) {
                Case c(storage_info(storage), outputs, 96, random);
                std::vector<int32_t> columns;
                for (int64_t i = 0; i < count; ++i) columns.push_back(int32_t(i * 5 + i % 3));
                const float* before = c.x.data() + 96;
                std::vector<float> expected(before, before + outputs + 3), w(96);
                for (int64_t o = 0; o < outputs; ++o) {
                    unpack_row(c.matrix.packed(), o, w.data());
                    for (int64_t i = 0; i < count; ++i)
                        expected[size_t(o)] =
                            std::fma(w[size_t(columns[size_t(i)])], c.x[size_t(i)], expected[size_t(o)]);
                }
                for (const char* const* isa = available_isas(); *isa; ++isa) {
                    use_isa(*isa);
                    std::vector<float> out(before, before + outputs + 3);
                    const int64_t last = c.matrix.packed().num_tiles(), middle = last / 2;
                    for (const auto& [from, to] : {std::pair{int64_t(0), middle}, std::pair{middle, last}})
                        kernels().matrix.add_columns(c.matrix.packed(), columns.data(), c.x.data(), count, from, to,
                                                     out.data());
                    check(same_bits(out, expected), "columns", *isa, c.info.name, outputs, 96, count);
                }
            }
}

// Tiles that are too large for a panel.
void test_long_rows() {
    Random random(8);
    for (Storage storage : {Storage::Q4_1, Storage::Q4_K, Storage::Q6_K, Storage::IQ4_NL, Storage::F16}) {
        Case c(storage_info(storage), 20, 80 * 1024, random);
        use_isa("plain");
        const std::vector<float> expected = c.multiply(kMaxTestRows, 1);
        for (const char* const* isa = available_isas(); *isa; ++isa) {
            use_isa(*isa);
            check(same_bits(c.multiply(kMaxTestRows, 1), expected_here(c, expected)), "long rows", *isa, c.info.name,
                  c.outputs, c.inputs, kMaxTestRows);
        }
    }
}

// Groups of zeros, of tiny numbers, and with an Inf or a NaN: the same bytes in every table.
void test_quantize() {
    Random random(9);
    for (int64_t num_groups = 1; num_groups < 10; ++num_groups)
        for (int64_t odd = 0; odd < num_groups; ++odd)
            for (float special : {0.0f, 0x1p-110f, INFINITY, -NAN}) {
                const int64_t inputs = num_groups * kGroupInputs;
                std::vector<float> x = sample_activations(2, inputs, random);
                for (int64_t i = 0; i < kGroupInputs; ++i)
                    if (std::fabs(special) < 1 || i == 7) x[size_t(inputs + odd * kGroupInputs + i)] = special;
                std::vector<QuantizedGroup> expected(size_t(2 * num_groups)), actual(expected.size());
                use_isa("plain");
                kernels().matrix.quantize(x.data() + inputs, inputs, expected.data(), 2);
                for (const char* const* isa = available_isas(); *isa; ++isa) {
                    use_isa(*isa);
                    kernels().matrix.quantize(x.data() + inputs, inputs, actual.data(), 2);
                    check(std::memcmp(expected.data(), actual.data(), actual.size() * sizeof(QuantizedGroup)) == 0,
                          "quantize special values", *isa, "groups", odd, inputs, 1);
                }
            }
}

// Inf and NaN reach every result that depends on them, and no other row.
void test_non_finite(const StorageInfo& info) {
    Random random(7);
    Case c(info, 16, 64, random);
    c.x[64 + 5] = NAN;
    c.x[2 * 64 + 40] = INFINITY;
    for (const char* const* isa = available_isas(); *isa; ++isa) {
        use_isa(*isa);
        const std::vector<float> out = c.multiply(4, 1);
        bool ok = true;
        for (int64_t r = 0; r < 4; ++r)
            for (int64_t o = 0; o < 16; ++o) ok &= std::isfinite(out[size_t(r * 19 + o)]) == (r != 1 && r != 2);
        check(ok, "not finite", *isa, info.name, 16, 64, 4);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && std::strcmp(argv[1], "times") == 0) {
        print_times({argv + 2, argv + argc});
        return 0;
    }
    for (int s = 0; s < kNumStorages; ++s) {
        const StorageInfo& info = storage_info(Storage(s));
        for (int64_t outputs : kOutputs) {
            Random random(uint64_t(s) * 1000 + uint64_t(outputs));
            if (info.block == 1) {
                for (int64_t inputs : kFloatInputs) {
                    Case c(info, outputs, inputs, random);
                    test_case(c);
                }
            } else {
                for (int64_t inputs : kInputs) {
                    if (inputs % info.block) continue;
                    Case c(info, outputs, inputs, random);
                    test_case(c);
                }
            }
        }
    }
    test_columns();
    test_long_rows();
    test_quantize();
    test_non_finite(storage_info(Storage::Q4_1));
    test_non_finite(storage_info(Storage::MXFP4));
    test_non_finite(storage_info(Storage::F16));
    test_attention(passed, failed);
    test_ops(passed, failed);
    test_lora(passed, failed);
    test_ranks(passed, failed);
    std::printf("tables:");
    for (const char* const* isa = available_isas(); *isa; ++isa) std::printf(" %s", *isa);
    std::printf("\n%d passed, %d failed\n", passed, failed);
    return failed ? 1 : 0;
}
