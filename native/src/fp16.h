// Conversions of fp16 and bf16. Static: native/kernels includes this file once for each ISA, and the linker must not
// merge the copies.
#pragma once

#include <cstdint>
#include <cstring>

namespace quire {

static inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

static inline float bf16_to_float(uint16_t bits) { return float_of_bits(uint32_t(bits) << 16); }

static inline float fp16_to_float(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16;
    const uint32_t magnitude = bits & 0x7fff;
    if (magnitude < 0x0400)
        return float_of_bits(bits_of_float(float(magnitude) * 0x1p-24f) | sign);     // subnormal or zero
    const uint32_t exponent_bias = magnitude >= 0x7c00 ? 0x70000000u : 0x38000000u;  // Inf and NaN, or finite
    return float_of_bits(sign | ((magnitude << 13) + exponent_bias));
}

// The value must be exactly representable in fp16, as every scale is that a file stores in fp16.
static inline uint16_t exact_fp16(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x7f800000) return sign | 0x7c00 | uint16_t((magnitude >> 13) & 0x3ff);
    if (magnitude < 0x38800000) return sign | uint16_t(float_of_bits(magnitude) * 0x1p24f);  // subnormal or zero
    return sign | uint16_t((magnitude - 0x38000000) >> 13);
}

}  // namespace quire
