#include "grids.h"

#include <cstring>
#include <vector>

#include "fp16.h"

namespace quire {

namespace {

// A grid is a set of vectors of digits, sorted with the first digit as the least significant one. It is stored as a
// bitmap of all possible vectors: 8 digits of base 3, or 4 digits of base 8.
const uint8_t kStoredGrids[] = {
#include "grids.inc"
};
constexpr int kBase3Bytes = (6561 + 7) / 8, kBase8Bytes = 4096 / 8;
static_assert(sizeof kStoredGrids == 4 * kBase3Bytes + 2 * kBase8Bytes, "four grids of base 3, two of base 8");

struct Grid {
    int digits;
    std::vector<uint8_t> entries;

    Grid(const uint8_t* bits, int base, int digits) : digits(digits) {
        const int count = base == 3 ? 6561 : 4096;
        for (int vector = 0; vector < count; ++vector) {
            if (!(bits[vector / 8] >> vector % 8 & 1)) continue;
            for (int i = 0, rest = vector; i < digits; ++i, rest /= base) entries.push_back(uint8_t(rest % base));
        }
    }
    const uint8_t* at(int entry) const { return entries.data() + entry * digits; }
};

struct Grids {
    Grid iq2_xxs{kStoredGrids, 3, 8}, iq2_xs{kStoredGrids + kBase3Bytes, 3, 8},
        iq2_s{kStoredGrids + 2 * kBase3Bytes, 3, 8}, iq1{kStoredGrids + 3 * kBase3Bytes, 3, 8},
        iq3_xxs{kStoredGrids + 4 * kBase3Bytes, 8, 4}, iq3_s{kStoredGrids + 4 * kBase3Bytes + kBase8Bytes, 8, 4};
};

const Grids& grids() {
    static const Grids all;
    return all;
}

template <class T>
T read(const uint8_t* bytes) {
    T value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

float fp16_at(const uint8_t* bytes) { return fp16_to_float(read<uint16_t>(bytes)); }

// Seven signs are stored. The eighth makes the number of negative signs even.
int with_eighth_sign(int seven) { return seven | (__builtin_popcount(unsigned(seven)) & 1) << 7; }

// Stores digits and signs as codebook indices. A codebook has the values of the digits, and behind them (from index 4
// on for base 3, from index 8 on for base 8) the negative ones.
void store_eight(const uint8_t* digits, int signs, int8_t* quants) {
    for (int i = 0; i < 8; ++i) quants[i] = int8_t(digits[i] | (signs >> i & 1) << 2);
}
void store_four(const uint8_t* digits, int signs, int8_t* quants) {
    for (int i = 0; i < 4; ++i) quants[i] = int8_t(digits[i] | (signs >> i & 1) << 3);
}

// IQ1's digits 0, 1, 2 mean -1, 0, 1. An eighth is added to all of them, or subtracted.
void store_eighths(const uint8_t* digits, bool subtracts, int8_t* quants) {
    store_eight(digits, subtracts ? 255 : 0, quants);
}

}  // namespace

void decode_iq1_s(const uint8_t* block, DecodedBlock& out) {
    // super-scale, 32 bytes of entries, 8 words: 4 times 3 more bits of an entry, 3 of a sub-scale, whether to subtract
    const uint8_t* low = block + 2;
    for (int g = 0; g < 8; ++g) {
        const int word = read<uint16_t>(block + 34 + 2 * g);
        out.sub_scales[g] = int8_t(2 * (word >> 12 & 7) + 1);
        for (int v = 0; v < 4; ++v)
            store_eighths(grids().iq1.at(low[4 * g + v] | (word >> 3 * v & 7) << 8), word >> 15,
                          out.quants + 32 * g + 8 * v);
    }
    out.super_scale = fp16_at(block) * 0.125f;
    multiply_sub_scales(8, out);
}

void decode_iq1_m(const uint8_t* block, DecodedBlock& out) {
    // 32 bytes of entries, 16 of nibbles (3 more bits, whether to subtract), 4 words of 4 sub-scales of 3 bits each;
    // the top four bits of the words form the super-scale
    const uint8_t *low = block, *high = block + 32, *words = block + 48;
    int all = 0;
    for (int w = 0; w < 4; ++w) all |= read<uint16_t>(words + 2 * w) >> 12 << 4 * w;
    for (int g = 0; g < 16; ++g) {
        const int scale = read<uint16_t>(words + g / 4 * 2) >> (g % 4 * 3) & 7;
        out.sub_scales[g] = int8_t(2 * scale + 1);
        for (int v = 0; v < 2; ++v) {
            const int nibble = high[g] >> 4 * v & 15;
            store_eighths(grids().iq1.at(low[2 * g + v] | (nibble & 7) << 8), nibble >> 3, out.quants + 16 * g + 8 * v);
        }
    }
    out.super_scale = fp16_to_float(uint16_t(all)) * 0.125f;
    multiply_sub_scales(16, out);
}

void decode_iq2_xxs(const uint8_t* block, DecodedBlock& out) {
    // super-scale, then for each group 4 bytes of entries and a word: 4 times 7 signs, a sub-scale
    for (int g = 0; g < 8; ++g) {
        const uint8_t* entries = block + 2 + 8 * g;
        const uint32_t word = read<uint32_t>(entries + 4);
        out.sub_scales[g] = int8_t(2 * (word >> 28) + 1);
        for (int v = 0; v < 4; ++v)
            store_eight(grids().iq2_xxs.at(entries[v]), with_eighth_sign(word >> 7 * v & 127),
                        out.quants + 32 * g + 8 * v);
    }
    out.super_scale = fp16_at(block) * 0.125f;
    multiply_sub_scales(8, out);
}

void decode_iq2_xs(const uint8_t* block, DecodedBlock& out) {
    // super-scale, 32 words: an entry of 9 bits and 7 signs; 8 bytes of sub-scales
    for (int g = 0; g < 16; ++g) {
        out.sub_scales[g] = int8_t(2 * (block[66 + g / 2] >> g % 2 * 4 & 15) + 1);
        for (int v = 2 * g; v < 2 * g + 2; ++v) {
            const int word = read<uint16_t>(block + 2 + 2 * v);
            store_eight(grids().iq2_xs.at(word & 511), with_eighth_sign(word >> 9), out.quants + 8 * v);
        }
    }
    out.super_scale = fp16_at(block) * 0.125f;
    multiply_sub_scales(16, out);
}

void decode_iq2_s(const uint8_t* block, DecodedBlock& out) {
    // super-scale, 32 bytes of entries, 32 of signs, 8 of 2 more bits for each entry, 8 of sub-scales
    const uint8_t *low = block + 2, *signs = block + 34, *high = block + 66, *scales = block + 74;
    for (int g = 0; g < 16; ++g) {
        out.sub_scales[g] = int8_t(2 * (scales[g / 2] >> g % 2 * 4 & 15) + 1);
        for (int v = 2 * g; v < 2 * g + 2; ++v)
            store_eight(grids().iq2_s.at(low[v] | (high[v / 4] >> v % 4 * 2 & 3) << 8), signs[v], out.quants + 8 * v);
    }
    out.super_scale = fp16_at(block) * 0.125f;
    multiply_sub_scales(16, out);
}

void decode_iq3_xxs(const uint8_t* block, DecodedBlock& out) {
    // super-scale, 64 bytes of entries, for each group a word: 4 times 7 signs, a sub-scale
    for (int g = 0; g < 8; ++g) {
        const uint32_t word = read<uint32_t>(block + 66 + 4 * g);
        out.sub_scales[g] = int8_t(2 * (word >> 28) + 1);
        for (int v = 0; v < 8; ++v)
            store_four(grids().iq3_xxs.at(block[2 + 8 * g + v]), with_eighth_sign(word >> v / 2 * 7 & 127) >> v % 2 * 4,
                       out.quants + 32 * g + 4 * v);
    }
    out.super_scale = fp16_at(block) * 0.25f;
    multiply_sub_scales(8, out);
}

void decode_iq3_s(const uint8_t* block, DecodedBlock& out) {
    // super-scale, 64 bytes of entries, 8 of a ninth bit for each, 32 of signs, 4 of sub-scales
    const uint8_t *low = block + 2, *high = block + 66, *signs = block + 74, *scales = block + 106;
    for (int g = 0; g < 8; ++g) {
        out.sub_scales[g] = int8_t(2 * (scales[g / 2] >> g % 2 * 4 & 15) + 1);
        for (int v = 8 * g; v < 8 * g + 8; ++v)
            store_four(grids().iq3_s.at(low[v] | (high[g] >> v % 8 & 1) << 8), signs[v / 2] >> v % 2 * 4,
                       out.quants + 4 * v);
    }
    out.super_scale = fp16_at(block);
    multiply_sub_scales(8, out);
}

}  // namespace quire
