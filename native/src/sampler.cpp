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

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr double kGreedyBelow = 1e-5;  // lower temperatures are greedy

double log_total(const float* x, int64_t vocab, const Softmax& softmax) {
    return std::log(double(kernels().ops.total_weight(x, vocab, softmax)) / double(Softmax::one));
}

// Not clamped as weights are: a token of weight 0 still has a logprob.
double logprob(float logit, const Softmax& softmax, double log_total) {
    if (std::isnan(logit)) return kNegInf;
    return std::min((double(logit) - softmax.max_logit) * softmax.inverse_temperature, 0.0) - log_total;
}

// The first child of `node` with this token, or the number of nodes.
int64_t next_node(const std::vector<int32_t>& drafts, const std::vector<int32_t>& parents, int64_t node,
                  int32_t token) {
    const int64_t num_nodes = int64_t(drafts.size());
    if (parents.empty()) return node + 1 < num_nodes && drafts[node + 1] == token ? node + 1 : num_nodes;
    for (int64_t child = node + 1; child < num_nodes; ++child)
        if (parents[child] == node && drafts[child] == token) return child;
    return num_nodes;
}

}  // namespace

Sampler::Sampler(int64_t num_rows, int64_t vocab, int num_threads)
    : vocab_(vocab), rows_(num_rows), scratch_(num_threads > 0 ? num_threads : omp_get_max_threads()) {
    if (vocab < 1 || vocab >= 1 << 19)  // 2^19 weights of 2^44 fill 63 bits
        throw std::invalid_argument("vocab is " + std::to_string(vocab) + ", and 1 to 524287 is possible");
}

// -- state of a row ---------------------------------------------------------------------------------------------------

// Whether the logits of this row are edited before its next token is sampled.
bool Sampler::Row::edited() const {
    return !params.logit_bias.empty() || params.restricted || !params.banned.empty() || !seen.empty() ||
           params.watermark.delta != 0.0f || has_history() ||
           (num_output() < params.min_tokens && !params.stop_ids.empty());
}

void Sampler::Row::append(int32_t token, bool output) {
    ++num_tokens;
    const bool counted = output && (params.presence_penalty != 0.0f || params.frequency_penalty != 0.0f);
    if (counted || params.repetition_penalty != 1.0f) seen[token] += output;
    if (has_history()) tokens.push_back(token);
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

void Sampler::admit(int64_t row, RowParams params, const std::vector<int32_t>& tokens, int64_t num_prompt, double mu) {
    if (row < 0 || row >= int64_t(rows_.size()) || rows_[row].held)
        throw std::invalid_argument("row " + std::to_string(row) + " is held or does not exist");
    for (const auto& bias : params.logit_bias) check_id(bias.first, "logit_bias");
    for (int32_t id : params.allowed) check_id(id, "allowed");
    for (int32_t id : params.logprob_ids) check_id(id, "logprob_ids");
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
    fresh.mu = mu;
    for (size_t i = 0; i < tokens.size(); ++i) fresh.append(tokens[i], int64_t(i) >= num_prompt);
    rows_[row] = std::move(fresh);
}

void Sampler::retire(int64_t row) { held(row) = Row(); }

// -- edited logits ----------------------------------------------------------------------------------------------------

void Sampler::restrict_to_allowed(const RowParams& params, const float* raw, const uint32_t* mask,
                                  std::vector<float>& out) const {
    if (params.restricted) {
        out.assign(vocab_, kNegInf);
        for (int32_t id : params.allowed)
            if (!mask || has_bit(mask, id)) out[id] = raw[id];
    } else if (mask) {
        out.resize(vocab_);
        copy_masked(raw, vocab_, mask, out.data());
    } else {
        out.assign(raw, raw + vocab_);
    }
}

void Sampler::bias_green_tokens(const Row& row, std::vector<float>& out) const {
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
    bias_green_tokens(row, out);
    for (const auto& [id, bias] : params.logit_bias) out[id] += bias;
    for (const auto& sequence : params.banned)
        if (sequence.size() - 1 <= row.tail.size() &&
            std::equal(sequence.begin(), sequence.end() - 1, row.tail.end() - (sequence.size() - 1)))
            out[sequence.back()] = kNegInf;
    if (row.num_output() < params.min_tokens)
        for (int32_t id : params.stop_ids)
            if (id >= 0 && id < vocab_) out[id] = kNegInf;  // a stop token that the vocabulary lacks is never sampled
    if (params.no_repeat_ngram > 0)
        for_each_ngram_end(row.tokens, params.no_repeat_ngram, [&out](int32_t id) { out[id] = kNegInf; });
    for (const auto& [id, count] : row.seen) {
        float x = out[id];
        x = x > 0.0f ? x / params.repetition_penalty : x * params.repetition_penalty;
        x = x - params.frequency_penalty * float(count);
        out[id] = count > 0 ? x - params.presence_penalty : x;
    }
    if (params.dry.multiplier != 0.0)
        for (const auto& [id, penalty] : dry_penalties(params.dry, row.tokens)) out[id] -= penalty;
}

// -- sampling ---------------------------------------------------------------------------------------------------------

template <class Work>
void Sampler::for_each_line(size_t num_lines, const Work& work) {
    // Always all threads, or one: OpenMP ends threads and starts new ones if their number changes.
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(scratch_.size())) if (num_lines > 1)
    for (int64_t i = 0; i < int64_t(num_lines); ++i) work(i, scratch_[omp_get_thread_num()]);
}

