#include "dequantize.h"

#include <cassert>
#include <cstring>

#include "half.h"

namespace quire {

namespace {

constexpr StorageInfo kStorages[] = {
    // name, storage, block, bytes, group, codes, scales, offset, codebook
    {"F32", Storage::F32, 1, 4, 0, 0, 0, ScaleType::Float16, false, Codebook::None},
    {"F16", Storage::F16, 1, 2, 0, 0, 0, ScaleType::Float16, false, Codebook::None},
    {"BF16", Storage::BF16, 1, 2, 0, 0, 0, ScaleType::Float16, false, Codebook::None},
    {"Q4_0", Storage::Q4_0, 32, 18, 32, -8, 7, ScaleType::Float16, false, Codebook::None},
    {"Q4_1", Storage::Q4_1, 32, 20, 32, 0, 15, ScaleType::Float16, true, Codebook::None},
    {"Q5_0", Storage::Q5_0, 32, 22, 32, -16, 15, ScaleType::Float16, false, Codebook::None},
    {"Q5_1", Storage::Q5_1, 32, 24, 32, 0, 31, ScaleType::Float16, true, Codebook::None},
    {"Q8_0", Storage::Q8_0, 32, 34, 32, -128, 127, ScaleType::Float16, false, Codebook::None},
    {"Q2_K", Storage::Q2_K, 256, 84, 16, 0, 3, ScaleType::Float32, true, Codebook::None},
    {"Q3_K", Storage::Q3_K, 256, 110, 16, -4, 3, ScaleType::Float32, false, Codebook::None},
    {"Q4_K", Storage::Q4_K, 256, 144, 32, 0, 15, ScaleType::Float32, true, Codebook::None},
    {"Q5_K", Storage::Q5_K, 256, 176, 32, 0, 31, ScaleType::Float32, true, Codebook::None},
    {"Q6_K", Storage::Q6_K, 256, 210, 16, -32, 31, ScaleType::Float32, false, Codebook::None},
    {"IQ4_NL", Storage::IQ4_NL, 32, 18, 32, 0, 15, ScaleType::Float16, false, Codebook::IQ4},
    {"IQ4_XS", Storage::IQ4_XS, 256, 136, 32, 0, 15, ScaleType::Float32, false, Codebook::IQ4},
    {"MXFP4", Storage::MXFP4, 32, 17, 32, 0, 15, ScaleType::BFloat16, false, Codebook::E2M1},
};
static_assert(sizeof kStorages / sizeof kStorages[0] == kNumStorages, "a row for each type");

float half_at(const uint8_t* bytes) {
    uint16_t bits;
    std::memcpy(&bits, bytes, 2);
    return half_to_float(bits);
}

uint16_t bits16_at(const uint8_t* bytes) {
    uint16_t bits;
    std::memcpy(&bits, bytes, 2);
    return bits;
}

uint32_t bits32_at(const uint8_t* bytes) {
    uint32_t bits;
    std::memcpy(&bits, bytes, 4);
    return bits;
}

// 16 bytes -> 32 codes: the low nibbles, then the high ones.
void decode_nibbles(const uint8_t* bytes, int bias, int8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = int8_t((bytes[i] & 15) - bias);
        codes[i + 16] = int8_t((bytes[i] >> 4) - bias);
    }
}

// As above, with a fifth bit for each code.
void decode_five_bits(const uint8_t* bytes, uint32_t high, int bias, int8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = int8_t(((bytes[i] & 15) | ((high >> i & 1) << 4)) - bias);
        codes[i + 16] = int8_t(((bytes[i] >> 4) | ((high >> (i + 16) & 1) << 4)) - bias);
    }
}

void decode_q4_0(const uint8_t* block, DecodedBlock& out) {  // scale, 16 bytes of nibbles
    out.scales[0] = half_at(block);
    decode_nibbles(block + 2, 8, out.codes);
}

void decode_q4_1(const uint8_t* block, DecodedBlock& out) {  // scale, offset, 16 bytes of nibbles
    out.scales[0] = half_at(block);
    out.offsets[0] = half_at(block + 2);
    decode_nibbles(block + 4, 0, out.codes);
}

void decode_q5_0(const uint8_t* block, DecodedBlock& out) {  // scale, 32 fifth bits, 16 bytes of nibbles
    out.scales[0] = half_at(block);
    decode_five_bits(block + 6, bits32_at(block + 2), 16, out.codes);
}

