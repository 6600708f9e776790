// Binds the ops of a tape that are attention of a kind of its own. The caller has checked shapes.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "tape.h"

namespace nb = nanobind;
using namespace nb::literals;

using quire::Tape;
using quire::View;

void bind_sparse(nb::class_<Tape>& tape) {
    tape.def(
            "use_index",
            [](Tape& t, nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> data, int64_t columns) {
                t.use_index(data.data(), data.size(), columns);
            },
            "data"_a.noconvert(), "columns"_a, "Where the keys of its indexers are.")
        .def(
            "write_index_key", [](Tape& t, View k, int64_t layer) { t.add(quire::WriteIndexKey{k, layer}); }, "k"_a,
            "layer"_a)
        .def(
            "top_positions",
            [](Tape& t, View q, View weights, int64_t layer, View out) {
                t.add(quire::TopPositions{q, weights, layer, out, 0});
            },
            "q"_a, "weights"_a, "layer"_a, "out"_a)
        .def(
            "sparse_mla",
            [](Tape& t, View q, View q_rope, View chosen, int64_t layer, float scale, View out) {
                t.add(quire::SparseMla{q, q_rope, chosen, layer, scale, out, 0});
            },
            "q"_a, "q_rope"_a, "chosen"_a, "layer"_a, "scale"_a, "out"_a)
        .def(
            "disentangled_attention",
            [](Tape& t, View q, View by_query, View by_key,
               nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> rows, int64_t head_dim,
               float scale, View out) {
                const quire::SelfAttentionShape shape{q.columns / head_dim, 1, head_dim, scale, false, 0, nullptr, 0};
                const int64_t reach = int64_t(rows.size()) / 2;
                t.add(quire::SelfAttention{q, shape, out, 0, by_query, by_key, rows.data(), reach});
            },
            "q"_a, "by_query"_a, "by_key"_a, "rows"_a.noconvert(), "head_dim"_a, "scale"_a, "out"_a);
}