void Sampler::check_rows(const std::vector<int64_t>& rows) {
    std::vector<char> taken(rows_.size());
    for (int64_t row : rows) {
        held(row);
        if (taken[row]++) throw std::invalid_argument("row " + std::to_string(row) + " is sampled twice");
    }
}

std::vector<SampledToken> Sampler::sample_rows(const float* logits, int64_t stride, const std::vector<int64_t>& rows,
                                               const std::vector<const uint32_t*>& masks) {
    check_rows(rows);
    std::vector<SampledToken> sampled(rows.size());
    for_each_line(rows.size(), [&](int64_t i, Scratch& scratch) {
        sampled[i] = sample_row(rows_[rows[i]], logits + i * stride, masks[i], scratch);
    });
    return sampled;
}

std::vector<std::vector<SampledToken>> Sampler::verify(const float* logits, int64_t stride,
                                                       const std::vector<int64_t>& rows,
                                                       const std::vector<std::vector<int32_t>>& drafts,
                                                       const std::vector<std::vector<int32_t>>& parents,
                                                       const std::vector<const uint32_t*>& masks) {
    check_rows(rows);
    std::vector<int64_t> firsts(rows.size());
    for (size_t i = 1; i < rows.size(); ++i) firsts[i] = firsts[i - 1] + 1 + int64_t(drafts[i - 1].size());
    std::vector<std::vector<SampledToken>> sampled(rows.size());
    static const std::vector<int32_t> chain;
    for_each_line(rows.size(), [&](int64_t i, Scratch& scratch) {
        const std::vector<int32_t>& tree = parents.empty() ? chain : parents[i];
        for (int64_t node = -1, num_nodes = int64_t(drafts[i].size());;) {
            const int64_t line = firsts[i] + 1 + node;
            sampled[i].push_back(sample_row(rows_[rows[i]], logits + line * stride, masks[line], scratch));
            node = next_node(drafts[i], tree, node, sampled[i].back().token);
            if (node == num_nodes) break;
        }
    });
    return sampled;
}

