// Binds Sampler, which ops/native/sampler.py wraps, and philox4x32.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "philox.h"
#include "sampler.h"

namespace nb = nanobind;
using namespace quire;

namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Masks = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
T field(nb::handle params, const char* name) {
    return nb::cast<T>(params.attr(name));
}

uint64_t low_64_bits(nb::handle number) { return nb::cast<uint64_t>(number.attr("__and__")(UINT64_MAX)); }

// From a quire.ops.row_params.DryParams.
DryParams dry_params(nb::handle from) {
    DryParams dry;
    dry.multiplier = field<double>(from, "multiplier");
    dry.base = field<double>(from, "base");
    dry.allowed_length = field<int64_t>(from, "allowed_length");
    dry.last_n = field<int64_t>(from, "last_n");
    for (nb::handle breaker : from.attr("breakers")) {
        const auto tail = field<std::vector<int32_t>>(breaker, "tail");
        for (int32_t head : field<std::vector<int32_t>>(breaker, "heads")) dry.tails[head].push_back(tail);
    }
    return dry;
}

// From a quire.ops.row_params.RowParams.
RowParams row_params(nb::handle from) {
    RowParams p;
    p.seed = low_64_bits(from.attr("seed"));
    p.sample = field<uint32_t>(from, "sample");
    p.temperature = field<double>(from, "temperature");
    p.top_k = field<int64_t>(from, "top_k");
    p.top_p = field<double>(from, "top_p");
    p.min_p = field<double>(from, "min_p");
    p.typical_p = field<double>(from, "typical_p");
    p.repetition_penalty = field<float>(from, "repetition_penalty");
    p.presence_penalty = field<float>(from, "presence_penalty");
    p.frequency_penalty = field<float>(from, "frequency_penalty");
    p.logit_bias = field<std::vector<std::pair<int32_t, float>>>(from, "logit_bias");
    p.restricted = !from.attr("allowed").is_none();
    if (p.restricted) p.allowed = field<std::vector<int32_t>>(from, "allowed");
    p.banned = field<std::vector<std::vector<int32_t>>>(from, "banned");
    p.stop_ids = field<std::vector<int32_t>>(from, "stop_ids");
    p.min_tokens = field<int64_t>(from, "min_tokens");
    p.num_logprobs = field<int64_t>(from, "num_logprobs");
    p.logprob_ids = field<std::vector<int32_t>>(from, "logprob_ids");
    p.num_candidates = field<int64_t>(from, "num_candidates");
    const nb::object mark = from.attr("watermark");
    if (!mark.is_none()) {
        p.watermark = {field<uint64_t>(mark, "key"), field<uint32_t>(mark, "green_below"), field<float>(mark, "delta")};
    }
    p.no_repeat_ngram = field<int64_t>(from, "no_repeat_ngram");
    if (const nb::object dry = from.attr("dry"); !dry.is_none()) p.dry = dry_params(dry);
    p.top_n_sigma = field<double>(from, "top_n_sigma");
    p.dynatemp_range = field<double>(from, "dynatemp_range");
    p.dynatemp_exponent = field<double>(from, "dynatemp_exponent");
    p.xtc_probability = field<double>(from, "xtc_probability");
    p.xtc_threshold = field<double>(from, "xtc_threshold");
    if (const nb::object mirostat = from.attr("mirostat"); !mirostat.is_none())
        p.mirostat = {field<int>(mirostat, "version"), field<double>(mirostat, "tau"), field<double>(mirostat, "eta")};
    for (int filter : field<std::vector<int>>(from, "filters")) p.filters.push_back(Filter(filter));
    return p;
}

void check_lines(const Logits& logits, size_t num_lines, int64_t vocab) {
    if (logits.shape(0) != num_lines || int64_t(logits.shape(1)) != vocab || (vocab > 1 && logits.stride(1) != 1))
        throw std::invalid_argument("logits must be [" + std::to_string(num_lines) + ", " + std::to_string(vocab) +
                                    "] with contiguous columns, and are [" + std::to_string(logits.shape(0)) + ", " +
                                    std::to_string(logits.shape(1)) + "]");
}

void check_parents(const std::vector<std::vector<int32_t>>& drafts, const std::vector<std::vector<int32_t>>& parents) {
    if (!parents.empty() && parents.size() != drafts.size())
        throw std::invalid_argument("parents of " + std::to_string(parents.size()) + " rows, for " +
                                    std::to_string(drafts.size()));
    for (size_t i = 0; i < parents.size(); ++i)
        if (!parents[i].empty() && parents[i].size() != drafts[i].size())
            throw std::invalid_argument(std::to_string(drafts[i].size()) + " drafts have " +
                                        std::to_string(parents[i].size()) + " parents");
}

