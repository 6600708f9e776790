#include "quantize.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>

#include "fp16.h"

namespace quire {

namespace {

constexpr int kBlock = 32;

// To the nearest fp16, ties to even.
uint16_t round_to_fp16(float value) {
    const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffff;
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000) return sign | 0x7e00;   // NaN
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and more round to Inf
    if (magnitude < 0x38800000)                         // subnormal: the spacing of floats from 0.5 on is 2^-24
        return sign | uint16_t(bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f));
    return sign | uint16_t((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

struct Range {
    float low, high;

    explicit Range(const float* w) : low(w[0]), high(w[0]) {
        bool finite = true;
        for (int i = 0; i < kBlock; ++i) {
            finite = finite && std::isfinite(w[i]);
            low = std::min(low, w[i]);
            high = std::max(high, w[i]);
        }
        if (!finite) low = high = float_of_bits(0x7fc00000);
    }
    float largest() const { return std::max(std::fabs(low), std::fabs(high)); }
};

float inverse(float scale) { return scale != 0.0f ? 1.0f / scale : 0.0f; }

// The nearest integer in low .. high; 0 for NaN.
int round_to_quant(float value, int low, int high) {
    if (!(value > float(low))) return value == value ? low : 0;
    return value < float(high) ? int(std::nearbyint(value)) : high;
}

void quantize_q8_0(const float* w, uint8_t* out) {
    const Range range(w);
    const uint16_t scale = round_to_fp16(range.low == range.low ? range.largest() / 127.0f : range.low);
    std::memcpy(out, &scale, 2);
    const float inverse_scale = inverse(fp16_to_float(scale));
    for (int i = 0; i < kBlock; ++i) out[2 + i] = uint8_t(round_to_quant(w[i] * inverse_scale, -127, 127));
}

// 32 nibbles: the first 16 in the low halves of bytes.
template <class Quant>
void store_nibbles(uint8_t* out, const Quant& quant) {
    for (int i = 0; i < 16; ++i) out[i] = uint8_t(quant(i) | quant(i + 16) << 4);
}

void quantize_q4_1(const float* w, uint8_t* out) {
    const Range range(w);
    const uint16_t fields[2] = {round_to_fp16((range.high - range.low) / 15.0f), round_to_fp16(range.low)};
    std::memcpy(out, fields, 4);
    const float inverse_scale = inverse(fp16_to_float(fields[0])), offset = fp16_to_float(fields[1]);
    store_nibbles(out + 4, [&](int i) { return round_to_quant((w[i] - offset) * inverse_scale, 0, 15); });
}

// Midpoints between consecutive values of the NF4 codebook.
constexpr float kNF4Midpoints[15] = {-0.8480964f, -0.6106329f, -0.4599953f, -0.3396794f, -0.2346074f,
                                     -0.1379117f, -0.0455250f, 0.0397901f,  0.1202552f,  0.2035213f,
                                     0.2920138f,  0.3893125f,  0.5016634f,  0.6427869f,  0.8614784f};

void quantize_nf4(const float* w, uint8_t* out) {
    const Range range(w);
    const float largest = range.low == range.low ? range.largest() : range.low;
    std::memcpy(out, &largest, 4);
    const float inverse_scale = inverse(largest);
    store_nibbles(out + 4, [&](int i) {
        int index = 0;
        for (const float middle : kNF4Midpoints) index += w[i] * inverse_scale > middle;
        return index;
    });
}

using QuantizeBlock = void (*)(const float* weights, uint8_t* out);

QuantizeBlock block_quantizer(Storage storage) {
    if (storage == Storage::Q8_0) return quantize_q8_0;
    if (storage == Storage::Q4_1) return quantize_q4_1;
    if (storage == Storage::NF4) return quantize_nf4;
    return nullptr;
}

}  // namespace

bool can_quantize_to(Storage storage) { return block_quantizer(storage) != nullptr; }

void quantize_row(Storage storage, const float* weights, int64_t n, uint8_t* out) {
    const QuantizeBlock quantize = block_quantizer(storage);
    assert(quantize && n % kBlock == 0);
    const int block_bytes = storage_info(storage).block_bytes;
    for (int64_t first = 0; first < n; first += kBlock, out += block_bytes) quantize(weights + first, out);
}

}  // namespace quire
