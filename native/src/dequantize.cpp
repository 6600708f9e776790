#include "dequantize.h"

#include <cassert>
#include <cstring>
#include <initializer_list>

#include "fp16.h"
#include "grids.h"

namespace quire {

namespace {

constexpr StorageInfo kStorages[] = {
    // name, storage, block, bytes, group, quantized range, scales, offset, codebook
    {"F32", Storage::F32, 1, 4, 0, 0, 0, ScaleType::Float16, false, Codebook::None},
    {"F16", Storage::F16, 1, 2, 0, 0, 0, ScaleType::Float16, false, Codebook::None},
    {"BF16", Storage::BF16, 1, 2, 0, 0, 0, ScaleType::Float16, false, Codebook::None},
    {"Q4_0", Storage::Q4_0, 32, 18, 32, -8, 7, ScaleType::Float16, false, Codebook::None},
    {"Q4_1", Storage::Q4_1, 32, 20, 32, 0, 15, ScaleType::Float16, true, Codebook::None},
    {"Q5_0", Storage::Q5_0, 32, 22, 32, -16, 15, ScaleType::Float16, false, Codebook::None},
    {"Q5_1", Storage::Q5_1, 32, 24, 32, 0, 31, ScaleType::Float16, true, Codebook::None},
    {"Q8_0", Storage::Q8_0, 32, 34, 32, -128, 127, ScaleType::Float16, false, Codebook::None},
    {"Q2_K", Storage::Q2_K, 256, 84, 16, 0, 3, ScaleType::TwoLevel, true, Codebook::None},
    {"Q3_K", Storage::Q3_K, 256, 110, 16, -4, 3, ScaleType::TwoLevel, false, Codebook::None},
    {"Q4_K", Storage::Q4_K, 256, 144, 32, 0, 15, ScaleType::TwoLevel, true, Codebook::None},
    {"Q5_K", Storage::Q5_K, 256, 176, 32, 0, 31, ScaleType::TwoLevel, true, Codebook::None},
    {"Q6_K", Storage::Q6_K, 256, 210, 16, -32, 31, ScaleType::TwoLevel, false, Codebook::None},
    {"IQ4_NL", Storage::IQ4_NL, 32, 18, 32, 0, 15, ScaleType::Float16, false, Codebook::IQ4},
    {"IQ4_XS", Storage::IQ4_XS, 256, 136, 32, 0, 15, ScaleType::TwoLevel, false, Codebook::IQ4},
    {"MXFP4", Storage::MXFP4, 32, 17, 32, 0, 15, ScaleType::BFloat16, false, Codebook::E2M1},
    {"IQ1_S", Storage::IQ1_S, 256, 50, 32, 0, 7, ScaleType::WideTwoLevel, false, Codebook::IQ1},
    {"IQ1_M", Storage::IQ1_M, 256, 56, 16, 0, 7, ScaleType::WideTwoLevel, false, Codebook::IQ1},
    {"IQ2_XXS", Storage::IQ2_XXS, 256, 66, 32, 0, 7, ScaleType::WideTwoLevel, false, Codebook::IQ2},
    {"IQ2_XS", Storage::IQ2_XS, 256, 74, 16, 0, 7, ScaleType::WideTwoLevel, false, Codebook::IQ2},
    {"IQ2_S", Storage::IQ2_S, 256, 82, 16, 0, 7, ScaleType::WideTwoLevel, false, Codebook::IQ2},
    {"IQ3_XXS", Storage::IQ3_XXS, 256, 98, 32, 0, 15, ScaleType::WideTwoLevel, false, Codebook::IQ3_XXS},
    {"IQ3_S", Storage::IQ3_S, 256, 110, 32, 0, 15, ScaleType::WideTwoLevel, false, Codebook::IQ3_S},
    {"TQ1_0", Storage::TQ1_0, 256, 54, 32, -1, 2, ScaleType::Float16, false, Codebook::None},
    {"TQ2_0", Storage::TQ2_0, 256, 66, 32, -1, 2, ScaleType::Float16, false, Codebook::None},
    {"NVFP4", Storage::NVFP4, 64, 36, 16, 0, 15, ScaleType::Float16, false, Codebook::E2M1},
    {"Q4_Z", Storage::Q4_Z, 32, 20, 32, 0, 15, ScaleType::ZeroPoint, true, Codebook::None},
    {"Q4_F", Storage::Q4_F, 32, 24, 32, 0, 15, ScaleType::Float32, true, Codebook::None},
    {"Q8_F", Storage::Q8_F, 32, 36, 32, -128, 127, ScaleType::Float32, false, Codebook::None},
    {"Q8_M", Storage::Q8_M, 32, 40, 32, -128, 127, ScaleType::Float32, true, Codebook::None},
    {"NF4", Storage::NF4, 32, 20, 32, 0, 15, ScaleType::Float32, false, Codebook::NF4},
    {"FP4", Storage::FP4, 32, 20, 32, 0, 15, ScaleType::Float32, false, Codebook::FP4},
    {"F8_E4M3", Storage::F8_E4M3, 1, 1, 0, 0, 0, ScaleType::Float32, false, Codebook::None},
    {"F8_E5M2", Storage::F8_E5M2, 1, 1, 0, 0, 0, ScaleType::Float32, false, Codebook::None},
    {"FP8", Storage::FP8, 32, 36, 0, 0, 0, ScaleType::Float32, false, Codebook::None},
};
static_assert(sizeof kStorages / sizeof kStorages[0] == kNumStorages, "a row for each type");

float fp16_at(const uint8_t* bytes) {
    uint16_t bits;
    std::memcpy(&bits, bytes, 2);
    return fp16_to_float(bits);
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

float rounded_scale(float value) {
    const uint32_t bits = bits_of_float(value);
    if ((bits & 0x7f800000) == 0x7f800000) return value;
    return float_of_bits((bits + 1 + (bits >> 2 & 1)) & ~3u);
}

float float_at(const uint8_t* bytes) { return float_of_bits(bits32_at(bytes)); }

// Rounded to 22 bits, ties to even: kernels multiply scales by 3 * 2^22, and that has to be exact.
float wide_scale_at(const uint8_t* bytes) { return rounded_scale(float_at(bytes)); }

// A sign, four bits of exponent, three of mantissa. All ones are NaN; there is no Inf.
float e4m3_to_float(uint8_t bits) {
    const uint32_t magnitude = bits & 0x7f, sign = uint32_t(bits & 0x80) << 24;
    if (magnitude == 0x7f) return float_of_bits(sign | 0x7fc00000);
    if (magnitude < 8) return float_of_bits(bits_of_float(float(magnitude) * 0x1p-9f) | sign);  // subnormal or zero
    return float_of_bits(sign | ((magnitude << 20) + (120u << 23)));
}

// The upper byte of an fp16.
float e5m2_to_float(uint8_t bits) { return fp16_to_float(uint16_t(bits << 8)); }

// 16 bytes -> 32 quantized values: the low nibbles, then the high ones.
void decode_nibbles(const uint8_t* bytes, int bias, int8_t* quants) {
    for (int i = 0; i < 16; ++i) {
        quants[i] = int8_t((bytes[i] & 15) - bias);
        quants[i + 16] = int8_t((bytes[i] >> 4) - bias);
    }
}

// As above, with a fifth bit for each value.
void decode_five_bits(const uint8_t* bytes, uint32_t high, int bias, int8_t* quants) {
    for (int i = 0; i < 16; ++i) {
        quants[i] = int8_t(((bytes[i] & 15) | ((high >> i & 1) << 4)) - bias);
        quants[i + 16] = int8_t(((bytes[i] >> 4) | ((high >> (i + 16) & 1) << 4)) - bias);
    }
}

void decode_q4_0(const uint8_t* block, DecodedBlock& out) {  // scale, 16 bytes of nibbles
    out.scales[0] = fp16_at(block);
    decode_nibbles(block + 2, 8, out.quants);
}

void decode_q4_1(const uint8_t* block, DecodedBlock& out) {  // scale, offset, 16 bytes of nibbles
    out.scales[0] = fp16_at(block);
    out.offsets[0] = fp16_at(block + 2);
    decode_nibbles(block + 4, 0, out.quants);
}

void decode_q5_0(const uint8_t* block, DecodedBlock& out) {  // scale, 32 fifth bits, 16 bytes of nibbles
    out.scales[0] = fp16_at(block);
    decode_five_bits(block + 6, bits32_at(block + 2), 16, out.quants);
}

void decode_q5_1(const uint8_t* block, DecodedBlock& out) {  // scale, offset, 32 fifth bits, 16 bytes of nibbles
    out.scales[0] = fp16_at(block);
    out.offsets[0] = fp16_at(block + 2);
    decode_five_bits(block + 8, bits32_at(block + 4), 0, out.quants);
}

void decode_q8_0(const uint8_t* block, DecodedBlock& out) {  // scale, 32 int8
    out.scales[0] = fp16_at(block);
    std::memcpy(out.quants, block + 2, 32);
}

// Scales and offsets.
void multiply_sub_offsets(int groups, DecodedBlock& out) {
    multiply_sub_scales(groups, out);
    for (int g = 0; g < groups; ++g) out.offsets[g] = out.super_offset * float(out.sub_offsets[g]);
}

void decode_q2_k(const uint8_t* block, DecodedBlock& out) {
    // 16 bytes of sub-scale and sub-offset nibbles, 64 of 4 values each, super-scale, super-offset
    const uint8_t *scales = block, *quads = block + 16;
    out.super_scale = fp16_at(block + 80);
    out.super_offset = -fp16_at(block + 82);
    for (int g = 0; g < 16; ++g) {
        out.sub_scales[g] = int8_t(scales[g] & 15);
        out.sub_offsets[g] = int8_t(scales[g] >> 4);
    }
    multiply_sub_offsets(16, out);
    for (int run = 0; run < 8; ++run)  // 32 values at the same bits of their bytes
        for (int i = 0; i < 32; ++i) out.quants[run * 32 + i] = int8_t(quads[run / 4 * 32 + i] >> (run % 4 * 2) & 3);
}

void decode_q3_k(const uint8_t* block, DecodedBlock& out) {
    // 32 bytes of third bits, 64 of 4 values each, 12 of sub-scales, super-scale
    const uint8_t *high = block, *quads = block + 32, *scales = block + 96;
    out.super_scale = fp16_at(block + 108);
    for (int g = 0; g < 16; ++g) {  // 6 bits: a nibble of the first 8 bytes, 2 bits of the last 4
        const int low_bits = scales[g % 8] >> (g / 8 * 4) & 15, high_bits = scales[8 + g % 4] >> (g / 4 * 2) & 3;
        out.sub_scales[g] = int8_t((low_bits | high_bits << 4) - 32);
    }
    multiply_sub_scales(16, out);
    for (int run = 0; run < 8; ++run)
        for (int i = 0; i < 32; ++i) {
            const int low_bits = quads[run / 4 * 32 + i] >> (run % 4 * 2) & 3;
            out.quants[run * 32 + i] = int8_t(low_bits + ((high[i] >> run & 1) << 2) - 4);
        }
}

// Two fp16 super-scales and 12 bytes of 8 sub-scales and 8 sub-offsets of 6 bits: Q4_K, Q5_K.
void decode_k_scales(const uint8_t* block, DecodedBlock& out) {
    out.super_scale = fp16_at(block);
    out.super_offset = -fp16_at(block + 2);
    const uint8_t* bytes = block + 4;
    for (int g = 0; g < 4; ++g) {
        out.sub_scales[g] = int8_t(bytes[g] & 63);
        out.sub_offsets[g] = int8_t(bytes[g + 4] & 63);
        out.sub_scales[g + 4] = int8_t((bytes[g + 8] & 15) | bytes[g] >> 6 << 4);
        out.sub_offsets[g + 4] = int8_t(bytes[g + 8] >> 4 | bytes[g + 4] >> 6 << 4);
    }
    multiply_sub_offsets(8, out);
}

void decode_q4_k(const uint8_t* block, DecodedBlock& out) {  // super-scales, 12 bytes of sub-scales, 128 of nibbles
    decode_k_scales(block, out);
    const uint8_t* nibbles = block + 16;
    for (int run = 0; run < 8; ++run)
        for (int i = 0; i < 32; ++i) out.quants[run * 32 + i] = int8_t(nibbles[run / 2 * 32 + i] >> (run % 2 * 4) & 15);
}

void decode_q5_k(const uint8_t* block, DecodedBlock& out) {  // as Q4_K, with 32 bytes of fifth bits before the nibbles
    decode_k_scales(block, out);
    const uint8_t *high = block + 16, *nibbles = block + 48;
    for (int run = 0; run < 8; ++run)
        for (int i = 0; i < 32; ++i) {
            const int low_bits = nibbles[run / 2 * 32 + i] >> (run % 2 * 4) & 15;
            out.quants[run * 32 + i] = int8_t(low_bits | (high[i] >> run & 1) << 4);
        }
}

void decode_q6_k(const uint8_t* block, DecodedBlock& out) {
    // 128 bytes of nibbles, 64 of 2 bits, 16 int8 sub-scales, super-scale
    const uint8_t *low = block, *high = block + 128;
    out.super_scale = fp16_at(block + 208);
    std::memcpy(out.sub_scales, block + 192, 16);
    multiply_sub_scales(16, out);
    for (int run = 0; run < 8; ++run)
        for (int i = 0; i < 32; ++i) {
            const int low_bits = low[run / 4 * 64 + run % 2 * 32 + i] >> (run / 2 % 2 * 4) & 15;
            const int high_bits = high[run / 4 * 32 + i] >> (run % 4 * 2) & 3;
            out.quants[run * 32 + i] = int8_t((low_bits | high_bits << 4) - 32);
        }
}

void decode_iq4_nl(const uint8_t* block, DecodedBlock& out) {  // scale, 16 bytes of nibbles
    out.scales[0] = fp16_at(block);
    decode_nibbles(block + 2, 0, out.quants);
}

void decode_iq4_xs(const uint8_t* block, DecodedBlock& out) {
    // super-scale, 16 bits and 4 bytes of sub-scales, 16 bytes of nibbles for each group
    out.super_scale = fp16_at(block);
    const uint32_t high = bits16_at(block + 2);
    for (int g = 0; g < 8; ++g) {
        const int low_bits = block[4 + g / 2] >> (g % 2 * 4) & 15, high_bits = high >> (2 * g) & 3;
        out.sub_scales[g] = int8_t((low_bits | high_bits << 4) - 32);
        decode_nibbles(block + 8 + 16 * g, 0, out.quants + 32 * g);
    }
    multiply_sub_scales(8, out);
}

void decode_mxfp4(const uint8_t* block, DecodedBlock& out) {  // an exponent, 16 bytes of nibbles
    // 2^(exponent - 128), half of the standard's scale: the codebook's values are doubled. The first two are subnormal.
    const uint32_t exponent = block[0];
    out.scales[0] = float_of_bits(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    decode_nibbles(block + 1, 0, out.quants);
}

void decode_tq1_0(const uint8_t* block, DecodedBlock& out) {
    // 32 and 16 bytes of 5 digits each, 4 bytes of 4, scale. A byte is a fraction in base 3: after a multiplication
    // with a power of 3, the next digit is its integer part.
    const uint8_t* bytes = block;
    int8_t* quants = out.quants;
    for (const int run : {32, 16, 4}) {
        uint8_t power = 1;
        for (int digit = 0; digit < (run == 4 ? 4 : 5); ++digit, power = uint8_t(3 * power))
            for (int i = 0; i < run; ++i) *quants++ = int8_t((uint8_t(bytes[i] * power) * 3 >> 8) - 1);
        bytes += run;
    }
    for (int g = 0; g < 8; ++g) out.scales[g] = fp16_at(block + 52);
}

void decode_tq2_0(const uint8_t* block, DecodedBlock& out) {  // 64 bytes of 4 values each, scale
    for (int run = 0; run < 8; ++run) {
        out.scales[run] = fp16_at(block + 64);
        for (int i = 0; i < 32; ++i)
            out.quants[run * 32 + i] = int8_t((block[run / 4 * 32 + i] >> (run % 4 * 2) & 3) - 1);
    }
}

void decode_nvfp4(const uint8_t* block, DecodedBlock& out) {  // 4 scales of 8 bits, 8 bytes of nibbles for each
    for (int g = 0; g < 4; ++g) {
        const uint8_t scale = block[g] & 0x7f;  // the sign bit is ignored; 0x7f is 0
        out.scales[g] = block[g] == 0x7f ? 0.0f : scale == 0x7f ? 240.0f : 0.5f * e4m3_to_float(scale);
        for (int i = 0; i < 8; ++i) {
            out.quants[16 * g + i] = int8_t(block[4 + 8 * g + i] & 15);
            out.quants[16 * g + i + 8] = int8_t(block[4 + 8 * g + i] >> 4);
        }
    }
}

void decode_q4_z(const uint8_t* block, DecodedBlock& out) {  // scale, zero point, 16 bytes of nibbles
    out.scales[0] = fp16_at(block);
    out.offsets[0] = -fp16_at(block + 2);
    decode_nibbles(block + 4, 0, out.quants);
}

void decode_q4_f(const uint8_t* block, DecodedBlock& out) {  // scale, offset, 16 bytes of nibbles
    out.scales[0] = wide_scale_at(block);
    out.offsets[0] = float_at(block + 4);
    decode_nibbles(block + 8, 0, out.quants);
}

void decode_q8_f(const uint8_t* block, DecodedBlock& out) {  // scale, 32 int8
    out.scales[0] = wide_scale_at(block);
    std::memcpy(out.quants, block + 4, 32);
}

void decode_q8_m(const uint8_t* block, DecodedBlock& out) {  // scale, offset, 32 int8
    out.scales[0] = wide_scale_at(block);
    out.offsets[0] = float_at(block + 4);
    std::memcpy(out.quants, block + 8, 32);
}

void decode_nf4(const uint8_t* block, DecodedBlock& out) {  // absmax, 16 bytes of nibbles
    out.scales[0] = rounded_scale(float_at(block) / kNF4Steps);
    decode_nibbles(block + 4, 0, out.quants);
}

void decode_fp4(const uint8_t* block, DecodedBlock& out) {  // as NF4
    out.scales[0] = rounded_scale(float_at(block) / kFP4Steps);
    decode_nibbles(block + 4, 0, out.quants);
}

}  // namespace

void multiply_sub_scales(int groups, DecodedBlock& out) {
    for (int g = 0; g < groups; ++g) out.scales[g] = out.super_scale * float(out.sub_scales[g]);
}

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
        case Storage::IQ1_S: return decode_iq1_s;
        case Storage::IQ1_M: return decode_iq1_m;
        case Storage::IQ2_XXS: return decode_iq2_xxs;
        case Storage::IQ2_XS: return decode_iq2_xs;
        case Storage::IQ2_S: return decode_iq2_s;
        case Storage::IQ3_XXS: return decode_iq3_xxs;
        case Storage::IQ3_S: return decode_iq3_s;
        case Storage::TQ1_0: return decode_tq1_0;
        case Storage::TQ2_0: return decode_tq2_0;
        case Storage::NVFP4: return decode_nvfp4;
        case Storage::Q4_Z: return decode_q4_z;
        case Storage::Q4_F: return decode_q4_f;
        case Storage::Q8_F: return decode_q8_f;
        case Storage::Q8_M: return decode_q8_m;
        case Storage::NF4: return decode_nf4;
        case Storage::FP4: return decode_fp4;
        case Storage::F32:
        case Storage::F16:
        case Storage::BF16:
        case Storage::F8_E4M3:
        case Storage::F8_E5M2:
        case Storage::FP8: break;
    }
    assert(!"floats have no quantized blocks");
    return nullptr;
}

void dequantize_row(Storage storage, const uint8_t* row, float* out, int64_t n) {
    const StorageInfo& info = storage_info(storage);
    assert(n % info.block == 0);
    if (storage == Storage::F32) {
        std::memcpy(out, row, size_t(n) * 4);
    } else if (storage == Storage::F16) {
        for (int64_t i = 0; i < n; ++i) out[i] = fp16_at(row + 2 * i);
    } else if (storage == Storage::BF16) {
        for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_float(bits16_at(row + 2 * i));
    } else if (storage == Storage::F8_E4M3) {
        for (int64_t i = 0; i < n; ++i) out[i] = e4m3_to_float(row[i]);
    } else if (storage == Storage::F8_E5M2) {
        for (int64_t i = 0; i < n; ++i) out[i] = e5m2_to_float(row[i]);
    } else if (storage == Storage::FP8) {
        for (int64_t i = 0; i < n; ++i) {
            const uint8_t* block = row + i / info.block * info.block_bytes;
            out[i] = float_at(block) * e4m3_to_float(block[4 + i % info.block]);
        }
    } else {
        const DecodeBlock decode = block_decoder(storage);
        const bool has_codebook = info.codebook != Codebook::None;
        const int8_t* codebook = kCodebooks[int(info.codebook)];
        DecodedBlock block;
        for (int64_t first = 0; first < n; first += info.block, row += info.block_bytes) {
            decode(row, block);
            for (int i = 0; i < info.block; ++i) {
                const int g = i / info.group;
                const int8_t quant = has_codebook ? codebook[block.quants[i]] : block.quants[i];
                const float value = block.scales[g] * float(quant);
                const float offset_factor = info.scale_type == ScaleType::ZeroPoint ? block.scales[g] : 1.0f;
                out[first + i] = info.has_offset ? value + offset_factor * block.offsets[g] : value;
            }
        }
    }
}

}  // namespace quire
