// The race that picks a token: the one whose exponential number divided by its weight is the least wins.
// Spec: ops/race.py
#pragma once

#include <cstdint>
#include <cstring>

#include "softmax.h"

namespace quire {

// The random key of one position. A token's number depends on it and on the token's id alone.
struct Race {
    static constexpr double max_exponential = 37.0;  // -log(2^-53) is below

    uint32_t k0, k1;

    // A permutation of words: lowbias32 of hash-prospector. W is uint32_t or a vector of them.
    template <class W>
    QUIRE_ALWAYS_INLINE static W mix(W x) {
        x ^= x >> 16;
        x *= 0x7FEB352Du;
        x ^= x >> 15;
        x *= 0x846CA68Bu;
        return x ^ (x >> 16);
    }
    // The upper 32 of the 52 random bits of a token. Divided by 2^32, they are at most its exponential number.
    template <class W>
    QUIRE_ALWAYS_INLINE W high_bits(W id) const {
        return mix<W>(mix<W>(id + k0) ^ k1);
    }

    double exponential(int32_t id) const {
        const uint32_t mixed = mix(uint32_t(id) + k0), low = mix(mixed * 0x9E3779B1u + k1);
        const uint64_t odd = uint64_t{mix(mixed ^ k1)} << 21 | uint64_t{low >> 12} << 1 | 1;
        return -log(1.0 - double(odd) * 0x1p-53);
    }

    // When a token of a weight above 0 finishes.
    double time(int32_t id, int64_t weight) const { return exponential(id) / double(weight); }

 private:
    // Of normal numbers in (0, 1).
    static double log(double x) {
        uint64_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        int64_t e = int64_t(bits >> 52) - 1023;
        bits = (bits & ((uint64_t{1} << 52) - 1)) | uint64_t{1023} << 52;
        double m;
        std::memcpy(&m, &bits, sizeof m);
        if (m > 1.4142135623730951) {
            m *= 0.5;
            e += 1;
        }
        const double f = m - 1.0, s = f / (2.0 + f), z = s * s;
        double series = 2.0 / 19.0;
        series = series * z + 2.0 / 17.0;
        series = series * z + 2.0 / 15.0;
        series = series * z + 2.0 / 13.0;
        series = series * z + 2.0 / 11.0;
        series = series * z + 2.0 / 9.0;
        series = series * z + 2.0 / 7.0;
        series = series * z + 2.0 / 5.0;
        series = series * z + 2.0 / 3.0;
        return double(e) * 0.6931471805599453 + (series * z * s + 2.0 * s);
    }
};

// The token that has finished first so far; of equals the lowest id.
class RaceLeader {
 public:
    // `time`: that some token surely reaches.
    RaceLeader(const Race& race, double time) : race_(race), time_(time) {}

    void enter(int32_t id, int64_t weight) {
        if (weight == 0) return;
        // Most tokens are too late whatever their lower bits are. The factor is a margin for rounding.
        if (double(race_.high_bits(uint32_t(id))) * 0x1p-32 > time_ * double(weight) * (1.0 + 1e-12)) return;
        const double time = race_.time(id, weight);
        if (time < time_ || (time == time_ && id < id_)) time_ = time, id_ = id;
    }
    int32_t id() const { return id_; }
    double time() const { return time_; }

 private:
    Race race_;
    double time_;
    int32_t id_ = INT32_MAX;
};

}  // namespace quire
