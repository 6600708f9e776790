// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): random numbers as a function.
// Spec: ops/philox.py
#pragma once

#include <array>
#include <cstdint>

#include "race.h"

namespace quire {

inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> key) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
        c = {uint32_t(b >> 32) ^ c[1] ^ key[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ key[1], uint32_t(a)};
        key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
    }
    return c;
}

// The random bits of the token at `position` (in the whole sequence, prompt included) of one completion of a request.
struct RandomBits {
    Race race;         // samples the token
    uint64_t further;  // 53 bits for XTC: divided by 2^53, they are uniform in [0, 1)
};

inline RandomBits random_bits(uint64_t seed, uint64_t position, uint32_t sample) {
    const auto words =
        philox4x32({uint32_t(position), uint32_t(position >> 32), sample, 0}, {uint32_t(seed), uint32_t(seed >> 32)});
    return {{words[0], words[1]}, (uint64_t{words[3]} << 32 | words[2]) >> 11};
}

// For watermarks: the random words of 4 * kPhiloxLanes consecutive tokens after the token `before`, from the counters
// (before, first + lane, 0, 1). Compilers vectorize the loops over lanes.
constexpr int kPhiloxLanes = 8;

struct PhiloxWords {
    uint32_t word[4][kPhiloxLanes];
};

inline PhiloxWords watermark_words(uint64_t key, uint32_t before, uint32_t first) {
    PhiloxWords c;
    for (int lane = 0; lane < kPhiloxLanes; ++lane) {
        c.word[0][lane] = before;
        c.word[1][lane] = first + uint32_t(lane);
        c.word[2][lane] = 0;
        c.word[3][lane] = 1;
    }
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
    for (int round = 0; round < 10; ++round) {
        for (int lane = 0; lane < kPhiloxLanes; ++lane) {
            const uint64_t a = uint64_t{0xD2511F53} * c.word[0][lane], b = uint64_t{0xCD9E8D57} * c.word[2][lane];
            c.word[0][lane] = uint32_t(b >> 32) ^ c.word[1][lane] ^ k0;
            c.word[1][lane] = uint32_t(b);
            c.word[2][lane] = uint32_t(a >> 32) ^ c.word[3][lane] ^ k1;
            c.word[3][lane] = uint32_t(a);
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

}  // namespace quire
