// Binds the ops of a tape that are compressed attention, or mix residual streams. The caller has checked shapes.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "tape.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using quire::Tape;
using quire::View;

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Layer = std::tuple<int64_t, int64_t, int64_t, int64_t>;  // columns, group, and both parts of an entry

void use_compressed(Tape& tape, const std::vector<Layer>& layers, Bytes blocks, std::optional<Bytes> pages) {
    std::vector<quire::CompressedLayer> own;
    for (const auto& [columns, group, first, second] : layers) own.push_back({columns, group, {first, second}});
    tape.use_compressed(std::move(own), blocks.data(), blocks.size(), pages ? pages->data() : nullptr,
                        pages ? pages->size() : 0);
}

}  // namespace

void bind_compressed(nb::class_<Tape>& tape) {
    tape.def("use_compressed", use_compressed, "layers"_a, "blocks"_a.noconvert(), "pages"_a.none().noconvert(),
             "Where layers of compressed attention have entries, and what they keep of tokens.");
    tape.def(
        "write_tokens",
        [](Tape& t, View x, int64_t layer, int64_t first) { t.add(quire::WriteTokens{x, layer, first}); }, "x"_a,
        "layer"_a, "first"_a);
    tape.def(
        "pool_group",
        [](Tape& t, int64_t layer, int64_t first, Table bias, bool overlap, View out) {
            t.add(quire::PoolGroup{layer, first, bias.data(), overlap, out});
        },
        "layer"_a, "first"_a, "bias"_a.noconvert(), "overlap"_a, "out"_a);
    tape.def(
        "write_entry", [](Tape& t, View x, int64_t layer, int part) { t.add(quire::WriteEntry{x, layer, part}); },
        "x"_a, "layer"_a, "part"_a);
    tape.def(
        "top_entries",
        [](Tape& t, View q, View weights, int64_t layer, View out) {
            t.add(quire::TopEntries{q, weights, layer, out, 0});
        },
        "q"_a, "weights"_a, "layer"_a, "out"_a);
    tape.def(
        "compressed_attention",
        [](Tape& t, View q, std::optional<View> chosen, int64_t layer, float scale, int64_t window, Floats sinks,
           View out) {
            t.add(quire::AttendCompressed{q, chosen.value_or(View{}), layer, scale, window, sinks.data(), out, 0});
        },
        "q"_a, "chosen"_a.none(), "layer"_a, "scale"_a, "window"_a, "sinks"_a.noconvert(), "out"_a);
    tape.def(
        "stream_weights",
        [](Tape& t, View x, Floats scale, Floats base, int64_t streams, float eps, int64_t iterations, View out) {
            t.add(quire::StreamWeights{x, scale.data(), base.data(), streams, eps, iterations, out});
        },
        "x"_a, "scale"_a.noconvert(), "base"_a.noconvert(), "streams"_a, "eps"_a, "iterations"_a, "out"_a);
    tape.def(
        "merge_streams", [](Tape& t, View x, View weights, View out) { t.add(quire::MergeStreams{x, weights, out}); },
        "x"_a, "weights"_a, "out"_a);
    tape.def(
        "update_streams",
        [](Tape& t, View x, View y, View post, View mixing, View out) {
            t.add(quire::UpdateStreams{x, y, post, mixing, out});
        },
        "x"_a, "y"_a, "post"_a, "mixing"_a, "out"_a);
}
