// Passes over one row of logits, [vocab] floats. NaN is like -inf: never above anything, and it weighs nothing.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace quire {

// Softmax in whole numbers. A token weighs round(2^44 * exp((logit - peak) / temperature)), so the most likely one
// weighs 2^44. Integer sums are exact in any order: lanes, threads and devices all come to the same total, and so to
// the same token. exp is a polynomial of separate multiplications and additions, with a relative error below 1e-11, far
// less than rounding the logits to fp32 has cost. Spec: ops/torch/sampler.py
struct Softmax {
    static constexpr int64_t one = int64_t{1} << 44;
    static constexpr double floor = -32.0;  // exp(-32) * 2^44 = 0.22: whatever lies this far below the peak weighs 0

    double peak;  // the greatest logit, finite
    double inverse_temperature;

    // How far below the most likely token: [floor, 0].
    double distance(float logit) const { return distance_of(double(logit)); }
    int64_t weight(float logit) const { return int64_t(weight_of<double, uint64_t>(distance(logit))); }

    // The same for a vector of logits. D is double or a vector of them.
    template <class D>
    D distance_of(D logit) const {
        const D zero{}, lowest = zero + floor;
        const D d = (logit - peak) * inverse_temperature;
        const D below = d > zero ? zero : d;     // an infinite logit lies above the peak
        return below > lowest ? below : lowest;  // NaN does not
    }

    template <class D, class U>
    static U weight_of(D distance) {
        constexpr double rounding = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, in the low bits
        constexpr double integer = 4503599627370496.0;   // 2^52, likewise
        const D shifted = distance * 1.4426950408889634 + rounding;
        const D r = distance - (shifted - rounding) * 0.6931471805599453;  // |r| <= ln(2) / 2
        D e = r * (1.0 / 362880.0) + 1.0 / 40320.0;
        e = e * r + 1.0 / 5040.0;
        e = e * r + 1.0 / 720.0;
        e = e * r + 1.0 / 120.0;
        e = e * r + 1.0 / 24.0;
        e = e * r + 1.0 / 6.0;
        e = e * r + 0.5;
        e = e * r + 1.0;
        e = e * r + 1.0;
        const U power = cast<U>(shifted) - cast<uint64_t>(rounding) + 44;
        const D scaled = cast<D>(cast<U>(e) + (power << 52));  // e * 2^power
        return cast<U>(scaled + integer) - cast<uint64_t>(integer);
    }

 private:
    template <class To, class From>
    static To cast(From from) {  // the same bits
        static_assert(sizeof(To) == sizeof(From));
        To to;
        std::memcpy(&to, &from, sizeof to);
        return to;
    }
};

// A mask has a bit for every token: token t is bit t % 32 of word t / 32.
inline bool has_bit(const uint32_t* mask, int64_t id) { return mask[id / 32] >> (id % 32) & 1; }

// out[i] = x[i], or -inf where the mask has no bit.
void copy_masked(const float* x, int64_t vocab, const uint32_t* mask, float* out);

struct Peak {
    float logit;
    int32_t id;  // -1: there is nothing above -inf
};

// The greatest logit; among equals the lowest id.
Peak find_peak(const float* x, int64_t vocab);

// How many logits are strictly greater than `bound`.
int64_t count_greater(const float* x, int64_t vocab, float bound);

int64_t total_weight(const float* x, int64_t vocab, const Softmax& softmax);

// The id at which the running total of weights, in the order of ids, first exceeds uniform / 2^53 of the whole.
int32_t pick_weighted(const float* x, int64_t vocab, const Softmax& softmax, uint64_t uniform_bits);

// A token under consideration. Candidates are ordered by (key, id).
struct Candidate {
    double key;  // minus the logit: the most likely first
    int64_t weight;
    int32_t id;

    bool operator<(const Candidate& other) const { return key < other.key || (key == other.key && id < other.id); }
};

// Replace `out` by the tokens whose logit is above `bound`, still without weights.
void collect_above(const float* x, int64_t vocab, float bound, std::vector<Candidate>& out);

// Replace `out` by the `count` first candidates, in no order, still without weights. Those at -inf are left out.
void select_greatest(const float* x, int64_t vocab, int64_t count, std::vector<Candidate>& out);

// Reorder so that the smallest prefix, in candidate order, whose weights reach `need` comes first; -> its length.
// need <= the sum of all weights. Linear in the number of candidates.
size_t select_mass(std::vector<Candidate>& candidates, int64_t need);

}  // namespace quire
