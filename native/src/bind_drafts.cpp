// Binds what speculative decoding looks up in texts: find_repetition (n-grams), and TokenHistory with suffix_drafts.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include "ngram_lookup.h"
#include "token_history.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

}  // namespace

void bind_drafts(nb::module_& m) {
    m.def(
        "find_repetition",
        [](const Tokens& tokens, int64_t min_length, int64_t max_length, int64_t max_candidates) {
            return quire::find_ngram(tokens.data(), int64_t(tokens.shape(0)), min_length, max_length, max_candidates);
        },
        "tokens"_a.noconvert(), "min_length"_a, "max_length"_a, "max_candidates"_a,
        "The position behind the longest earlier match of the last min_length to max_length tokens, or -1. Only the "
        "newest max_candidates occurrences of the last token are tried.");
    nb::class_<quire::TokenHistory>(m, "TokenHistory",
                                    "The last `capacity` tokens of texts, found again by their ends.")
        .def(nb::init<int64_t>(), "capacity"_a)
        .def(
            "append",
            [](quire::TokenHistory& history, const Tokens& tokens) {
                history.append(tokens.data(), int64_t(tokens.shape(0)));
            },
            "tokens"_a.noconvert(), "Tokens [n] that follow; -1 stands between texts.")
        .def("forget_before", &quire::TokenHistory::forget_before, "position"_a)
        .def("__len__", &quire::TokenHistory::size)
        .def_prop_ro("num_bytes", &quire::TokenHistory::num_bytes);
    m.def(
        "suffix_drafts",
        [](const quire::TokenHistory& own, const quire::TokenHistory* shared, int64_t max_tokens, int64_t max_length,
           double drafts_per_token, double min_probability) {
            return quire::suffix_drafts(own, shared, {max_tokens, max_length, drafts_per_token, min_probability});
        },
        "own"_a, "shared"_a.none(), "max_tokens"_a, "max_length"_a, "drafts_per_token"_a, "min_probability"_a,
        "Tokens that may follow the own text: the likeliest continuation of its last tokens, where these stood "
        "before.");
    m.def(
        "suffix_tree",
        [](const quire::TokenHistory& own, const quire::TokenHistory* shared, int64_t max_nodes, int64_t max_tokens,
           int64_t max_length, double drafts_per_token, double min_probability) {
            auto tree =
                quire::suffix_tree(own, shared, max_nodes, {max_tokens, max_length, drafts_per_token, min_probability});
            return nb::make_tuple(tree.tokens, tree.parents, tree.confidences);
        },
        "own"_a, "shared"_a.none(), "max_nodes"_a, "max_tokens"_a, "max_length"_a, "drafts_per_token"_a,
        "min_probability"_a,
        "-> (tokens, parents, confidences): the likeliest continuations as a tree, at most `max_tokens` deep.");
}