SampledToken Sampler::sample_row(Row& row, const float* raw, const uint32_t* mask, Scratch& scratch) const {
    const RowParams& params = row.params;
    bool greedy = params.temperature < kGreedyBelow;
    const float* x = raw;
    if (mask || row.edited()) {
        edit(row, raw, mask, scratch.logits);
        x = scratch.logits.data();
    }
    MaxLogit max_logit = find_max(x, vocab_);
    if (max_logit.id < 0 && x != raw) {  // no token is left: keep only the mask and `allowed`, and take the best token
        restrict_to_allowed(params, raw, mask, scratch.logits);
        max_logit = find_max(x, vocab_);
        greedy = true;
    }
    if (max_logit.id < 0) return {SampledToken::broken, {}};

    if (params.num_candidates > 0) {
        std::vector<float> whole(x, x + vocab_);  // masked tokens are no candidates, but are part of the sum
        for (int64_t i = 0; i < vocab_; ++i)
            if (whole[i] == kNegInf) whole[i] = raw[i];
        const Softmax softmax = softmax_of(find_max(whole.data(), vocab_).logit, greedy ? 1.0 : params.temperature);
        const double total = log_total(whole.data(), vocab_, softmax);
        return {SampledToken::candidates, most_likely(x, softmax, total, params.num_candidates, scratch)};
    }
    SampledToken sampled;
    sampled.token = greedy ? max_logit.id : sample_token(row, x, max_logit.logit, scratch);
    if (params.num_logprobs >= 0)
        sampled.logprobs = raw_logprobs(raw, sampled.token, params.num_logprobs, params.logprob_ids, scratch);
    row.append(sampled.token, true);
    return sampled;
}

int32_t Sampler::sample_token(Row& row, const float* x, float max_logit, Scratch& scratch) const {
    const RowParams& params = row.params;
    const RandomBits random = random_bits(params.seed, uint64_t(row.num_tokens), params.sample);
    Survivors survivors(x, vocab_, max_logit, scratch);
    for (Filter filter : params.filters) {
        switch (filter) {
            case Filter::top_n_sigma: survivors.top_n_sigma(params.top_n_sigma); break;
            case Filter::temperature:
                if (params.dynatemp_range > 0.0)
                    survivors.dynamic_temperature(params.temperature, params.dynatemp_range, params.dynatemp_exponent);
                else
                    survivors.temperature(params.temperature);
                break;
            case Filter::top_k: survivors.top_k(params.top_k); break;
            case Filter::top_p: survivors.top_p(params.top_p); break;
            case Filter::min_p: survivors.min_p(params.min_p); break;
            case Filter::typical_p: survivors.typical_p(params.typical_p); break;
            case Filter::xtc:
                if (double(random.further) * 0x1p-53 < params.xtc_probability) survivors.xtc(params.xtc_threshold);
                break;
        }
    }
    if (params.mirostat.version == 0) return survivors.pick(random.race);
    if (params.mirostat.version == 1)
        survivors.mirostat_1(row.mu);
    else
        survivors.mirostat_2(row.mu);
    const PickedToken picked = survivors.pick_with_surprise(random.race);
    row.mu -= params.mirostat.eta * (picked.surprise - params.mirostat.tau);
    return picked.id;
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

std::vector<Logprob> Sampler::raw_logprobs(const float* raw, int32_t token, int64_t num_top,
                                           const std::vector<int32_t>& listed, Scratch& scratch) const {
    const MaxLogit max_logit = find_max(raw, vocab_);
    if (max_logit.id < 0) return {{token, kNegInf, 1}};
    const Softmax softmax = softmax_of(max_logit.logit, 1.0);
    const double total = log_total(raw, vocab_, softmax);
    const auto describe = [&](int32_t id) -> Logprob {
        const float logit = std::isnan(raw[id]) ? kNegInf : raw[id];
        return {id, logprob(logit, softmax, total), 1 + count_greater(raw, vocab_, logit)};
    };
    std::vector<Logprob> out = {describe(token)};
    const std::vector<Logprob> top = most_likely(raw, softmax, total, num_top, scratch);
    out.insert(out.end(), top.begin(), top.end());
    for (int32_t id : listed) out.push_back(describe(id));
    return out;
}

std::vector<std::vector<Logprob>> Sampler::logprobs(const float* logits, int64_t stride,
                                                    const std::vector<int32_t>& targets, int64_t num_top) {
    for (int32_t target : targets) check_id(target, "targets");
    std::vector<std::vector<Logprob>> out(targets.size());
    for_each_line(targets.size(), [&](int64_t i, Scratch& scratch) {
        out[i] = raw_logprobs(logits + i * stride, targets[i], num_top, {}, scratch);
    });
    return out;
}

}  // namespace quire
