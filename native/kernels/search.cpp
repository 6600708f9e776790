// Scales of groups of weights, and entries of grids, that lose least. They are specified in search.h.

#include "search.h"

#include "inline.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

namespace {

constexpr float kLargestFp16 = 65504.0f;
constexpr float kSmallestScale = 6.002187728881836e-05f;  // an fp16 number that groups of zeros get: readers divide

QUIRE_INLINE Floats magnitude(Floats x) { return max(x, splat(0.0f) - x); }

// 1 / x, and 0 where that is not finite.
QUIRE_INLINE Floats inverse(Floats x) {
    const Floats inverted = splat(1.0f) / x;
    return select_greater(splat(from_bits(0x7f800000)), magnitude(inverted), inverted, splat(0.0f));
}

// To the nearest integer, ties to even. |x| is at most 2^22.
QUIRE_INLINE Floats round(Floats x) { return (x + splat(0x1.8p23f)) - splat(0x1.8p23f); }

QUIRE_INLINE Floats round(Floats x, Floats low, Floats high) { return round(min(max(x, low), high)); }

QUIRE_INLINE Floats add_product(Floats x, Floats y, Floats sum) { return sum + x * y; }  // rounded twice

// kLanes groups from `first` on, transposed: x, weights and weights * x [size, kLanes] each. Groups behind the last are
// zeros.
struct Lanes {
    float *x, *weights, *weighted;
    int64_t size;
    Floats low, high;

