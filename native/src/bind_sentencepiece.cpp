// Binds SentencePieces.

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "sentencepiece.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

std::string_view view(const nb::bytes& text) { return {static_cast<const char*>(text.data()), text.size()}; }

}  // namespace

void bind_sentencepiece(nb::module_& m) {
    using quire::SentencePieces;
    nb::class_<SentencePieces>(m, "SentencePieces")
        .def(
            "__init__",
            [](SentencePieces* self, std::vector<std::string> pieces, std::vector<float> scores,
               const nb::bytes& mergeable, const std::vector<int32_t>& user_defined,
               const std::array<int32_t, 256>& bytes, int32_t unknown, std::string prefix) {
                const std::string_view flags = view(mergeable);
                if (scores.size() != pieces.size() || flags.size() != pieces.size())
                    throw std::invalid_argument("pieces, scores and mergeable differ in length");
                new (self) SentencePieces(std::move(pieces), std::move(scores), {flags.begin(), flags.end()},
                                          user_defined, bytes, unknown, std::move(prefix));
            },
            "pieces"_a, "scores"_a, "mergeable"_a, "user_defined"_a, "bytes"_a, "unknown"_a, "prefix"_a)
        .def(
            "encode",
            [](const SentencePieces& self, const nb::bytes& text) {
                const std::string_view utf8 = view(text);
                nb::gil_scoped_release others;
                return self.encode(utf8);
            },
            "text"_a)
        .def(
            "id", [](const SentencePieces& self, const std::string& piece) { return self.id(piece); }, "piece"_a)
        .def(
            "piece", [](const SentencePieces& self, int32_t id) { return self.piece(id); }, "id"_a)
        .def("__len__", &SentencePieces::size);
}
