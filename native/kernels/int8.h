// Integer arithmetic of int8 pages: an int8 *matrix*, which is stored, times *vectors* of 15 bits, which are computed.
//
// A group of numbers is quantized values times a scale, the largest magnitude divided by the largest quantized value.
// The matrix is laid out as [depth / 4][width][4], so that a SIMD vector holds 4 values each of consecutive columns. A
// vector is laid out as two planes of bytes, q = 128 * high + low. Dot products are exact integer sums, in any order.
#pragma once

#include <math.h>

#include "vec.h"

namespace quire::QUIRE_ISA {
namespace {

// Vectors are interleaved in fours: [depth / 4][4 vectors][high, low][4]. A quad of one vector is 8 bytes.
constexpr int kVectorsAtOnce = 4;
constexpr int64_t kPlaneBytes = 8, kQuadBytes = kVectorsAtOnce * kPlaneBytes;
constexpr float kInt8Max = 127.0f, kPlanesMax = 127.0f * 128.0f;
// A group whose magnitude is below this is stored as zeros: the inverse of its scale would overflow.
constexpr float kMinMagnitude = 0x1p-100f;

#if defined(QUIRE_FLOATS_NEON)

// Sums; as many quads of the matrix; quads of both planes of two vectors.
struct Integers {
    int32x4_t a, b;
};
struct Quants {
    int8x16_t a, b;
};
using Quads = int8x16_t;
inline Integers zero_integers() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
inline Quants load_quants(const int8_t* p) { return {vld1q_s8(p), vld1q_s8(p + 16)}; }
inline Quads load_quads(const int8_t* p) { return vld1q_s8(p); }
// sum + quants . quads[Lane]
template <int Lane>
inline Integers add_dot(Integers sum, Quants quants, Quads quads) {
    return {vdotq_laneq_s32(sum.a, quants.a, quads, Lane), vdotq_laneq_s32(sum.b, quants.b, quads, Lane)};
}
// 128 * high + low
inline Floats joined(Integers high, Integers low) {
    return {vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(high.a, 7), low.a)),
            vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(high.b, 7), low.b))};
}
// Rounds to the nearest int8, ties to even. x is in -127 .. 127.
inline void store_quants(int8_t* p, Floats x) {
    const int16x8_t both = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(x.a)), vmovn_s32(vcvtnq_s32_f32(x.b)));
    vst1_s8(p, vmovn_s16(both));
}
// The same for -127 * 128 .. 127 * 128: two quads, in planes.
inline int8x8_t planes_of(float32x4_t x) {
    const int32x4_t quant = vcvtnq_s32_f32(x), high = vrshrq_n_s32(quant, 7),
                    low = vsubq_s32(quant, vshlq_n_s32(high, 7));
    return vmovn_s16(vcombine_s16(vmovn_s32(high), vmovn_s32(low)));
}
inline void store_planes(int8_t* p, Floats x) { vst1_s8(p, planes_of(x.a)), vst1_s8(p + kQuadBytes, planes_of(x.b)); }

#else

using Quads = const int8_t*;
inline Quads load_quads(const int8_t* p) { return p; }

#if defined(QUIRE_FLOATS_AVX512)

struct Integers {
    __m512i a;
};
struct Quants {
    __m512i magnitude;
    __mmask64 negative;
};
inline Integers zero_integers() { return {_mm512_setzero_si512()}; }
inline Quants load_quants(const int8_t* p) {
    const __m512i quants = _mm512_loadu_si512(p);
    return {_mm512_abs_epi8(quants), _mm512_movepi8_mask(quants)};
}
// dpbusd multiplies unsigned with signed bytes: the signs of the matrix are moved to the quad.
template <int Lane>
inline Integers add_dot(Integers sum, Quants quants, Quads quads) {
    int32_t bits;
    memcpy(&bits, quads + 4 * Lane, 4);
    const __m512i quad = _mm512_set1_epi32(bits);
    const __m512i signed_quad = _mm512_mask_sub_epi8(quad, quants.negative, _mm512_setzero_si512(), quad);
    return {_mm512_dpbusd_epi32(sum.a, quants.magnitude, signed_quad)};
}
inline Floats joined(Integers high, Integers low) {
    return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high.a, 7), low.a))};
}
inline void store_quants(int8_t* p, Floats x) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.a)));
}
inline void store_planes(int8_t* p, Floats x) {
    const __m512i quant = _mm512_cvtps_epi32(x.a);
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(quant, _mm512_set1_epi32(64)), 7);
    const __m128i highs = _mm512_cvtepi32_epi8(high);
    const __m128i lows = _mm512_cvtepi32_epi8(_mm512_sub_epi32(quant, _mm512_slli_epi32(high, 7)));
    const __m128i quads[2] = {_mm_unpacklo_epi32(highs, lows), _mm_unpackhi_epi32(highs, lows)};
    for (int i = 0; i < 2; ++i, p += 2 * kQuadBytes) {
        _mm_storel_epi64((__m128i*)p, quads[i]);
        _mm_storeh_pd((double*)(p + kQuadBytes), _mm_castsi128_pd(quads[i]));
    }
}

