// Softmax weights of tokens, as integers.
#pragma once

#include <cstdint>
#include <cstring>

// Always inline: native/kernels includes this file once for each ISA, and the linker must not merge the copies.
#define QUIRE_ALWAYS_INLINE __attribute__((always_inline)) inline

namespace quire {

// The weight of a token is round(2^44 * exp((logit - max_logit) / temperature)), so the most likely token has 2^44.
// Integer sums are exact in any order: all lanes, threads and devices compute the same total, and sample the same
// token. exp is a polynomial of separate multiplications and additions. Its relative error is below 1e-11, far below
// the error of fp32 logits. Spec: ops/reference/sampler.py
struct Softmax {
    static constexpr int64_t one = int64_t{1} << 44;
    static constexpr double floor = -32.0;  // exp(-32) * 2^44 = 0.22: a weight of 0

    double max_logit;  // finite
    double inverse_temperature;

    // (logit - max_logit) / temperature, clamped to [floor, 0].
    QUIRE_ALWAYS_INLINE double distance(float logit) const { return distance_of(double(logit)); }
    QUIRE_ALWAYS_INLINE int64_t weight(float logit) const {
        return int64_t(weight_of<double, uint64_t>(distance(logit)));
    }

    // The same for a vector of logits. D is double or a vector of them.
    template <class D>
    QUIRE_ALWAYS_INLINE D distance_of(D logit) const {
        const D zero{}, lowest = zero + floor;
        const D d = (logit - max_logit) * inverse_temperature;
        const D below = d > zero ? zero : d;     // an infinite logit is above max_logit
        return below > lowest ? below : lowest;  // false for NaN, which becomes the lowest
    }

    template <class D, class U>
    QUIRE_ALWAYS_INLINE static U weight_of(D distance) {
        constexpr double rounding = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, in the low bits
        constexpr double integer = 4503599627370496.0;   // 2^52: adding it leaves the integer in the low bits
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
    QUIRE_ALWAYS_INLINE static To cast(From from) {  // the same bits
        static_assert(sizeof(To) == sizeof(From));
        To to;
        std::memcpy(&to, &from, sizeof to);
        return to;
    }
};

}  // namespace quire
