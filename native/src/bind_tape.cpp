// Binds Tape, AdapterSlots and the choice of an ISA. The caller keeps arrays and matrices alive and has checked shapes.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels.h"
#include "pack.h"
#include "rank_group.h"
#include "tape.h"

namespace nb = nanobind;
using namespace nb::literals;

void bind_scans(nb::class_<quire::Tape>& tape);       // bind_scans.cpp
void bind_sparse(nb::class_<quire::Tape>& tape);      // bind_sparse.cpp
void bind_compressed(nb::class_<quire::Tape>& tape);  // bind_compressed.cpp

namespace {

using quire::Tape;
using quire::View;

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes1 = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tables = nb::ndarray<const int32_t, nb::ndim<2>, nb::device::cpu>;
using Words = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using HiddenStates = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using States = nb::ndarray<const int32_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using Matrices = std::vector<const quire::Matrix*>;
using ExpertMatrices = std::vector<Matrices>;

using ConvWeight = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Biases = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
const float* data_of(const std::optional<Biases>& table) { return table ? table->data() : nullptr; }
int64_t reach_of(const std::optional<Biases>& table) { return table ? int64_t(table->shape(1)) / 2 : 0; }

const float* data_of(const std::optional<Floats>& vector) { return vector ? vector->data() : nullptr; }
int64_t size_of(const std::optional<Floats>& vector) { return vector ? int64_t(vector->size()) : 0; }

quire::Segments segments(const Matrices& matrices) {
    quire::Segments packed;
    for (const quire::Matrix* matrix : matrices) packed.push_back(matrix->packed());
    return packed;
}

quire::Weight weight(const Matrices& matrices, const std::optional<Floats>& bias) {
    return quire::Weight(segments(matrices), data_of(bias));
}

// biases: [experts * outputs], or None
quire::Experts experts(const ExpertMatrices& matrices, const std::optional<Floats>& biases, int64_t first) {
    std::vector<quire::Segments> packed;
    for (const Matrices& one : matrices) packed.push_back(segments(one));
    quire::Experts made(std::move(packed), data_of(biases), first);
    if (biases && size_of(biases) != int64_t(matrices.size()) * made.num_outputs)
        throw std::invalid_argument("biases must have one entry for each output of each expert");
    return made;
}

using LoraPartTuple = std::tuple<const quire::Matrix*, int64_t, int64_t, float>;

void put_adapter(quire::AdapterSlots& slots, int64_t slot, const quire::Matrix* a,
                 const std::vector<LoraPartTuple>& parts) {
    quire::LoraAdapter adapter{};
    if (a) adapter.a = a->packed();
    for (const auto& [b, first_output, first_hidden, scale] : parts)
        adapter.parts.push_back({b->packed(), first_output, first_hidden, scale});
    slots.put(slot, std::move(adapter));
}

quire::Activation activation(int kind) {
    if (kind < 0 || kind >= quire::kNumActivations)
        throw std::invalid_argument("there is no activation of that number");
    return quire::Activation(kind);
}

void run(Tape& tape, Ints ids, Ints positions, Ints slots, Ints seq_starts, Ints context_lens, Tables block_tables,
         Ints logit_rows, nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> logits,
         std::optional<Ints> adapters, std::optional<Ints> source_lens, std::optional<Tables> source_tables,
         std::optional<Words> ancestors, std::optional<Ints> hidden_rows, std::optional<States> states,
         std::optional<Ints> window_slots, std::optional<Tables> window_tables) {
    const size_t num_tokens = ids.size(), num_seqs = context_lens.size();
    const auto expect = [](const char* what, size_t size, size_t expected) {
        if (size != expected)
            throw std::invalid_argument(std::string(what) + " has " + std::to_string(size) +
                                        " entries, and must have " + std::to_string(expected));
    };
    expect("positions", positions.size(), num_tokens);
    expect("slots", slots.size(), num_tokens);
    if (adapters) expect("adapters", adapters->size(), num_tokens);
    if (ancestors) expect("ancestors", ancestors->size(), num_tokens);
    if (hidden_rows) expect("hidden_rows", hidden_rows->size(), num_tokens);
    expect("seq_starts", seq_starts.size(), num_seqs + 1);
    expect("block_tables", block_tables.shape(0), num_seqs);
    if (block_tables.shape(1) > 1 && block_tables.stride(1) != 1)
        throw std::invalid_argument("the rows of block_tables are not contiguous");
    if (window_slots.has_value() != window_tables.has_value())
        throw std::invalid_argument("window_slots and window_tables must be given together");
    if (window_slots) {
        expect("window_slots", window_slots->size(), num_tokens);
        expect("window_tables", window_tables->size(), block_tables.size());
        if (window_tables->shape(1) != block_tables.shape(1) || window_tables->stride(0) != block_tables.stride(0) ||
            (window_tables->shape(1) > 1 && window_tables->stride(1) != 1))
            throw std::invalid_argument("window_tables and block_tables differ in shape");
    }
    if (source_lens.has_value() != source_tables.has_value())
        throw std::invalid_argument("source_lens and source_tables must be given together");
    if (source_lens) {
        expect("source_lens", source_lens->size(), num_seqs);
        expect("source_tables", source_tables->shape(0), num_seqs);
        if (source_tables->shape(1) > 1 && source_tables->stride(1) != 1)
            throw std::invalid_argument("the rows of source_tables are not contiguous");
    }
    if (logits.shape(0) < logit_rows.size()) expect("logits", logits.shape(0), logit_rows.size());
    const quire::Step step{int64_t(num_tokens),
                           int64_t(num_seqs),
                           int64_t(logit_rows.size()),
                           ids.data(),
                           positions.data(),
                           slots.data(),
                           seq_starts.data(),
                           context_lens.data(),
                           block_tables.data(),
                           int64_t(block_tables.shape(1)),
                           block_tables.stride(0),
                           window_slots ? window_slots->data() : nullptr,
                           window_tables ? window_tables->data() : nullptr,
                           source_lens ? source_lens->data() : nullptr,
                           source_tables ? source_tables->data() : nullptr,
                           source_tables ? int64_t(source_tables->shape(1)) : 0,
                           source_tables ? source_tables->stride(0) : 0,
                           logit_rows.data(),
                           logits.data(),
                           adapters ? adapters->data() : nullptr,
                           ancestors ? reinterpret_cast<const uint64_t*>(ancestors->data()) : nullptr,
                           hidden_rows ? hidden_rows->data() : nullptr,
                           states ? reinterpret_cast<const quire::Segment*>(states->data()) : nullptr,
                           states ? int64_t(states->shape(0)) : 0};
    nb::gil_scoped_release release;
    tape.run(step);
}

quire::PageType page_type(const std::string& name) {
    if (name == "float16") return quire::PageType::Float16;
    if (name == "bfloat16") return quire::PageType::Bfloat16;
    if (name == "float32") return quire::PageType::Float32;
    if (name == "int8") return quire::PageType::Int8;
    throw std::invalid_argument("there are no pages of type " + name);
}

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const char* const* name = quire::available_isas(); *name; ++name) names.emplace_back(*name);
    return names;
}

}  // namespace

