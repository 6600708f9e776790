#include "sampler.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "philox.h"

namespace quire {

namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr double kGreedyBelow = 1e-5;  // a lower temperature leaves the most likely token alone

Softmax softmax_of(Peak peak, double temperature) {
    return {double(std::min(peak.logit, std::numeric_limits<float>::max())), 1.0 / temperature};
}

double log_total(const float* x, int64_t vocab, const Softmax& softmax) {
    return std::log(double(kernels().ops.total_weight(x, vocab, softmax)) / double(Softmax::one));
}

// Not clamped as weights are: a token that is never drawn still has a logprob.
double logprob(float logit, const Softmax& softmax, double log_total) {
    if (std::isnan(logit)) return kNothing;
    return std::min((double(logit) - softmax.peak) * softmax.inverse_temperature, 0.0) - log_total;
}

int64_t sum_weights(const std::vector<Candidate>& candidates) {
    int64_t total = 0;
    for (const Candidate& c : candidates) total += c.weight;
    return total;
}

// Of a total, the part `share` in (0, 1), rounded up.
int64_t mass(double share, int64_t total) { return std::min(int64_t(std::ceil(share * double(total))), total); }

// A logit that top_p, min_p and typical_p will not keep, nor any below it: found first, so that of a vocabulary only a
// few hundred tokens need be weighed and sorted. `total` is the weight of all tokens, where top_p is used.
float lowest_of_interest(const RowParams& params, const Softmax& softmax, int64_t total, int64_t vocab) {
    // With top_p: so little that a whole vocabulary of it would not fill what top_p cuts off. A thousandth is left for
    // the rounding of weights, and must be more than that: in doubt nothing is passed over but what weighs nothing.
    const double least = params.top_p < 1.0 ? 0.999 * (1.0 - params.top_p) * double(total) / double(vocab)
                                            : params.min_p * double(Softmax::one);
    const double distance = least > 1e4 ? std::log(least / double(Softmax::one)) : Softmax::floor;
    const double margin = 1e-9;  // for the error of exp and log
    const double logit = softmax.peak + std::max(distance - margin, Softmax::floor) / softmax.inverse_temperature;
    return std::nextafter(float(logit), kNothing);
}

template <class Drop>
void drop_if(std::vector<Candidate>& candidates, const Drop& drop) {
    candidates.erase(std::remove_if(candidates.begin(), candidates.end(), drop), candidates.end());
}

// Surprisal minus entropy is the mean distance from the peak minus the token's own distance. The mean is taken in
// integers, distances in units of 2^-40, so that it does not depend on the order either.
void keep_typical(double typical_p, const Softmax& softmax, std::vector<Candidate>& candidates) {
    const int64_t total = sum_weights(candidates);
    constexpr double unit = 1099511627776.0;  // 2^40
    __int128 sum = 0;
    for (const Candidate& c : candidates)
        sum += __int128(c.weight) * int64_t(std::nearbyint(softmax.distance(float(-c.key)) * unit));
    const double mean = double(sum) / double(total) / unit;
    for (Candidate& c : candidates) c.key = std::abs(mean - softmax.distance(float(-c.key)));
    candidates.resize(select_mass(candidates, mass(typical_p, total)));
}

int32_t pick_candidate(std::vector<Candidate>& candidates, uint64_t uniform_bits) {
    const uint64_t total = uint64_t(sum_weights(candidates));
    for (Candidate& c : candidates) c.key = c.id;
    const int64_t below = int64_t((unsigned __int128)uniform_bits * total >> 53);  // < total
    return candidates[select_mass(candidates, below + 1) - 1].id;
}

}  // namespace

Sampler::Sampler(int64_t num_rows, int64_t vocab, int num_threads)
    : vocab_(vocab), rows_(num_rows), scratch_(num_threads > 0 ? num_threads : omp_get_max_threads()) {
    if (vocab < 1 || vocab >= 1 << 19)  // 2^19 weights of 2^44 fill 63 bits
        throw std::invalid_argument("vocab is " + std::to_string(vocab) + ", and 1 to 524287 is possible");
}

// -- what is known of a row -------------------------------------------------------------------------------------------

