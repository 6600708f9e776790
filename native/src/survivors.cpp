#include "survivors.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"

namespace quire {

namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr double kGreedyBelow = 1e-5;
constexpr double kMaxDeviation = 16384.0;  // logits further below the greatest do not count in a standard deviation
constexpr int64_t kMirostatTokens = 100;

int64_t sum_weights(const std::vector<Candidate>& candidates) {
    int64_t total = 0;
    for (const Candidate& c : candidates) total += c.weight;
    return total;
}

// The fraction `share` in (0, 1) of a total, rounded up.
int64_t mass(double share, int64_t total) { return std::min(int64_t(std::ceil(share * double(total))), total); }

template <class Drop>
void drop_if(std::vector<Candidate>& candidates, const Drop& drop) {
    candidates.erase(std::remove_if(candidates.begin(), candidates.end(), drop), candidates.end());
}

// x rounded to an integer, half to even, for |x| < 2^51: the oldest CPUs have no instruction for it.
int64_t rounded(double x) {
    constexpr double rounding = 6755399441055744.0;  // 1.5 * 2^52
    return int64_t((x + rounding) - rounding);
}

constexpr int kLanes = 2;  // every CPU we know has vectors of 16 bytes
typedef double Doubles __attribute__((vector_size(8 * kLanes)));
typedef uint64_t Words __attribute__((vector_size(8 * kLanes)));

// The weighted mean of distances, as an integer sum in steps of 2^-40: it does not depend on the order of tokens.
struct MeanDistance {
    __int128 sum = 0;
    int64_t total = 0;

    void add(double distance, int64_t weight) {
        sum += __int128(weight) * rounded(distance * 1099511627776.0);
        total += weight;
    }
    // All tokens of a vocabulary, a few at once: one after the other, their polynomials would wait for each other.
    void add_all(const float* x, int64_t vocab, const Softmax& softmax) {
        int64_t i = 0;
        for (; i + kLanes <= vocab; i += kLanes) {
            Doubles logits;
            for (int lane = 0; lane < kLanes; ++lane) logits[lane] = x[i + lane];
            const Doubles distances = softmax.distance_of(logits);
            const Words weights = Softmax::weight_of<Doubles, Words>(distances);
            for (int lane = 0; lane < kLanes; ++lane) add(distances[lane], int64_t(weights[lane]));
        }
        for (; i < vocab; ++i) add(softmax.distance(x[i]), softmax.weight(x[i]));
    }
    double value() const { return double(sum) / double(total) / 1099511627776.0; }
};

// Of distances from the greatest logit, as integers in steps of 2^-16. A square has 60 bits, and is summed in halves.
struct Deviation {
    int64_t count = 0, sum = 0, low = 0, high = 0;

    void add(double below) {
        if (!(below <= kMaxDeviation)) return;
        const int64_t step = rounded(below * 65536.0), square = step * step;
        ++count;
        sum += step;
        low += square & 0xFFFFFFFF;
        high += square >> 32;
    }
    double value() const {
        const double mean = double(sum) / double(count);
        const double squares = double((__int128(high) << 32) + low) / double(count);
        return std::sqrt(std::max(squares - mean * mean, 0.0)) / 65536.0;
    }
};

}  // namespace

Softmax softmax_of(float max_logit, double temperature) {
    return {double(std::min(max_logit, std::numeric_limits<float>::max())), 1.0 / temperature};
}

Survivors::Survivors(const float* x, int64_t vocab, float max_logit, SamplerScratch& scratch)
    : x_(x),
      vocab_(vocab),
      softmax_(softmax_of(max_logit, 1.0)),
      max_logit_(max_logit),
      scratch_(scratch),
      candidates_(scratch.candidates) {}

// The greatest logit that is left.
float Survivors::max_logit() const {
    if (!listed_) return max_logit_;
    float greatest = kNegInf;
    for (const Candidate& c : candidates_) greatest = std::max(greatest, float(-c.key));
    return greatest;
}

