// The tokens of a row that may be sampled, and the filters that drop the others. Spec: ops/reference/filters.py
#pragma once

#include <cstdint>
#include <vector>

#include "vocab_scan.h"

namespace quire {

struct SamplerScratch {         // of one thread
    std::vector<float> logits;  // [vocab], allocated when needed
    std::vector<Candidate> candidates;
};

struct PickedToken {
    int32_t id;
    double surprise;  // -log2 of its probability among the survivors
};

Softmax softmax_of(float max_logit, double temperature);

// Until a filter selects tokens, all of the vocabulary survive, and no list is made. Each filter sees what the one
// before it leaves. Weights are those of a temperature of 1 until there is another.
class Survivors {
 public:
    // x [vocab] may be scratch.logits. max_logit is its greatest, above -inf.
    Survivors(const float* x, int64_t vocab, float max_logit, SamplerScratch& scratch);

    void temperature(double temperature);
    void dynamic_temperature(double temperature, double range, double exponent);
    void top_k(int64_t k);
    void top_p(double p);
    void min_p(double p);
    void typical_p(double p);
    void top_n_sigma(double n);
    void xtc(double threshold);
    void mirostat_1(double mu);
    void mirostat_2(double mu);

    int32_t pick(const Race& race);
    PickedToken pick_with_surprise(const Race& race);

 private:
    float max_logit() const;
    int64_t total() const;
    float logit_of(double weight) const;
    void list_above(float bound);
    void weigh();
    void keep_first(size_t count);

    const float* x_;
    int64_t vocab_;
    Softmax softmax_;
    float max_logit_;  // of the vocabulary, until tokens are listed
    bool listed_ = false;
    SamplerScratch& scratch_;
    std::vector<Candidate>& candidates_;  // once listed: keys are minus the logits
};

}  // namespace quire