#elif defined(QUIRE_FLOATS_AVX)

struct Integers {
    __m256i a;
};
struct Quants {
    __m256i a, magnitude;
};
inline Integers zero_integers() { return {_mm256_setzero_si256()}; }
inline Quants load_quants(const int8_t* p) {
    const __m256i quants = _mm256_loadu_si256((const __m256i*)p);
    return {quants, _mm256_abs_epi8(quants)};
}
// AVX multiplies unsigned with signed bytes: the signs of the matrix are moved to the quad.
template <int Lane>
inline Integers add_dot(Integers sum, Quants quants, Quads quads) {
    int32_t bits;
    memcpy(&bits, quads + 4 * Lane, 4);
    const __m256i quad = _mm256_sign_epi8(_mm256_set1_epi32(bits), quants.a);
#if defined(__AVXVNNI__)
    return {_mm256_dpbusd_avx_epi32(sum.a, quants.magnitude, quad)};
#else
    const __m256i pairs = _mm256_maddubs_epi16(quants.magnitude, quad);  // at most 2 * 128 * 127: no saturation
    return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
#endif
}
inline Floats joined(Integers high, Integers low) {
    return {_mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(high.a, 7), low.a))};
}
inline void store_quants(int8_t* p, Floats x) {
    const __m256i quant = _mm256_cvtps_epi32(x.a);
    const __m128i both = _mm_packs_epi32(_mm256_castsi256_si128(quant), _mm256_extracti128_si256(quant, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(both, both));
}
inline void store_planes(int8_t* p, Floats x) {
    const __m256i quant = _mm256_cvtps_epi32(x.a);
    const __m256i high = _mm256_srai_epi32(_mm256_add_epi32(quant, _mm256_set1_epi32(64)), 7);
    const __m256i both = _mm256_packs_epi32(high, _mm256_sub_epi32(quant, _mm256_slli_epi32(high, 7)));
    const __m256i planes = _mm256_packs_epi16(both, both);
    _mm_storel_epi64((__m128i*)p, _mm256_castsi256_si128(planes));
    _mm_storel_epi64((__m128i*)(p + kQuadBytes), _mm256_extracti128_si256(planes, 1));
}

#else

struct Integers {
    int32_t v[kLanes];
};
struct Quants {
    int8_t v[kLanes][4];
};
inline Integers zero_integers() { return {}; }
inline Quants load_quants(const int8_t* p) {
    Quants quants;
    memcpy(quants.v, p, sizeof quants.v);
    return quants;
}
template <int Lane>
inline Integers add_dot(Integers sum, Quants quants, Quads quads) {
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < 4; ++j) sum.v[i] += int32_t(quants.v[i][j]) * quads[4 * Lane + j];
    return sum;
}
inline Floats joined(Integers high, Integers low) {
    Floats out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = float(128 * high.v[i] + low.v[i]);
    return out;
}
inline void store_quants(int8_t* p, Floats x) {
    for (int i = 0; i < kLanes; ++i) p[i] = int8_t(lrintf(x.v[i]));
}
inline void store_planes(int8_t* p, Floats x) {
    for (int i = 0; i < kLanes; ++i) {
        const int32_t quant = int32_t(lrintf(x.v[i])), high = (quant + 64) >> 7;
        int8_t* quad = p + i / 4 * kQuadBytes + i % 4;
        quad[0] = int8_t(high);
        quad[4] = int8_t(quant - 128 * high);
    }
}

#endif
#endif

// The scale of a group, and its inverse: q = x * inverse.
struct Int8Scale {
    float inverse, scale;

    // For a group of this magnitude. If it has an Inf or a NaN, the scale is NaN, so that results are.
    Int8Scale(float magnitude, float max_quant) : inverse(0.0f), scale(0.0f) {
        if (!(magnitude < INFINITY)) {
            scale = NAN;
        } else if (magnitude >= kMinMagnitude) {
            inverse = max_quant / magnitude;
            scale = magnitude / max_quant;
        }
    }
    bool zero() const { return inverse == 0.0f; }  // all quantized values are 0
};

// The largest magnitude of x [n], n a multiple of kLanes.
inline float magnitude_of(const float* x, int64_t n) {
    Floats maximum = splat(0.0f);
    for (int64_t i = 0; i < n; i += kLanes) maximum = max_magnitude(maximum, load(x + i));
    return reduce_max_magnitude(maximum);
}

// Quantizes x [n] of this magnitude as one of four vectors, n a multiple of kLanes. Returns the scale.
inline float quantize(const float* x, int64_t n, float magnitude, int8_t* planes) {
    const Int8Scale int8(magnitude, kPlanesMax);
    for (int64_t i = 0; i < n; i += kLanes, planes += kLanes / 4 * kQuadBytes)
        store_planes(planes, int8.zero() ? splat(0.0f) : load(x + i) * splat(int8.inverse));
    return int8.scale;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
