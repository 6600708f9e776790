#include "vocab_scan.h"

#include <algorithm>
#include <array>
#include <limits>

#include "kernels.h"

namespace quire {

namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 512;       // logits per maximum, in the search for the largest
constexpr int64_t kRaceBlock = 1024;  // logits between two bounds of a race
constexpr int64_t kFirstRaceBlock = 128;
constexpr double kRaceMargin = 1.001;  // for the error of bounds in fp32
constexpr int64_t kSkip = 64;          // logits skipped at once if none is above the bound
constexpr size_t kSortBelow = 32;

// Every CPU we know has vectors of 16 bytes.
typedef float Floats __attribute__((vector_size(16)));

Floats load(const float* x) {
    Floats v;
    std::memcpy(&v, x, sizeof v);
    return v;
}

// NaN is skipped: it compares false.
float greatest(const float* x, int64_t n) {
    Floats a = Floats{} + kNegInf, b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const Floats xa = load(x + i), xb = load(x + i + 4);
        const Floats xc = load(x + i + 8), xd = load(x + i + 12);
        a = xa > a ? xa : a;
        b = xb > b ? xb : b;
        c = xc > c ? xc : c;
        d = xd > d ? xd : d;
    }
    a = b > a ? b : a;
    c = d > c ? d : c;
    a = c > a ? c : a;
    float best = kNegInf;
    for (int j = 0; j < 4; ++j) best = a[j] > best ? a[j] : best;
    for (; i < n; ++i) best = x[i] > best ? x[i] : best;
    return best;
}

void append_above(const float* x, int64_t start, int64_t end, float bound, std::vector<Candidate>& out) {
    for (int64_t i = start; i < end; ++i)
        if (x[i] > bound) out.push_back({-double(x[i]), 0, int32_t(i)});
}

}  // namespace

void copy_masked(const float* x, int64_t vocab, const uint32_t* mask, float* out) {
    for (int64_t start = 0; start < vocab; start += 32) {
        const int64_t end = std::min(start + 32, vocab);
        const uint32_t word = mask[start / 32];
        if (word == 0) {  // the usual case: a grammar permits few tokens, or nearly all
            std::fill(out + start, out + end, kNegInf);
        } else if (word == ~uint32_t{0}) {
            std::copy(x + start, x + end, out + start);
        } else {
            for (int64_t i = start; i < end; ++i) out[i] = word >> (i - start) & 1 ? x[i] : kNegInf;
        }
    }
}

MaxLogit find_max(const float* x, int64_t vocab) {
    float best = kNegInf;
    int64_t position = -1;  // first of the block of the largest logit, then of the logit itself
    for (int64_t start = 0; start < vocab; start += kBlock) {
        const float value = greatest(x + start, std::min(kBlock, vocab - start));
        if (value > best) {
            best = value;
            position = start;
        }
    }
    if (position < 0) return {kNegInf, -1};
    while (x[position] != best) ++position;
    return {best, int32_t(position)};
}

int64_t count_greater(const float* x, int64_t vocab, float bound) {
    int32_t count = 0;
    for (int64_t i = 0; i < vocab; ++i) count += x[i] > bound;
    return count;
}

int32_t pick_winner(const float* x, int64_t vocab, const Softmax& softmax, int64_t max_weight, const Race& race) {
    RaceLeader leader(race, Race::max_exponential / double(max_weight));
    std::array<int32_t, kRaceBlock> ids;
    int64_t size = kFirstRaceBlock;  // before a good time is known, most tokens may win
    for (int64_t start = 0; start < vocab; start += size, size = kRaceBlock) {
        const double time = leader.time() * kRaceMargin * 0x1p31;
        const RaceBounds bounds = {race, float(softmax.max_logit), float(softmax.inverse_temperature),
                                   float(time * double(Softmax::one)), float(time) + 1.0f};
        const int64_t end = std::min(start + size, vocab);
        const int64_t count = kernels().ops.find_racers(x, start, end, bounds, ids.data());
        for (int64_t i = 0; i < count; ++i) leader.enter(ids[i], softmax.weight(x[ids[i]]));
    }
    return leader.id();
}

void collect_above(const float* x, int64_t vocab, float bound, std::vector<Candidate>& out) {
    out.clear();
    for (int64_t start = 0; start < vocab; start += kSkip) {
        const int64_t end = std::min(start + kSkip, vocab);
        if (greatest(x + start, end - start) > bound) append_above(x, start, end, bound, out);
    }
}

void select_greatest(const float* x, int64_t vocab, int64_t count, std::vector<Candidate>& out) {
    out.clear();
    if (count <= 0) return;
    const size_t keep = size_t(std::min(count, vocab));
    float bound = kNegInf;  // the least of `keep` candidates, once there are as many: a later equal one has a higher id
    const auto shrink = [&] {
        std::nth_element(out.begin(), out.begin() + (keep - 1), out.end());
        out.resize(keep);
        bound = float(-out.back().key);
    };
    for (int64_t start = 0; start < vocab; start += kSkip) {
        const int64_t end = std::min(start + kSkip, vocab);
        if (greatest(x + start, end - start) > bound) append_above(x, start, end, bound, out);
        if (out.size() >= 2 * keep + kSkip) shrink();
    }
    if (out.size() > keep) shrink();
}

size_t select_mass(std::vector<Candidate>& candidates, int64_t need) {
    // The prefix ends within [low, high). The candidates before `low` have the weight `before`.
    size_t low = 0, high = candidates.size();
    int64_t before = 0;
    while (high - low > kSortBelow) {
        const size_t middle = low + (high - low) / 2;
        std::nth_element(candidates.begin() + low, candidates.begin() + middle, candidates.begin() + high);
        int64_t half = 0;
        for (size_t i = low; i < middle; ++i) half += candidates[i].weight;
        if (before + half >= need) {
            high = middle;
        } else {
            before += half;
            low = middle;
        }
    }
    std::sort(candidates.begin() + low, candidates.begin() + high);
    while (low < high && before < need) before += candidates[low++].weight;
    return low;
}

}  // namespace quire
