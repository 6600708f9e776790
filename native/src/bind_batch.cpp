// Binds assemble, which makes the arrays of a step.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <vector>

#include "batch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Matrix = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// One allocation that all arrays of a step share.
struct Pieces {
    int32_t* next;
    nb::capsule owner;

    explicit Pieces(size_t size) : next(new int32_t[size]) {
        owner = nb::capsule(next, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
    }
    int32_t* take(int64_t n) {
        int32_t* piece = next;
        next += n;
        return piece;
    }
    nb::object array(int32_t* data, std::initializer_list<size_t> shape) const {
        return nb::cast(nb::ndarray<nb::numpy, int32_t>(data, shape, owner));
    }
};

nb::tuple assemble(const Matrix& tokens, const Matrix& tables, const Vector& num_known, const Vector& num_blocks,
                   int64_t block_size, const std::vector<std::array<int32_t, 3>>& triples) {
    std::vector<quire::TokenRun> runs;
    int64_t num_tokens = 0, longest = 0;
    for (const auto& [row, start, count] : triples) {
        runs.push_back({row, start, count});
        num_tokens += std::max(count, 0);
        longest = std::max<int64_t>(longest, int64_t(start) + count);
    }
    const int64_t n = int64_t(runs.size()), width = (longest + block_size - 1) / block_size;
    if (width > int64_t(tables.shape(1))) throw std::invalid_argument("a run goes past the blocks of its row");
    Pieces pieces(size_t(3 * num_tokens + (n + 1) + n + n * width + 2 * n));
    quire::StepArrays out{};
    out.ids = pieces.take(num_tokens);
    out.positions = pieces.take(num_tokens);
    out.slots = pieces.take(num_tokens);
    out.seq_starts = pieces.take(n + 1);
    out.context_lens = pieces.take(n);
    out.block_tables = pieces.take(n * width);
    out.width = width;
    out.logit_rows = pieces.take(n);
    out.sampling_rows = pieces.take(n);
    quire::assemble({tokens.data(), tables.data(), int64_t(num_known.shape(0)), int64_t(tokens.shape(1)),
                     int64_t(tables.shape(1)), num_known.data(), num_blocks.data(), block_size},
                    runs.data(), n, out);
    const size_t t = size_t(num_tokens), s = size_t(n), d = size_t(out.num_sampling);
    return nb::make_tuple(pieces.array(out.ids, {t}), pieces.array(out.positions, {t}), pieces.array(out.slots, {t}),
                          pieces.array(out.seq_starts, {s + 1}), pieces.array(out.context_lens, {s}),
                          pieces.array(out.block_tables, {s, size_t(width)}), pieces.array(out.logit_rows, {d}),
                          pieces.array(out.sampling_rows, {d}));
}

}  // namespace

void bind_batch(nb::module_& m) {
    m.def(
        "assemble", &assemble, "tokens"_a.noconvert(), "tables"_a.noconvert(), "num_known"_a.noconvert(),
        "num_blocks"_a.noconvert(), "block_size"_a, "runs"_a,
        "Runs (row, start, count) -> the arrays of a StepBatch in their order, and the rows to sample. ValueError if a "
        "run goes past the known tokens of its row.");
}