int64_t Survivors::total() const {
    return listed_ ? sum_weights(candidates_) : kernels().ops.total_weight(x_, vocab_, softmax_);
}

// A bound on logits: no token at or below it has this weight. Only the tokens above it, a few hundred of a vocabulary,
// are weighed and sorted.
float Survivors::logit_of(double weight) const {
    const double distance = weight > 1e4 ? std::log(weight / double(Softmax::one)) : Softmax::floor;
    const double margin = 1e-9;  // for the error of exp and log
    const double logit =
        softmax_.max_logit + std::max(distance - margin, Softmax::floor) / softmax_.inverse_temperature;
    return std::nextafter(float(logit), kNegInf);
}

void Survivors::list_above(float bound) {
    collect_above(x_, vocab_, bound, candidates_);
    listed_ = true;
    weigh();
}

void Survivors::weigh() {
    for (Candidate& c : candidates_) c.weight = softmax_.weight(float(-c.key));
}

// Keeps the first candidates in their order: the most likely.
void Survivors::keep_first(size_t count) {
    if (count >= candidates_.size()) return;
    std::nth_element(candidates_.begin(), candidates_.begin() + count, candidates_.end());
    candidates_.resize(count);
}

void Survivors::temperature(double temperature) {
    if (temperature < kGreedyBelow) {
        top_k(1);
        return;
    }
    softmax_ = softmax_of(max_logit(), temperature);
    if (listed_) weigh();
}

void Survivors::dynamic_temperature(double temperature, double range, double exponent) {
    MeanDistance mean;
    int64_t count = 0;
    if (listed_) {
        count = int64_t(candidates_.size());
        for (Candidate& c : candidates_) mean.add(softmax_.distance(float(-c.key)), c.weight);
    } else {
        count = count_greater(x_, vocab_, kNegInf);
        mean.add_all(x_, vocab_, softmax_);
    }
    if (count <= 1) return this->temperature(temperature);
    const double entropy = std::log(double(mean.total) / double(Softmax::one)) - mean.value();
    const double low = std::max(temperature - range, 0.0), high = temperature + range;
    const double normalised = std::max(entropy, 0.0) / std::log(double(count));
    this->temperature(low + (high - low) * std::pow(normalised, exponent));
}

void Survivors::top_k(int64_t k) {
    if (listed_) return keep_first(size_t(k));
    if (k >= vocab_) return;
    select_greatest(x_, vocab_, k, candidates_);
    listed_ = true;
    weigh();
}

void Survivors::top_p(double p) {
    const int64_t all = total();
    // A weight so small that a whole vocabulary of it is less than what top_p cuts off. The factor 0.999 is a margin
    // for the rounding of weights; where it is too small a margin, only tokens of weight 0 are dropped.
    if (!listed_) list_above(logit_of(0.999 * (1.0 - p) * double(all) / double(vocab_)));
    candidates_.resize(select_mass(candidates_, mass(p, all)));
}

void Survivors::min_p(double p) {
    const double min_weight = p * double(softmax_.weight(max_logit()));
    if (!listed_) list_above(logit_of(min_weight));
    drop_if(candidates_, [min_weight](const Candidate& c) { return double(c.weight) < min_weight; });
}

// Surprisal minus entropy is the mean distance from the largest logit minus the token's own distance.
void Survivors::typical_p(double p) {
    if (!listed_) list_above(logit_of(0.0));
    drop_if(candidates_, [](const Candidate& c) { return c.weight == 0; });
    MeanDistance mean;
    for (const Candidate& c : candidates_) mean.add(softmax_.distance(float(-c.key)), c.weight);
    const double mean_distance = mean.value();
    for (Candidate& c : candidates_) c.key = std::abs(mean_distance - softmax_.distance(float(-c.key)));
    candidates_.resize(select_mass(candidates_, mass(p, mean.total)));
    for (Candidate& c : candidates_) c.key = -double(x_[c.id]);
}