// Whether this row's next token is drawn from other logits than the raw ones.
bool Sampler::Row::edited() const {
    return !params.logit_bias.empty() || params.restricted || !params.banned.empty() || !seen.empty() ||
           params.watermark.delta != 0.0f || (num_output() < params.min_tokens && !params.stop_ids.empty());
}

void Sampler::Row::append(int32_t token, bool output) {
    ++num_tokens;
    const bool counted = output && (params.presence_penalty != 0.0f || params.frequency_penalty != 0.0f);
    if (counted || params.repetition_penalty != 1.0f) seen[token] += output;
    if (tail_length == 0) return;
    if (tail.size() == tail_length) tail.erase(tail.begin());
    tail.push_back(token);
}

void Sampler::check_id(int64_t id, const char* what) const {
    if (id < 0 || id >= vocab_)
        throw std::invalid_argument(std::string(what) + " has token " + std::to_string(id) +
                                    ", and the vocabulary has " + std::to_string(vocab_));
}

Sampler::Row& Sampler::held(int64_t row) {
    if (row < 0 || row >= int64_t(rows_.size()) || !rows_[row].held)
        throw std::invalid_argument("row " + std::to_string(row) + " is not admitted");
    return rows_[row];
}

void Sampler::admit(int64_t row, RowParams params, const std::vector<int32_t>& tokens, int64_t num_prompt) {
    if (row < 0 || row >= int64_t(rows_.size()) || rows_[row].held)
        throw std::invalid_argument("row " + std::to_string(row) + " is held or does not exist");
    for (const auto& bias : params.logit_bias) check_id(bias.first, "logit_bias");
    for (int32_t id : params.allowed) check_id(id, "allowed");
    for (const auto& sequence : params.banned) {
        if (sequence.empty()) throw std::invalid_argument("banned has an empty sequence");
        for (int32_t id : sequence) check_id(id, "banned");
    }
    for (int32_t id : tokens) check_id(id, "tokens");

    Row fresh;
    fresh.held = true;
    fresh.num_prompt = num_prompt;
    for (const auto& sequence : params.banned) fresh.tail_length = std::max(fresh.tail_length, sequence.size() - 1);
    if (params.watermark.delta != 0.0f) fresh.tail_length = std::max(fresh.tail_length, size_t{1});
    fresh.params = std::move(params);
    for (size_t i = 0; i < tokens.size(); ++i) fresh.append(tokens[i], int64_t(i) >= num_prompt);
    rows_[row] = std::move(fresh);
}

void Sampler::retire(int64_t row) { held(row) = Row(); }

// -- logits, as a row's parameters change them ------------------------------------------------------------------------

void Sampler::restrict_to_allowed(const RowParams& params, const float* raw, const uint32_t* mask,
                                  std::vector<float>& out) const {
    if (params.restricted) {
        out.assign(vocab_, kNothing);
        for (int32_t id : params.allowed)
            if (!mask || has_bit(mask, id)) out[id] = raw[id];
    } else if (mask) {
        out.resize(vocab_);
        copy_masked(raw, vocab_, mask, out.data());
    } else {
        out.assign(raw, raw + vocab_);
    }
}

void Sampler::favour_green(const Row& row, std::vector<float>& out) const {
    const Watermark& mark = row.params.watermark;
    if (mark.delta == 0.0f) return;
    const uint32_t before = row.tail.empty() ? 0 : uint32_t(row.tail.back());
    constexpr int64_t step = 4 * kPhiloxLanes;
    for (int64_t first = 0; first < vocab_; first += step) {
        const PhiloxWords random = watermark_words(mark.key, before, uint32_t(first / 4));
        float added[step];
        for (int64_t i = 0; i < step; ++i) added[i] = random.word[i % 4][i / 4] < mark.green_below ? mark.delta : 0.0f;
        const int64_t count = std::min(vocab_ - first, step);
        for (int64_t i = 0; i < count; ++i) out[first + i] += added[i];
    }
}