void decode_q5_1(const uint8_t* block, DecodedBlock& out) {  // scale, offset, 32 fifth bits, 16 bytes of nibbles
    out.scales[0] = half_at(block);
    out.offsets[0] = half_at(block + 2);
    decode_five_bits(block + 8, bits32_at(block + 4), 0, out.codes);
}

void decode_q8_0(const uint8_t* block, DecodedBlock& out) {  // scale, 32 codes
    out.scales[0] = half_at(block);
    std::memcpy(out.codes, block + 2, 32);
}

void decode_q2_k(const uint8_t* block, DecodedBlock& out) {
    // 16 bytes of scale and offset nibbles, 64 of 4 codes each, the scale and the offset of all
    const uint8_t *scales = block, *quads = block + 16;
    const float scale = half_at(block + 80), offset = half_at(block + 82);
    for (int g = 0; g < 16; ++g) {
        out.scales[g] = scale * float(scales[g] & 15);
        out.offsets[g] = -(offset * float(scales[g] >> 4));
    }
    for (int run = 0; run < 8; ++run)  // 32 codes that share a place in their bytes
        for (int i = 0; i < 32; ++i) out.codes[run * 32 + i] = int8_t(quads[run / 4 * 32 + i] >> (run % 4 * 2) & 3);
}

void decode_q3_k(const uint8_t* block, DecodedBlock& out) {
    // 32 bytes of third bits, 64 of 4 codes each, 12 of scales, the scale of all
    const uint8_t *high = block, *quads = block + 32, *scales = block + 96;
    const float scale = half_at(block + 108);
    for (int g = 0; g < 16; ++g) {  // 6 bits: a nibble of the first 8 bytes, 2 bits of the last 4
        const int low_bits = scales[g % 8] >> (g / 8 * 4) & 15, high_bits = scales[8 + g % 4] >> (g / 4 * 2) & 3;
        out.scales[g] = scale * float((low_bits | high_bits << 4) - 32);
    }
    for (int run = 0; run < 8; ++run)
        for (int i = 0; i < 32; ++i) {
            const int low_bits = quads[run / 4 * 32 + i] >> (run % 4 * 2) & 3;
            out.codes[run * 32 + i] = int8_t(low_bits + ((high[i] >> run & 1) << 2) - 4);
        }
}

// 12 bytes -> 8 scales and 8 offsets of 6 bits: Q4_K, Q5_K.
void decode_k_scales(const uint8_t* bytes, float scale, float offset, DecodedBlock& out) {
    for (int g = 0; g < 4; ++g) {
        out.scales[g] = scale * float(bytes[g] & 63);
        out.offsets[g] = -(offset * float(bytes[g + 4] & 63));
        out.scales[g + 4] = scale * float((bytes[g + 8] & 15) | bytes[g] >> 6 << 4);
        out.offsets[g + 4] = -(offset * float(bytes[g + 8] >> 4 | bytes[g + 4] >> 6 << 4));
    }
}

void decode_q4_k(const uint8_t* block, DecodedBlock& out) {  // scale, offset, 12 bytes of scales, 128 bytes of nibbles
    decode_k_scales(block + 4, half_at(block), half_at(block + 2), out);
    const uint8_t* nibbles = block + 16;
    for (int run = 0; run < 8; ++run)
        for (int i = 0; i < 32; ++i) out.codes[run * 32 + i] = int8_t(nibbles[run / 2 * 32 + i] >> (run % 2 * 4) & 15);
}

void decode_q5_k(const uint8_t* block, DecodedBlock& out) {  // as Q4_K, with 32 bytes of fifth bits before the nibbles
    decode_k_scales(block + 4, half_at(block), half_at(block + 2), out);
    const uint8_t *high = block + 16, *nibbles = block + 48;
    for (int run = 0; run < 8; ++run)
        for (int i = 0; i < 32; ++i) {
            const int low_bits = nibbles[run / 2 * 32 + i] >> (run % 2 * 4) & 15;
            out.codes[run * 32 + i] = int8_t(low_bits | (high[i] >> run & 1) << 4);
        }
}