void bind_tape(nb::module_& m) {
    m.def("isa", [] { return quire::kernels().name; }, "The table of kernels in use.");
    m.def("available_isas", isas, "The tables this CPU can run, best first.");
    m.def(
        "use_isa", [](const std::string& name) { return quire::use_isa(name.c_str()); }, "name"_a,
        "False if there is no such table. Not while a tape runs.");

    nb::class_<View>(m, "View",
                     "Columns of a value: row r starts at arena[offset + r * stride]. logits_only: it has rows of "
                     "logits, not of all tokens. shared: in the arena of all ranks.")
        .def(nb::init<int64_t, int64_t, int64_t, bool, bool>(), "offset"_a, "stride"_a, "columns"_a, "logits_only"_a,
             "shared"_a = false);

    nb::exception<quire::RankLost>(m, "RankLost", PyExc_RuntimeError);
    nb::class_<quire::RankGroup>(m, "RankGroup", "This process among the ranks that compute a step together.")
        .def(
            "__init__",
            [](quire::RankGroup* self, Bytes1 memory, int rank, int size) {
                if (size < 1 || size > quire::kMaxRanks || rank < 0 || rank >= size)
                    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size));
                if (memory.size() < sizeof(quire::RankMemory) || reinterpret_cast<uintptr_t>(memory.data()) % 64)
                    throw std::invalid_argument("ranks need " + std::to_string(sizeof(quire::RankMemory)) +
                                                " bytes of memory at the start of a cache line");
                new (self) quire::RankGroup(reinterpret_cast<quire::RankMemory*>(memory.data()), rank, size);
            },
            "memory"_a.noconvert(), "rank"_a, "size"_a, nb::keep_alive<1, 2>(), "memory: shared, and zero at first.")
        .def("barrier", &quire::RankGroup::barrier, nb::call_guard<nb::gil_scoped_release>(),
             "Wait until all ranks are here. False if the group is aborted.")
        .def("abort", &quire::RankGroup::abort, "Let no rank wait for another from now on.")
        .def_prop_ro("aborted", &quire::RankGroup::aborted)
        .def("start_heartbeat", &quire::RankGroup::start_heartbeat, "parent"_a,
             "Count beats in a thread, and end the process when its parent is another.")
        .def("beats", &quire::RankGroup::beats, "rank"_a);

    nb::class_<quire::AdapterSlots>(m, "AdapterSlots", "The LoRA adapters of one linear layer, by slot.")
        .def(nb::init<int64_t, int64_t, int64_t, int64_t, int64_t>(), "num_inputs"_a, "num_outputs"_a, "num_slots"_a,
             "max_hidden"_a, "max_parts"_a)
        .def("put", put_adapter, "slot"_a, "a"_a.none(), "parts"_a,
             "Parts (B, first output, first row of A, scale). Not while a tape runs. The caller keeps the matrices "
             "alive.");

    nb::class_<Tape> tape(m, "Tape", "A recorded forward pass.");
    bind_scans(tape);
    bind_sparse(tape);
    bind_compressed(tape);
    tape.def(
            "__init__",
            [](Tape* self, nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> pages, int64_t num_blocks,
               int64_t num_layers, int64_t num_kv_heads, int64_t head_dim, int64_t block_size, const std::string& dtype,
               int64_t latent, int64_t conv_layers, int64_t conv_rows, int64_t conv_channels, int64_t max_tokens,
               int64_t arena_size, int num_threads, quire::RankGroup* group, std::optional<Bytes1> shared,
               std::optional<Bytes1> shared_groups) {
                const quire::Pages p{pages.data(),     num_blocks, num_layers,  num_kv_heads, head_dim,     block_size,
                                     page_type(dtype), latent,     conv_layers, conv_rows,    conv_channels};
                if (latent && (num_kv_heads != 1 || latent > head_dim || p.type == quire::PageType::Int8))
                    throw std::invalid_argument("latent pages need one KV head, at least latent columns, and floats");
                if (p.type == quire::PageType::Int8 &&
                    (block_size % quire::kMaxLanes || block_size > quire::kMaxInt8Depth ||
                     head_dim > quire::kMaxInt8Depth))
                    throw std::invalid_argument(
                        "int8 pages need a block_size that is a multiple of 16, and at most 1024 slots and columns");
                if (pages.size() < p.block_bytes() * num_blocks + quire::kPagesSlack)
                    throw std::invalid_argument("the pages are smaller than their shape");
                new (self)
                    Tape(p, max_tokens, arena_size, num_threads, group,
                         shared ? reinterpret_cast<float*>(shared->data()) : nullptr,
                         shared_groups ? reinterpret_cast<quire::QuantizedGroup*>(shared_groups->data()) : nullptr,
                         shared_groups ? int64_t(shared_groups->size() / 2 / sizeof(quire::QuantizedGroup)) : 0);
            },
            "pages"_a.noconvert(), nb::kw_only(), "num_blocks"_a, "num_layers"_a, "num_kv_heads"_a, "head_dim"_a,
            "block_size"_a, "dtype"_a, "latent"_a, "conv_layers"_a, "conv_rows"_a, "conv_channels"_a, "max_tokens"_a,
            "arena_size"_a, "num_threads"_a, "group"_a.none() = nb::none(), "shared"_a.none().noconvert() = nb::none(),
            "shared_groups"_a.none().noconvert() = nb::none())
        .def(
            "use_window_pages",
            [](Tape& t, nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> data, int64_t num_pages,
               int64_t num_layers) {
                const size_t num_bytes = t.use_window_pages(data.data(), num_pages, num_layers);
                if (num_pages < 1 || data.size() < num_bytes + quire::kPagesSlack)
                    throw std::invalid_argument("the window pages are smaller than their shape");
            },
            "data"_a.noconvert(), nb::kw_only(), "num_pages"_a, "num_layers"_a,
            "Where the layers with a sliding window have their keys and values.")
        .def_static(
            "quantized_bytes",
            [](int64_t max_tokens, int64_t num_inputs) {
                return Tape::num_groups(max_tokens, num_inputs) * int64_t(sizeof(quire::QuantizedGroup));
            },
            "max_tokens"_a, "num_inputs"_a, "Of the quantized inputs of a matmul.")
        .def(
            "embedding",
            [](Tape& t, bool of_positions, const std::string& storage, Bytes data, std::optional<Ints> row_order,
               View out, int64_t first_row, std::optional<int64_t> total_rows) {
                const quire::StorageInfo* info = quire::find_storage(storage.c_str());
                if (!info) throw std::invalid_argument("there is no storage type " + storage);
                t.add(quire::Embedding{of_positions, info->storage, data.data(), int64_t(data.shape(0)),
                                       int64_t(data.shape(1)), row_order ? row_order->data() : nullptr, out, first_row,
                                       total_rows.value_or(int64_t(data.shape(0)))});
            },
            "of_positions"_a, "storage"_a, "data"_a.noconvert(), "row_order"_a.none().noconvert(), "out"_a,
            "first_row"_a = 0, "total_rows"_a.none() = nb::none())
        .def(
            "rms_norm",
            [](Tape& t, View x, Floats weight, float eps, View out, int64_t groups) {
                const int64_t size = int64_t(weight.size());
                t.add(quire::RmsNorm{x, weight.data(), size, size / groups, eps, out});
            },
            "x"_a, "weight"_a.noconvert(), "eps"_a, "out"_a, "groups"_a = 1)
        .def(
            "layer_norm",
            [](Tape& t, View x, std::optional<Floats> weight, std::optional<Floats> bias, float eps, int64_t groups,
               View out) {
                t.add(quire::LayerNorm{x, data_of(weight), data_of(bias), size_of(weight), size_of(bias),
                                       x.columns / groups, eps, out});
            },
            "x"_a, "weight"_a.none().noconvert(), "bias"_a.none().noconvert(), "eps"_a, "groups"_a, "out"_a)
        .def(
            "linear",
            [](Tape& t, View x, const Matrices& matrices, std::optional<Floats> bias, View out) {
                t.add(quire::Linear{x, weight(matrices, bias), out});
            },
            "x"_a, "matrices"_a, "bias"_a.none().noconvert(), "out"_a)
        .def(
            "linear_heads",
            [](Tape& t, View x, const Matrices& heads, View out) {
                t.add(quire::LinearHeads{x, segments(heads), out, 0});
            },
            "x"_a, "heads"_a, "out"_a)
        .def(
            "adapt",
            [](Tape& t, View y, View x, const quire::AdapterSlots* slots) { t.add(quire::Adapt{y, x, slots}); }, "y"_a,
            "x"_a, "slots"_a)
        .def(
            "rope_angles",
            [](Tape& t, Floats inv_freq, float scale, View out, int64_t group) {
                t.add(quire::RopeAngles{inv_freq.data(), scale, group, out});
            },
            "inv_freq"_a.noconvert(), "scale"_a, "out"_a, "group"_a = 1)
        .def(
            "rope", [](Tape& t, View x, View angles, int64_t head_dim) { t.add(quire::Rope{x, angles, head_dim}); },
            "x"_a, "angles"_a, "head_dim"_a)
        .def(
            "write_kv",
            [](Tape& t, View k, View v, int64_t layer, bool windowed) { t.add(quire::WriteKV{k, v, layer, windowed}); },
            "k"_a, "v"_a, "layer"_a, "windowed"_a = false)
        .def(
            "attention",
            [](Tape& t, View q, int64_t layer, float scale, int64_t window, float softcap, std::optional<Floats> slopes,
               std::optional<Floats> sinks, View out, std::optional<Biases> biases, int64_t group, int64_t skipped,
               bool windowed) {
                t.add(quire::Attention{q, View{}, layer, scale, window, softcap, data_of(slopes), data_of(sinks),
                                       data_of(biases), reach_of(biases), false, out, 0, group, skipped, windowed});
            },
            "q"_a, "layer"_a, "scale"_a, "window"_a, "softcap"_a, "slopes"_a.none().noconvert(),
            "sinks"_a.none().noconvert(), "out"_a, "biases"_a.none().noconvert() = nb::none(), "group"_a = 0,
            "skipped"_a = 0, "windowed"_a = false)
        .def(
            "cross_attention",
            [](Tape& t, View q, int64_t layer, float scale, View out, int64_t group, int64_t skipped) {
                t.add(quire::Attention{q, View{}, layer, scale, 0, 0.0f, nullptr, nullptr, nullptr, 0, true, out, 0,
                                       group, skipped, false});
            },
            "q"_a, "layer"_a, "scale"_a, "out"_a, "group"_a = 0, "skipped"_a = 0)
        .def(
            "write_latent",
            [](Tape& t, View latent, View k_rope, int64_t layer) { t.add(quire::WriteLatent{latent, k_rope, layer}); },
            "latent"_a, "k_rope"_a, "layer"_a)
        .def(
            "mla_attention",
            [](Tape& t, View q, View q_rope, int64_t layer, float scale, View out) {
                t.add(quire::Attention{q, q_rope, layer, scale, 0, 0.0f, nullptr, nullptr, nullptr, 0, false, out, 0, 0,
                                       0, false});
            },
            "q"_a, "q_rope"_a, "layer"_a, "scale"_a, "out"_a)
        .def(
            "keep_kv",
            [](Tape& t, View k, View v, int64_t head_dim) {
                t.add(quire::KeepKV{k, v, k.columns / head_dim, head_dim});
            },
            "k"_a, "v"_a, "head_dim"_a)
        .def(
            "self_attention",
            [](Tape& t, View q, int64_t kv_heads, int64_t head_dim, float scale, bool causal, int64_t window, View out,
               std::optional<Biases> biases) {
                const quire::SelfAttentionShape shape{
                    kv_heads,        q.columns / head_dim / kv_heads, head_dim, scale, causal, window, data_of(biases),
                    reach_of(biases)};
                t.add(quire::SelfAttention{q, shape, out, 0});
            },
            "q"_a, "kv_heads"_a, "head_dim"_a, "scale"_a, "causal"_a, "window"_a, "out"_a,
            "biases"_a.none().noconvert() = nb::none())
        .def(
            "activate", [](Tape& t, View x, int kind, View out) { t.add(quire::Activate{x, activation(kind), out}); },
            "x"_a, "kind"_a, "out"_a)
        .def(
            "activate_and_mul",
            [](Tape& t, View x, int kind, View out) { t.add(quire::ActivateAndMul{x, activation(kind), out}); }, "x"_a,
            "kind"_a, "out"_a)
        .def(
            "moe",
            [](Tape& t, View x, View logits, const ExpertMatrices& gate_up, const ExpertMatrices& down,
               std::optional<Floats> gate_up_biases, std::optional<Floats> down_biases, int64_t top_k, int scoring,
               bool renormalize, float scale, int64_t num_groups, int64_t top_groups, int64_t group_best, float near,
               std::optional<Floats> correction, bool weigh_inputs, int kind, View out, std::optional<View> hidden,
               int64_t first_hidden, std::optional<View> outputs, int64_t first_expert, int64_t num_zero, float limit,
               float gate_limit, std::optional<View> chosen) {
                const quire::Routing routing{
                    logits.columns, top_k, quire::Scoring(scoring), renormalize,  scale,    num_groups, top_groups,
                    group_best,     near,  data_of(correction),     weigh_inputs, num_zero, limit,      gate_limit};
                if (first_expert < 0 || first_expert + int64_t(gate_up.size()) > logits.columns - num_zero)
                    throw std::invalid_argument("experts beyond the router's");
                t.add(quire::Moe{x, logits, routing, experts(gate_up, gate_up_biases, first_expert),
                                 experts(down, down_biases, first_expert), activation(kind), out,
                                 hidden.value_or(View{}), first_hidden, outputs.value_or(View{}),
                                 chosen.value_or(View{})});
            },
            "x"_a, "logits"_a, "gate_up"_a, "down"_a, nb::kw_only(), "gate_up_biases"_a.none().noconvert(),
            "down_biases"_a.none().noconvert(), "top_k"_a, "scoring"_a, "renormalize"_a, "scale"_a, "num_groups"_a,
            "top_groups"_a, "group_best"_a, "near"_a, "correction"_a.none().noconvert(), "weigh_inputs"_a = false,
            "kind"_a, "out"_a, "hidden"_a.none() = nb::none(), "first_hidden"_a = 0, "outputs"_a.none() = nb::none(),
            "first_expert"_a = 0, "num_zero"_a = 0, "limit"_a = 0.0f, "gate_limit"_a = 0.0f,
            "chosen"_a.none() = nb::none())
        .def(
            "mul_sigmoid", [](Tape& t, View x, View gate, View out) { t.add(quire::MulSigmoid{x, gate, out}); }, "x"_a,
            "gate"_a, "out"_a)
        .def(
            "scale", [](Tape& t, View x, float factor, View out) { t.add(quire::Scale{x, factor, out}); }, "x"_a,
            "factor"_a, "out"_a)
        .def(
            "scale_by_position",
            [](Tape& t, View x, float growth, float length, float offset) {
                t.add(quire::ScaleByPosition{x, growth, length, offset});
            },
            "x"_a, "growth"_a, "length"_a, "offset"_a)
        .def(
            "clamp", [](Tape& t, View x, float limit, View out) { t.add(quire::Clamp{x, limit, out}); }, "x"_a,
            "limit"_a, "out"_a)
        .def(
            "add", [](Tape& t, View x, View y, View out) { t.add(quire::Add{x, y, out}); }, "x"_a, "y"_a, "out"_a)
        .def(
            "mul", [](Tape& t, View x, View y, View out) { t.add(quire::Mul{x, y, out}); }, "x"_a, "y"_a, "out"_a)
        .def(
            "causal_conv",
            [](Tape& t, View x, ConvWeight weight, std::optional<Floats> bias, int64_t layer, int64_t first,
               int64_t state_channels, View out) {
                const int64_t taps = weight.shape(0), channels = weight.shape(1);
                if (taps < 1 || taps > quire::kMaxTaps)
                    throw std::invalid_argument("a convolution has 1 to 16 taps, and not " + std::to_string(taps));
                t.add(quire::CausalConv{
                    x, {weight.data(), data_of(bias), taps, channels, first, state_channels}, layer, out});
            },
            "x"_a, "weight"_a.noconvert(), "bias"_a.none().noconvert(), "layer"_a, "first"_a, "state_channels"_a,
            "out"_a)
        .def(
            "logits",
            [](Tape& t, View x, const Matrices& matrices, std::optional<Floats> bias, float softcap,
               int64_t first_column, std::optional<int64_t> num_columns) {
                quire::Weight head = weight(matrices, bias);
                const int64_t columns = num_columns.value_or(head.num_outputs);
                t.add(quire::Logits{x, std::move(head), softcap, first_column, columns});
            },
            "x"_a, "matrices"_a, "bias"_a.none().noconvert(), "softcap"_a, "first_column"_a = 0,
            "num_columns"_a.none() = nb::none())
        .def(
            "copy_columns", [](Tape& t, View x, View out) { t.add(quire::CopyColumns{x, out}); }, "x"_a, "out"_a)
        .def("rank_barrier", [](Tape& t) { t.add(quire::RankBarrier{}); })
        .def(
            "rows", [](Tape& t, View x) { t.add(quire::TakeRows{x}); }, "x"_a)
        .def(
            "keep", [](Tape& t, View x, HiddenStates to) { t.add(quire::Keep{x, to.data()}); }, "x"_a,
            "to"_a.noconvert(), "Copy all rows of x there, in every step.")
        .def(
            "hidden_rows",
            [](Tape& t, HiddenStates data, View out) {
                t.add(quire::HiddenRows{data.data(), int64_t(data.shape(0)), out});
            },
            "data"_a.noconvert(), "out"_a)
        .def("run", run, "ids"_a.noconvert(), "positions"_a.noconvert(), "slots"_a.noconvert(),
             "seq_starts"_a.noconvert(), "context_lens"_a.noconvert(), "block_tables"_a.noconvert(),
             "logit_rows"_a.noconvert(), "logits"_a.noconvert(), "adapters"_a.none().noconvert() = nb::none(),
             "source_lens"_a.none().noconvert() = nb::none(), "source_tables"_a.none().noconvert() = nb::none(),
             "ancestors"_a.none().noconvert() = nb::none(), "hidden_rows"_a.none().noconvert() = nb::none(),
             "states"_a.none().noconvert() = nb::none(), "window_slots"_a.none().noconvert() = nb::none(),
             "window_tables"_a.none().noconvert() = nb::none(),
             "Run one step. ValueError if it refers to a token, slot or block that does not exist.");
}