void Sampler::edit(const Row& row, const float* raw, const uint32_t* mask, std::vector<float>& out) const {
    const RowParams& params = row.params;
    restrict_to_allowed(params, raw, mask, out);
    favour_green(row, out);
    for (const auto& [id, bias] : params.logit_bias) out[id] += bias;
    for (const auto& sequence : params.banned)
        if (sequence.size() - 1 <= row.tail.size() &&
            std::equal(sequence.begin(), sequence.end() - 1, row.tail.end() - (sequence.size() - 1)))
            out[sequence.back()] = kNothing;
    if (row.num_output() < params.min_tokens)
        for (int32_t id : params.stop_ids)
            if (id >= 0 && id < vocab_) out[id] = kNothing;  // a stop token this model lacks is never drawn
    for (const auto& [id, count] : row.seen) {
        float x = out[id];
        x = x > 0.0f ? x / params.repetition_penalty : x * params.repetition_penalty;
        x = x - params.frequency_penalty * float(count);
        out[id] = count > 0 ? x - params.presence_penalty : x;
    }
}

// -- drawing ----------------------------------------------------------------------------------------------------------

template <class Work>
void Sampler::for_each_line(size_t num_lines, const Work& work) {
    // Always the whole team, or none: where teams change size, OpenMP ends threads and starts new ones.
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(scratch_.size())) if (num_lines > 1)
    for (int64_t i = 0; i < int64_t(num_lines); ++i) work(i, scratch_[omp_get_thread_num()]);
}

void Sampler::check_rows(const std::vector<int64_t>& rows) {
    std::vector<char> taken(rows_.size());
    for (int64_t row : rows) {
        held(row);
        if (taken[row]++) throw std::invalid_argument("row " + std::to_string(row) + " is drawn for twice");
    }
}

std::vector<Draw> Sampler::draw(const float* logits, int64_t stride, const std::vector<int64_t>& rows,
                                const std::vector<const uint32_t*>& masks) {
    check_rows(rows);
    std::vector<Draw> drawn(rows.size());
    for_each_line(rows.size(), [&](int64_t i, Scratch& scratch) {
        drawn[i] = draw_row(rows_[rows[i]], logits + i * stride, masks[i], scratch);
    });
    return drawn;
}

std::vector<std::vector<Draw>> Sampler::verify(const float* logits, int64_t stride, const std::vector<int64_t>& rows,
                                               const std::vector<std::vector<int32_t>>& drafts,
                                               const std::vector<const uint32_t*>& masks) {
    check_rows(rows);
    std::vector<int64_t> firsts(rows.size());
    for (size_t i = 1; i < rows.size(); ++i) firsts[i] = firsts[i - 1] + 1 + int64_t(drafts[i - 1].size());
    std::vector<std::vector<Draw>> drawn(rows.size());
    for_each_line(rows.size(), [&](int64_t i, Scratch& scratch) {
        for (size_t place = 0; place <= drafts[i].size(); ++place) {
            const int64_t line = firsts[i] + int64_t(place);
            drawn[i].push_back(draw_row(rows_[rows[i]], logits + line * stride, masks[line], scratch));
            if (place < drafts[i].size() && drawn[i].back().token != drafts[i][place]) break;
        }
    });
    return drawn;
}

Draw Sampler::draw_row(Row& row, const float* raw, const uint32_t* mask, Scratch& scratch) const {
    const RowParams& params = row.params;
    bool greedy = params.temperature < kGreedyBelow;
    const float* x = raw;
    if (mask || row.edited()) {
        edit(row, raw, mask, scratch.logits);
        x = scratch.logits.data();
    }
    Peak peak = find_peak(x, vocab_);
    if (peak.id < 0 && x != raw) {  // nothing is left: of the edits only mask and `allowed` hold, the best is taken
        restrict_to_allowed(params, raw, mask, scratch.logits);
        peak = find_peak(x, vocab_);
        greedy = true;
    }
    if (peak.id < 0) return {Draw::broken, {}};

    if (params.num_candidates > 0) {
        std::vector<float> whole(x, x + vocab_);  // a masked token is no candidate, and is still summed over
        for (int64_t i = 0; i < vocab_; ++i)
            if (whole[i] == kNothing) whole[i] = raw[i];
        const Softmax softmax = softmax_of(find_peak(whole.data(), vocab_), greedy ? 1.0 : params.temperature);
        const double total = log_total(whole.data(), vocab_, softmax);
        return {Draw::candidates, most_likely(x, softmax, total, params.num_candidates, scratch)};
    }
    Draw draw;
    draw.token = greedy ? peak.id : sample(row, x, softmax_of(peak, params.temperature), scratch);
    if (params.num_logprobs >= 0) draw.logprobs = raw_logprobs(raw, draw.token, params.num_logprobs, scratch);
    row.append(draw.token, true);
    return draw;
}