void decode_q6_k(const uint8_t* block, DecodedBlock& out) {
    // 128 bytes of nibbles, 64 of 2 bits, 16 int8 scales, the scale of all
    const uint8_t *low = block, *high = block + 128;
    const float scale = half_at(block + 208);
    for (int g = 0; g < 16; ++g) out.scales[g] = scale * float(int8_t(block[192 + g]));
    for (int run = 0; run < 8; ++run)
        for (int i = 0; i < 32; ++i) {
            const int low_bits = low[run / 4 * 64 + run % 2 * 32 + i] >> (run / 2 % 2 * 4) & 15;
            const int high_bits = high[run / 4 * 32 + i] >> (run % 4 * 2) & 3;
            out.codes[run * 32 + i] = int8_t((low_bits | high_bits << 4) - 32);
        }
}

void decode_iq4_nl(const uint8_t* block, DecodedBlock& out) {  // scale, 16 bytes of nibbles
    out.scales[0] = half_at(block);
    decode_nibbles(block + 2, 0, out.codes);
}

void decode_iq4_xs(const uint8_t* block, DecodedBlock& out) {
    // the scale of all, 16 bits and 4 bytes of scales, 16 bytes of nibbles for each group
    const float scale = half_at(block);
    const uint32_t high = bits16_at(block + 2);
    for (int g = 0; g < 8; ++g) {
        const int low_bits = block[4 + g / 2] >> (g % 2 * 4) & 15, high_bits = high >> (2 * g) & 3;
        out.scales[g] = scale * float((low_bits | high_bits << 4) - 32);
        decode_nibbles(block + 8 + 16 * g, 0, out.codes + 32 * g);
    }
}

void decode_mxfp4(const uint8_t* block, DecodedBlock& out) {  // an exponent, 16 bytes of nibbles
    // 2^(exponent - 128), half of what the standard says: the codebook's numbers are doubled. The first two are
    // subnormal.
    const uint32_t exponent = block[0];
    out.scales[0] = float_of_bits(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    decode_nibbles(block + 1, 0, out.codes);
}

}  // namespace

const StorageInfo& storage_info(Storage storage) {
    const StorageInfo& info = kStorages[int(storage)];
    assert(info.storage == storage);
    return info;
}

const StorageInfo* find_storage(const char* name) {
    for (const StorageInfo& info : kStorages)
        if (std::strcmp(info.name, name) == 0) return &info;
    return nullptr;
}

DecodeBlock block_decoder(Storage storage) {
    switch (storage) {
        case Storage::Q4_0: return decode_q4_0;
        case Storage::Q4_1: return decode_q4_1;
        case Storage::Q5_0: return decode_q5_0;
        case Storage::Q5_1: return decode_q5_1;
        case Storage::Q8_0: return decode_q8_0;
        case Storage::Q2_K: return decode_q2_k;
        case Storage::Q3_K: return decode_q3_k;
        case Storage::Q4_K: return decode_q4_k;
        case Storage::Q5_K: return decode_q5_k;
        case Storage::Q6_K: return decode_q6_k;
        case Storage::IQ4_NL: return decode_iq4_nl;
        case Storage::IQ4_XS: return decode_iq4_xs;
        case Storage::MXFP4: return decode_mxfp4;
        case Storage::F32:
        case Storage::F16:
        case Storage::BF16: break;
    }
    assert(!"floats have no blocks");
    return nullptr;
}

void dequantize_row(Storage storage, const uint8_t* row, float* out, int64_t n) {
    const StorageInfo& info = storage_info(storage);
    assert(n % info.block == 0);
    if (storage == Storage::F32) {
        std::memcpy(out, row, size_t(n) * 4);
    } else if (storage == Storage::F16) {
        for (int64_t i = 0; i < n; ++i) out[i] = half_at(row + 2 * i);
    } else if (storage == Storage::BF16) {
        for (int64_t i = 0; i < n; ++i) out[i] = bfloat_to_float(bits16_at(row + 2 * i));
    } else {
        const DecodeBlock decode = block_decoder(storage);
        const bool has_codebook = info.codebook != Codebook::None;
        const int8_t* codebook = kCodebooks[int(info.codebook)];
        DecodedBlock block;
        for (int64_t first = 0; first < n; first += info.block, row += info.block_bytes) {
            decode(row, block);
            for (int i = 0; i < info.block; ++i) {
                const int g = i / info.group;
                const int8_t code = has_codebook ? codebook[block.codes[i]] : block.codes[i];
                const float value = block.scales[g] * float(code);
                out[first + i] = info.has_offset ? value + block.offsets[g] : value;
            }
        }
    }
}

}  // namespace quire