void Survivors::top_n_sigma(double n) {
    const double greatest = softmax_of(max_logit(), 1.0).max_logit;
    const auto below = [greatest](double logit) { return std::max(greatest - logit, 0.0); };
    Deviation deviation;
    if (listed_) {
        for (const Candidate& c : candidates_) deviation.add(below(-c.key));
    } else {
        for (int64_t i = 0; i < vocab_; ++i) deviation.add(below(double(x_[i])));
    }
    const double farthest = n * deviation.value();
    if (!listed_) list_above(std::nextafter(float(greatest - farthest), kNegInf));
    drop_if(candidates_, [&](const Candidate& c) { return below(-c.key) > farthest; });
}

void Survivors::xtc(double threshold) {
    const double min_weight = threshold * double(total());
    std::vector<Candidate> reaching;
    if (listed_) {
        reaching = candidates_;
    } else {
        collect_above(x_, vocab_, logit_of(min_weight), reaching);
        for (Candidate& c : reaching) c.weight = softmax_.weight(float(-c.key));
    }
    drop_if(reaching, [min_weight](const Candidate& c) { return double(c.weight) < min_weight || c.weight == 0; });
    if (reaching.size() < 2) return;
    const Candidate kept = *std::max_element(reaching.begin(), reaching.end());
    if (listed_) {
        drop_if(candidates_, [&kept](const Candidate& c) { return c < kept; });
        return;
    }
    if (x_ != scratch_.logits.data()) {
        scratch_.logits.assign(x_, x_ + vocab_);
        x_ = scratch_.logits.data();
    }
    for (const Candidate& c : reaching)
        if (c < kept) scratch_.logits[c.id] = kNegInf;
    max_logit_ = float(-kept.key);
}

// Keeps as many tokens as Zipf's law, with the exponent of the most likely ones, expects a surprise of mu of.
void Survivors::mirostat_1(double mu) {
    const double size = double(vocab_), log_size = std::log(size);
    std::vector<Candidate> likely;
    if (listed_)
        likely = candidates_;
    else
        select_greatest(x_, vocab_, kMirostatTokens, likely);
    std::sort(likely.begin(), likely.end());
    likely.resize(std::min(likely.size(), size_t(kMirostatTokens)));
    double above = 0.0, below = 0.0;
    for (size_t i = 0; i + 1 < likely.size(); ++i) {
        const double t = std::log(double(i + 2) / double(i + 1));
        above += t * (softmax_.distance(float(-likely[i].key)) - softmax_.distance(float(-likely[i + 1].key)));
        below += t * t;
    }
    const double exponent = below > 0.0 ? above / below : 0.0;
    int64_t k = vocab_;
    if (exponent > 0.0) {  // else all are as likely
        const double epsilon = exponent - 1.0;
        const double spread = epsilon != 0.0 ? epsilon / (1.0 - std::pow(size, -epsilon)) : 1.0 / log_size;
        const double log_k = (std::log(spread) + mu * std::log(2.0)) / exponent;
        if (!(log_k >= log_size)) k = std::max(int64_t(std::exp(log_k)), int64_t{1});
    }
    top_k(k);
}

void Survivors::mirostat_2(double mu) {
    const double min_weight = double(total()) * std::exp2(std::min(-mu, 1000.0));
    if (double(softmax_.weight(max_logit())) < min_weight) return top_k(1);
    if (!listed_) list_above(logit_of(min_weight));
    drop_if(candidates_, [&](const Candidate& c) { return double(c.weight) < min_weight || c.weight == 0; });
}

int32_t Survivors::pick(const Race& race) {
    if (!listed_) return pick_winner(x_, vocab_, softmax_, softmax_.weight(max_logit_), race);
    RaceLeader leader(race, std::numeric_limits<double>::infinity());
    for (const Candidate& c : candidates_) leader.enter(c.id, c.weight);
    return leader.id();
}

PickedToken Survivors::pick_with_surprise(const Race& race) {
    const double all = double(total());
    const int32_t id = pick(race);
    return {id, std::log2(all / double(softmax_.weight(x_[id])))};
}

}  // namespace quire