int32_t Sampler::sample(const Row& row, const float* x, const Softmax& softmax, Scratch& scratch) const {
    const RowParams& params = row.params;
    const uint64_t uniform = uniform_bits(params.seed, uint64_t(row.num_tokens), params.sample);
    const bool top_k = params.top_k > 0 && params.top_k < vocab_;
    if (!top_k && params.top_p >= 1.0 && params.min_p <= 0.0 && params.typical_p >= 1.0)
        return pick_weighted(x, vocab_, softmax, uniform);

    std::vector<Candidate>& candidates = scratch.candidates;
    int64_t total = 0;  // of the tokens that top_p is about
    if (top_k) {
        select_greatest(x, vocab_, params.top_k, candidates);
    } else {
        if (params.top_p < 1.0) total = kernels().ops.total_weight(x, vocab_, softmax);
        collect_above(x, vocab_, lowest_of_interest(params, softmax, total, vocab_), candidates);
    }
    for (Candidate& c : candidates) c.weight = softmax.weight(float(-c.key));
    if (top_k) total = sum_weights(candidates);
    if (params.top_p < 1.0) candidates.resize(select_mass(candidates, mass(params.top_p, total)));
    if (params.min_p > 0.0) {
        const double least = params.min_p * double(Softmax::one);
        drop_if(candidates, [least](const Candidate& c) { return double(c.weight) < least; });
    }
    if (params.typical_p < 1.0) {
        drop_if(candidates, [](const Candidate& c) { return c.weight == 0; });
        keep_typical(params.typical_p, softmax, candidates);
    }
    return pick_candidate(candidates, uniform);
}

// -- logprobs ---------------------------------------------------------------------------------------------------------

std::vector<Logprob> Sampler::most_likely(const float* x, const Softmax& softmax, double log_total, int64_t count,
                                          Scratch& scratch) const {
    std::vector<Candidate>& candidates = scratch.candidates;
    select_greatest(x, vocab_, count, candidates);
    std::sort(candidates.begin(), candidates.end());
    std::vector<Logprob> out;
    out.reserve(candidates.size());
    for (size_t i = 0; i < candidates.size(); ++i) {
        const bool tied = i > 0 && candidates[i].key == candidates[i - 1].key;
        const int32_t id = candidates[i].id;
        out.push_back({id, logprob(x[id], softmax, log_total), tied ? out.back().rank : int64_t(i) + 1});
    }
    return out;
}

std::vector<Logprob> Sampler::raw_logprobs(const float* raw, int32_t token, int64_t num_top, Scratch& scratch) const {
    const Peak peak = find_peak(raw, vocab_);
    if (peak.id < 0) return {{token, kNothing, 1}};
    const Softmax softmax = softmax_of(peak, 1.0);
    const double total = log_total(raw, vocab_, softmax);
    const float logit = std::isnan(raw[token]) ? kNothing : raw[token];
    std::vector<Logprob> out = {{token, logprob(logit, softmax, total), 1 + count_greater(raw, vocab_, logit)}};
    const std::vector<Logprob> top = most_likely(raw, softmax, total, num_top, scratch);
    out.insert(out.end(), top.begin(), top.end());
    return out;
}

std::vector<std::vector<Logprob>> Sampler::logprobs(const float* logits, int64_t stride,
                                                    const std::vector<int32_t>& targets, int64_t num_top) {
    for (int32_t target : targets) check_id(target, "targets");
    std::vector<std::vector<Logprob>> out(targets.size());
    for_each_line(targets.size(), [&](int64_t i, Scratch& scratch) {
        out[i] = raw_logprobs(logits + i * stride, targets[i], num_top, scratch);
    });
    return out;
}

}  // namespace quire
