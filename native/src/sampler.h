// Samples tokens for rows, and keeps the state of each row that penalties and bans need.
// Spec: ops/reference/sampler.py; definitions: docs/sampling.md
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "repetition.h"
#include "survivors.h"

namespace quire {

// As in core/watermark.py.
struct Watermark {
    uint64_t key = 0;
    uint32_t green_below = 0;  // a token is green if its 32 random bits are below this
    float delta = 0.0f;        // 0: no watermark
};

// As in ops/row_params.py, with the same numbers.
enum class Filter { top_n_sigma, temperature, top_k, top_p, min_p, typical_p, xtc };

struct MirostatParams {
    int version = 0;  // 0: not mirostat
    double tau = 5.0, eta = 0.1;
};

struct RowParams {
    uint64_t seed = 0;
    uint32_t sample = 0;
    double temperature = 1.0;
    int64_t top_k = 0;
    double top_p = 1.0, min_p = 0.0, typical_p = 1.0;
    float repetition_penalty = 1.0f, presence_penalty = 0.0f, frequency_penalty = 0.0f;
    std::vector<std::pair<int32_t, float>> logit_bias;
    bool restricted = false;  // to the ids in `allowed`
    std::vector<int32_t> allowed;
    std::vector<std::vector<int32_t>> banned;
    std::vector<int32_t> stop_ids;
    int64_t min_tokens = 0;
    int64_t num_logprobs = -1;
    std::vector<int32_t> logprob_ids;
    int64_t num_candidates = 0;
    Watermark watermark;
    int64_t no_repeat_ngram = 0;
    DryParams dry;
    double top_n_sigma = 0.0;
    double dynatemp_range = 0.0, dynatemp_exponent = 1.0;
    double xtc_probability = 0.0, xtc_threshold = 0.1;
    MirostatParams mirostat;
    std::vector<Filter> filters;  // those that do something, in order
};

struct Logprob {
    int32_t id;
    double logprob;
    int64_t rank;  // 1 + the number of strictly greater logits
};

struct SampledToken {
    static constexpr int32_t candidates = -1;  // nothing was sampled: the best continuations are in `logprobs`
    static constexpr int32_t broken = -2;      // nothing can be sampled: no permitted token has a logit above -inf

    int32_t token;
    std::vector<Logprob> logprobs;
};

// Not thread-safe. A call distributes its rows over threads.
class Sampler {
 public:
    // num_threads 0: as many as OpenMP would use. The result does not depend on it.
    Sampler(int64_t num_rows, int64_t vocab, int num_threads);

    // `tokens`: all known tokens of the row. The first `num_prompt` of them are its prompt. mu: mirostat's, after them.
    void admit(int64_t row, RowParams params, const std::vector<int32_t>& tokens, int64_t num_prompt, double mu);
    void retire(int64_t row);
    double mu(int64_t row) { return held(row).mu; }

    // Line i of logits, [rows.size(), vocab] with `stride` floats from line to line, belongs to rows[i]; rows differ.
    // masks[i] is null, or has a bit for every token: tokens with a 0 are not sampled in this step.
    std::vector<SampledToken> sample_rows(const float* logits, int64_t stride, const std::vector<int64_t>& rows,
                                          const std::vector<const uint32_t*>& masks);

    // rows[i] has one line for its next token and one for the token after each draft of drafts[i], in the order of
    // rows. Samples tokens until one differs from its draft: at least one, at most one more than there are drafts.
    // parents[i] is empty or, if the drafts are a tree, has the parent of each: an earlier draft, or -1. Sampling goes
    // on at the line of the first child whose token was sampled. `parents` may be empty, too.
    std::vector<std::vector<SampledToken>> verify(const float* logits, int64_t stride, const std::vector<int64_t>& rows,
                                                  const std::vector<std::vector<int32_t>>& drafts,
                                                  const std::vector<std::vector<int32_t>>& parents,
                                                  const std::vector<const uint32_t*>& masks);

    std::vector<std::vector<Logprob>> logprobs(const float* logits, int64_t stride, const std::vector<int32_t>& targets,
                                               int64_t num_top);

    int64_t vocab() const { return vocab_; }

 private:
    struct Row {
        bool held = false;
        RowParams params;
        int64_t num_tokens = 0, num_prompt = 0;
        double mu = 0.0;
        std::vector<int32_t> tokens;  // all of them, if DRY or n-grams need them
        std::vector<int32_t> tail;    // the last tokens: as many as the longest ban, or a watermark, needs
        size_t tail_length = 0;
        std::unordered_map<int32_t, int32_t>
            seen;  // penalized tokens -> occurrences in the output; 0: only in the prompt

        int64_t num_output() const { return num_tokens - num_prompt; }
        bool has_history() const { return params.dry.multiplier != 0.0 || params.no_repeat_ngram > 0; }
        bool edited() const;
        void append(int32_t token, bool output);
    };
    using Scratch = SamplerScratch;

    Row& held(int64_t row);
    void check_id(int64_t id, const char* what) const;
    void check_rows(const std::vector<int64_t>& rows);
    template <class Work>
    void for_each_line(size_t num_lines, const Work& work);  // work(line, scratch)

    SampledToken sample_row(Row& row, const float* raw, const uint32_t* mask, Scratch& scratch) const;
    void restrict_to_allowed(const RowParams& params, const float* raw, const uint32_t* mask,
                             std::vector<float>& out) const;
    void bias_green_tokens(const Row& row, std::vector<float>& out) const;
    void edit(const Row& row, const float* raw, const uint32_t* mask, std::vector<float>& out) const;
    int32_t sample_token(Row& row, const float* x, float max_logit, Scratch& scratch) const;
    std::vector<Logprob> most_likely(const float* x, const Softmax& softmax, double log_total, int64_t count,
                                     Scratch& scratch) const;
    std::vector<Logprob> raw_logprobs(const float* raw, int32_t token, int64_t num_top,
                                      const std::vector<int32_t>& listed, Scratch& scratch) const;

    int64_t vocab_;
    std::vector<Row> rows_;
    std::vector<Scratch> scratch_;  // one per thread
};

}  // namespace quire
