// Binds the ops of a tape that keep recurrent states in slots. The caller has checked shapes.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>

#include "tape.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using quire::Tape;
using quire::View;

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

}  // namespace

void bind_scans(nb::class_<Tape>& tape) {
    tape.def(
        "use_states",
        [](Tape& t, nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu> data, int64_t num_slots,
           int64_t num_layers, int64_t conv_rows, int64_t conv_channels, int64_t size) {
            const quire::States states{data.data(), num_slots, num_layers, conv_rows, conv_channels, size};
            if (int64_t(data.size()) < num_slots * states.slot_floats())
                throw std::invalid_argument("the state slots are smaller than their shape");
            t.use_states(states);
        },
        "data"_a.noconvert(), nb::kw_only(), "num_slots"_a, "num_layers"_a, "conv_rows"_a, "conv_channels"_a, "size"_a,
        "Where the states of its recurrent layers are.");
    tape.def(
        "mamba2_scan",
        [](Tape& t, View x, View dt, View b, View c, Floats a, Floats dt_bias, Floats skip, float min_delta,
           float max_delta, int64_t groups, int64_t layer, View out) {
            const quire::Mamba2Weights weights{a.data(),          dt_bias.data(), skip.data(),
                                               int64_t(a.size()), min_delta,      max_delta};
            t.add(quire::Mamba2Scan{x, dt, b, c, weights, groups, layer, out});
        },
        "x"_a, "dt"_a, "b"_a, "c"_a, "a"_a.noconvert(), "dt_bias"_a.noconvert(), "skip"_a.noconvert(), "min_delta"_a,
        "max_delta"_a, "groups"_a, "layer"_a, "out"_a);
    tape.def(
        "mamba_scan",
        [](Tape& t, View x, View dt, View b, View c, Table a, Floats skip, int64_t layer, View out) {
            const quire::MambaWeights weights{a.data(), skip.data(), int64_t(a.shape(0)), int64_t(a.shape(1))};
            t.add(quire::MambaScan{x, dt, b, c, weights, layer, out});
        },
        "x"_a, "dt"_a, "b"_a, "c"_a, "a"_a.noconvert(), "skip"_a.noconvert(), "layer"_a, "out"_a);
    tape.def(
        "wkv7",
        [](Tape& t, View r, View w, View k, View v, View a, Floats remove_scale, Floats learn_scale, Floats bonus,
           Floats norm, Floats norm_bias, int64_t heads, float eps, int64_t layer, View out) {
            const int64_t head_dim = r.columns / heads;
            if (head_dim > quire::kMaxWkvDim)
                throw std::invalid_argument("heads of RWKV have at most 256 columns, and not " +
                                            std::to_string(head_dim));
            const quire::Wkv7Weights weights{remove_scale.data(),
                                             learn_scale.data(),
                                             bonus.data(),
                                             norm.data(),
                                             norm_bias.data(),
                                             heads,
                                             head_dim,
                                             eps};
            t.add(quire::Wkv7{r, w, k, v, a, weights, layer, out});
        },
        "r"_a, "w"_a, "k"_a, "v"_a, "a"_a, "remove_scale"_a.noconvert(), "learn_scale"_a.noconvert(),
        "bonus"_a.noconvert(), "norm"_a.noconvert(), "norm_bias"_a.noconvert(), "heads"_a, "eps"_a, "layer"_a, "out"_a);
    tape.def(
        "decay",
        [](Tape& t, View x, Floats bias, Floats rate, View out) {
            t.add(quire::Decay{x, bias.data(), rate.data(), out});
        },
        "x"_a, "bias"_a.noconvert(), "rate"_a.noconvert(), "out"_a);
    tape.def(
        "delta_rule",
        [](Tape& t, View q, View k, View v, std::optional<View> decay, std::optional<Floats> decays,
           std::optional<View> beta, int64_t heads, int64_t key_dim, bool tiled, int64_t layer, View out) {
            t.add(quire::DeltaRule{q, k, v, decay.value_or(View{}), decays ? decays->data() : nullptr,
                                   beta.value_or(View{}), heads, key_dim, tiled, layer, out});
        },
        "q"_a, "k"_a, "v"_a, "decay"_a.none(), "decays"_a.none().noconvert(), "beta"_a.none(), "heads"_a, "key_dim"_a,
        "tiled"_a, "layer"_a, "out"_a);
}