// A pointer to the mask of each line, or null.
std::vector<const uint32_t*> masks_of_lines(size_t num_lines, const std::vector<size_t>& lines, const Masks& bits,
                                            int64_t vocab) {
    if (bits.shape(0) != lines.size() || int64_t(bits.shape(1)) != (vocab + 31) / 32)
        throw std::invalid_argument("masks are [" + std::to_string(bits.shape(0)) + ", " +
                                    std::to_string(bits.shape(1)) + "], for " + std::to_string(lines.size()) +
                                    " lines of " + std::to_string(vocab) + " tokens");
    std::vector<const uint32_t*> masks(num_lines, nullptr);
    for (size_t i = 0; i < lines.size(); ++i) {
        if (lines[i] >= num_lines)
            throw std::invalid_argument("there is a mask for line " + std::to_string(lines[i]) + " of " +
                                        std::to_string(num_lines));
        masks[lines[i]] = bits.data() + i * bits.shape(1);
    }
    return masks;
}

nb::list to_python(const std::vector<Logprob>& logprobs) {
    nb::list out;
    for (const Logprob& l : logprobs) out.append(nb::make_tuple(l.id, l.logprob, l.rank));
    return out;
}

nb::list to_python(const std::vector<SampledToken>& sampled) {
    nb::list out;
    for (const SampledToken& token : sampled) out.append(nb::make_tuple(token.token, to_python(token.logprobs)));
    return out;
}

}  // namespace

void bind_sampler(nb::module_& m) {
    m.def("philox4x32", &philox4x32, nb::arg("counter"), nb::arg("key"));

    nb::class_<Sampler>(m, "Sampler")
        .def(nb::init<int64_t, int64_t, int>(), nb::arg("num_rows"), nb::arg("vocab"), nb::arg("num_threads"))
        .def("admit",
             [](Sampler& self, int64_t row, nb::handle params, const std::vector<int32_t>& tokens, int64_t num_prompt,
                double mu) { self.admit(row, row_params(params), tokens, num_prompt, mu); })
        .def("mu", &Sampler::mu)
        .def("retire", &Sampler::retire)
        .def(
            "draw",
            [](Sampler& self, const Logits& logits, const std::vector<int64_t>& rows,
               const std::vector<size_t>& masked_lines, const Masks& bits) {
                check_lines(logits, rows.size(), self.vocab());
                const auto masks = masks_of_lines(rows.size(), masked_lines, bits, self.vocab());
                std::vector<SampledToken> sampled;
                {
                    nb::gil_scoped_release release;
                    sampled = self.sample_rows(logits.data(), logits.stride(0), rows, masks);
                }
                return to_python(sampled);
            },
            nb::arg("logits").noconvert(), nb::arg("rows"), nb::arg("masked_lines"), nb::arg("bits").noconvert(),
            "-> [(token, [(id, logprob, rank)])]")
        .def(
            "verify",
            [](Sampler& self, const Logits& logits, const std::vector<int64_t>& rows,
               const std::vector<std::vector<int32_t>>& drafts, const std::vector<std::vector<int32_t>>& parents,
               const std::vector<size_t>& masked_lines, const Masks& bits) {
                if (drafts.size() != rows.size())
                    throw std::invalid_argument("drafts of " + std::to_string(drafts.size()) + " rows, for " +
                                                std::to_string(rows.size()));
                check_parents(drafts, parents);
                size_t num_lines = rows.size();
                for (const auto& of_row : drafts) num_lines += of_row.size();
                check_lines(logits, num_lines, self.vocab());
                const auto masks = masks_of_lines(num_lines, masked_lines, bits, self.vocab());
                std::vector<std::vector<SampledToken>> sampled;
                {
                    nb::gil_scoped_release release;
                    sampled = self.verify(logits.data(), logits.stride(0), rows, drafts, parents, masks);
                }
                nb::list out;
                for (const auto& of_row : sampled) out.append(to_python(of_row));
                return out;
            },
            nb::arg("logits").noconvert(), nb::arg("rows"), nb::arg("drafts"), nb::arg("parents"),
            nb::arg("masked_lines"), nb::arg("bits").noconvert(),
            "-> [[(token, [(id, logprob, rank)])]], a list for each row")
        .def(
            "logprobs",
            [](Sampler& self, const Logits& logits, const std::vector<int32_t>& targets, int64_t num_top) {
                check_lines(logits, targets.size(), self.vocab());
                std::vector<std::vector<Logprob>> logprobs;
                {
                    nb::gil_scoped_release release;
                    logprobs = self.logprobs(logits.data(), logits.stride(0), targets, num_top);
                }
                nb::list out;
                for (const auto& line : logprobs) out.append(to_python(line));
                return out;
            },
            nb::arg("logits").noconvert(), nb::arg("targets"), nb::arg("num_top"), "-> [[(id, logprob, rank)]]");
}