    Lanes(const Groups& groups, int64_t first) : size(groups.size) {
        x = groups.scratch;
        weights = x + size * kLanes;
        weighted = weights + size * kLanes;
        const int64_t lanes = groups.count - first < kLanes ? groups.count - first : kLanes;
        for (int64_t lane = 0; lane < lanes; ++lane)
            for (int64_t i = 0; i < size; ++i) {
                x[i * kLanes + lane] = groups.x[(first + lane) * size + i];
                weights[i * kLanes + lane] = groups.weights[(first + lane) * size + i];
            }
        for (int64_t lane = lanes; lane < kLanes; ++lane)
            for (int64_t i = 0; i < size; ++i) x[i * kLanes + lane] = weights[i * kLanes + lane] = 0.0f;
        low = high = load(x);
        for (int64_t i = 0; i < size; ++i) {
            const Floats value = load(x + i * kLanes);
            low = min(low, value);
            high = max(high, value);
            store(weighted + i * kLanes, load(weights + i * kLanes) * value);
        }
    }
    QUIRE_INLINE Floats value(int64_t i) const { return load(x + i * kLanes); }
    QUIRE_INLINE Floats weight(int64_t i) const { return load(weights + i * kLanes); }
    QUIRE_INLINE Floats weighted_value(int64_t i) const { return load(weighted + i * kLanes); }
    // The value of the largest magnitude, with its sign.
    QUIRE_INLINE Floats largest() const { return select_greater(splat(0.0f) - low, high, low, high); }
};

void store_groups(float* to, int64_t first, int64_t count, Floats x) {
    if (count - first >= kLanes)
        store(to + first, x);
    else
        store_part(to + first, x, count - first);
}

Floats load_groups(const float* from, int64_t first, int64_t count) {
    return count - first >= kLanes ? load(from + first) : load_part(from + first, count - first);
}

// The scale of least squares where x is about scale * quant(x * factor / largest), for the best of the factors.
template <class Quant>
QUIRE_INLINE void refitted(const Groups& groups, const float* factors, int num_factors, float* scales,
                           const Quant& quant) {
    for (int64_t first = 0; first < groups.count; first += kLanes) {
        const Lanes lanes(groups, first);
        const Floats over = inverse(lanes.largest());
        Floats best = splat(-1.0f), chosen = splat(0.0f);
        for (int f = 0; f < num_factors; ++f) {
            const Floats factor = splat(factors[f]) * over;
            Floats product = splat(0.0f), squares = splat(0.0f);
            for (int64_t i = 0; i < lanes.size; ++i) {
                const Floats q = quant(lanes.value(i) * factor);
                product = add_product(lanes.weighted_value(i), q, product);
                squares = add_product(lanes.weight(i), q * q, squares);
            }
            const Floats scale = product * inverse(squares);
            const Floats gain = product * scale;  // the squared error is sum(weights * x * x) less this
            chosen = select_greater(gain, best, scale, chosen);
            best = select_greater(gain, best, gain, best);
        }
        store_groups(scales, first, groups.count, chosen);
    }
}

void symmetric(const Groups& groups, const float* factors, int num_factors, int levels, float* scales) {
    const Floats low = splat(float(-levels)), high = splat(float(levels - 1));
    refitted(groups, factors, num_factors, scales, [=](Floats x) QUIRE_INLINED { return round(x, low, high); });
}

void codebook(const Groups& groups, const float* factors, int num_factors, const float* book, float* scales) {
    float middles[15], gaps[15];
    for (int i = 0; i < 15; ++i) {
        middles[i] = (book[i] + book[i + 1]) / 2.0f;
        gaps[i] = book[i + 1] - book[i];
    }
    refitted(groups, factors, num_factors, scales, [&](Floats x) QUIRE_INLINED {
        Floats entry = splat(book[0]);
        for (int i = 0; i < 15; ++i) entry = entry + select_greater(x, splat(middles[i]), splat(gaps[i]), splat(0.0f));
        return entry;
    });
}

void offset(const Groups& groups, const float* factors, int num_factors, int levels, bool free, float* scales,
            float* offsets) {
    const Floats zero = splat(0.0f), two = splat(2.0f), top = splat(float(levels));
    for (int64_t first = 0; first < groups.count; first += kLanes) {
        const Lanes lanes(groups, first);
        const Floats low = free ? lanes.low : min(lanes.low, zero), range = lanes.high - low, over = inverse(range);
        Floats sum_w = zero, sum_x = zero;
        for (int64_t i = 0; i < lanes.size; ++i) {
            sum_w = sum_w + lanes.weight(i);
            sum_x = sum_x + lanes.weighted_value(i);
        }
        Floats best = zero, best_scale = range / top, best_offset = low;
        for (int f = 0; f < num_factors; ++f) {
            const Floats factor = splat(factors[f]) * over;
            Floats sum_xq = zero, sum_q = zero, sum_qq = zero;
            for (int64_t i = 0; i < lanes.size; ++i) {
                const Floats q = round((lanes.value(i) - low) * factor, zero, top), wq = lanes.weight(i) * q;
                sum_xq = add_product(lanes.weighted_value(i), q, sum_xq);
                sum_q = sum_q + wq;
                sum_qq = add_product(wq, q, sum_qq);
            }
            Floats scale = best_scale, offset = best_offset;
            if (f > 0) {
                const Floats determinant = inverse(sum_w * sum_qq - sum_q * sum_q);
                scale = (sum_w * sum_xq - sum_x * sum_q) * determinant;
                offset = (sum_qq * sum_x - sum_q * sum_xq) * determinant;
                if (!free) {
                    scale = select_greater(offset, zero, sum_xq * inverse(sum_qq), scale);
                    offset = min(offset, zero);
                }
            }
            // The weighted squared error less sum(weights * x * x), which all candidates share.
            Floats loss = scale * scale * sum_qq + offset * offset * sum_w;
            loss = loss + two * (scale * offset * sum_q - scale * sum_xq - offset * sum_x);
            if (f == 0) {
                best = loss;
                continue;
            }
            const Floats tried = select_greater(scale, zero, loss, best);
            best_scale = select_greater(best, tried, scale, best_scale);
            best_offset = select_greater(best, tried, offset, best_offset);
            best = select_greater(best, tried, tried, best);
        }
        store_groups(scales, first, groups.count, best_scale);
        store_groups(offsets, first, groups.count, best_offset);
    }
}

QUIRE_INLINE Floats nonzero_fp16(Floats x) {
    Fp16 stored[kLanes];
    store(stored, min(max(x, splat(-kLargestFp16)), splat(kLargestFp16)));
    const Floats rounded = load(stored);
    return select_greater(magnitude(rounded), splat(0.0f), rounded, splat(kSmallestScale));
}

void shrunk(const Groups& groups, const float* widest, const float* zeros, const float* shrinks, int num_shrinks,
            int levels, float* scales) {
    const Floats top = splat(float(levels)), none = splat(0.0f);
    for (int64_t first = 0; first < groups.count; first += kLanes) {
        const Lanes lanes(groups, first);
        const Floats width = load_groups(widest, first, groups.count), zero = load_groups(zeros, first, groups.count);
        Floats best = splat(from_bits(0x7f800000)), chosen = nonzero_fp16(width);
        for (int s = 0; s < num_shrinks; ++s) {
            const Floats scale = nonzero_fp16(width * splat(shrinks[s])), over = inverse(scale);
            Floats loss = none;
            for (int64_t i = 0; i < lanes.size; ++i) {
                const Floats q = round(lanes.value(i) * over + zero, none, top);
                const Floats error = (q - zero) * scale - lanes.value(i);
                loss = add_product(lanes.weight(i), error * error, loss);
            }
            chosen = select_greater(best, loss, scale, chosen);
            best = select_greater(best, loss, loss, best);
        }
        store_groups(scales, first, groups.count, chosen);
    }
}

// costs [base ^ digits, kLanes]: of each combination of the digits `first` .. `first + digits`.
void half_costs(const Lanes& lanes, int64_t first, int64_t digits, const DigitGrid& grid, float* costs) {
    int64_t known = 1;
    store(costs, splat(0.0f));
    for (int64_t digit = first; digit < first + digits; ++digit) {
        const Floats x = lanes.value(digit), weight = lanes.weight(digit);
        // The last digit first: it overwrites what the others are added to last.
        for (int k = grid.base - 1; k >= 0; --k) {
            const Floats error = x - splat(grid.values[k]), cost = weight * (error * error);
            for (int64_t i = 0; i < known; ++i)
                store(costs + (k * known + i) * kLanes, load(costs + i * kLanes) + cost);
        }
        known *= grid.base;
    }
}

void nearest(const Groups& groups, const DigitGrid& grid, int32_t* entries) {
    alignas(64) float costs[kGridScratch];
    float *low = costs, *high = costs + kMaxHalf * kLanes;
    for (int64_t first = 0; first < groups.count; first += kLanes) {
        const Lanes lanes(groups, first);
        half_costs(lanes, 0, lanes.size / 2, grid, low);
        half_costs(lanes, lanes.size / 2, lanes.size / 2, grid, high);
        Floats best = splat(from_bits(0x7f800000)), chosen = splat(0.0f);
        for (int e = 0; e < grid.num_entries; ++e) {
            const uint8_t* halves = grid.halves + 2 * e;
            const Floats cost = load(low + halves[0] * kLanes) + load(high + halves[1] * kLanes);
            chosen = select_greater(best, cost, splat(float(e)), chosen);
            best = select_greater(best, cost, cost, best);
        }
        float numbers[kLanes];
        store(numbers, chosen);
        for (int64_t lane = 0; lane < kLanes && first + lane < groups.count; ++lane)
            entries[first + lane] = int32_t(numbers[lane]);
    }
}

}  // namespace

extern const SearchKernels search_kernels;
const SearchKernels search_kernels = {symmetric, offset, shrunk, codebook, nearest};

}  // namespace quire::QUIRE_ISA
