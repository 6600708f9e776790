// Arithmetic in 8-bit codes: what is stored in 8 bits, a *matrix* of codes, meets what is computed, *vectors* in 15
// bits.
//
// A group of numbers is codes times a unit, the unit being the largest magnitude by the largest code. The matrix lies
// as [depth / 4][width][4], so that 4 codes of neighbours along its width fill a vector; every vector as two planes
// of bytes, code = 128 * high + low. Their products are sums of integers: exact, whatever the order.
#pragma once

#include <math.h>

#include "vec.h"

namespace quire::QUIRE_ISA {
namespace {

// Vectors lie in fours: [depth / 4][4 vectors][high, low][4]. A quad of depth of one vector is 8 bytes.
constexpr int kVectorsAtOnce = 4;
constexpr int64_t kPlaneBytes = 8, kQuadBytes = kVectorsAtOnce * kPlaneBytes;
constexpr float kMostCode = 127.0f, kMostPlanes = 127.0f * 128.0f;
// A group with nothing above it is stored as zeros: the inverse of its unit would be infinite.
constexpr float kLeastNumber = 0x1p-100f;

#if defined(QUIRE_FLOATS_NEON)

// Sums; as many fours of codes; the codes of two vectors, four of each plane.
struct Integers {
    int32x4_t a, b;
};
struct Codes {
    int8x16_t a, b;
};
using Quads = int8x16_t;
inline Integers zero_integers() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
inline Codes load_codes(const int8_t* p) { return {vld1q_s8(p), vld1q_s8(p + 16)}; }
inline Quads load_quads(const int8_t* p) { return vld1q_s8(p); }
// sum + codes . quads[Lane]
template <int Lane>
inline Integers add_dot(Integers sum, Codes codes, Quads quads) {
    return {vdotq_laneq_s32(sum.a, codes.a, quads, Lane), vdotq_laneq_s32(sum.b, codes.b, quads, Lane)};
}
// 128 * high + low
inline Floats joined(Integers high, Integers low) {
    return {vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(high.a, 7), low.a)),
            vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(high.b, 7), low.b))};
}
// The nearest integers (ties to even) of -127 .. 127.
inline void store_codes(int8_t* p, Floats x) {
    const int16x8_t both = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(x.a)), vmovn_s32(vcvtnq_s32_f32(x.b)));
    vst1_s8(p, vmovn_s16(both));
}
// The same of -127 * 128 .. 127 * 128: two quads, in planes.
inline int8x8_t planes_of(float32x4_t x) {
    const int32x4_t code = vcvtnq_s32_f32(x), high = vrshrq_n_s32(code, 7), low = vsubq_s32(code, vshlq_n_s32(high, 7));
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
struct Codes {
    __m512i magnitude;
    __mmask64 negative;
};
inline Integers zero_integers() { return {_mm512_setzero_si512()}; }
inline Codes load_codes(const int8_t* p) {
    const __m512i codes = _mm512_loadu_si512(p);
    return {_mm512_abs_epi8(codes), _mm512_movepi8_mask(codes)};
}
// The unit multiplies unsigned with signed bytes: the codes give their signs to the quad.
template <int Lane>
inline Integers add_dot(Integers sum, Codes codes, Quads quads) {
    int32_t bits;
    memcpy(&bits, quads + 4 * Lane, 4);
    const __m512i quad = _mm512_set1_epi32(bits);
    const __m512i signed_quad = _mm512_mask_sub_epi8(quad, codes.negative, _mm512_setzero_si512(), quad);
    return {_mm512_dpbusd_epi32(sum.a, codes.magnitude, signed_quad)};
}
inline Floats joined(Integers high, Integers low) {
    return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high.a, 7), low.a))};
}
inline void store_codes(int8_t* p, Floats x) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.a)));
}
inline void store_planes(int8_t* p, Floats x) {
    const __m512i code = _mm512_cvtps_epi32(x.a);
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(64)), 7);
    const __m128i highs = _mm512_cvtepi32_epi8(high);
    const __m128i lows = _mm512_cvtepi32_epi8(_mm512_sub_epi32(code, _mm512_slli_epi32(high, 7)));
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
struct Codes {
    __m256i a, magnitude;
};
inline Integers zero_integers() { return {_mm256_setzero_si256()}; }
inline Codes load_codes(const int8_t* p) {
    const __m256i codes = _mm256_loadu_si256((const __m256i*)p);
    return {codes, _mm256_abs_epi8(codes)};
}
// These units multiply unsigned with signed bytes: the codes give their signs to the quad.
template <int Lane>
inline Integers add_dot(Integers sum, Codes codes, Quads quads) {
    int32_t bits;
    memcpy(&bits, quads + 4 * Lane, 4);
    const __m256i quad = _mm256_sign_epi8(_mm256_set1_epi32(bits), codes.a);
#if defined(__AVXVNNI__)
    return {_mm256_dpbusd_avx_epi32(sum.a, codes.magnitude, quad)};
#else
    const __m256i pairs = _mm256_maddubs_epi16(codes.magnitude, quad);  // at most 2 * 128 * 127: no saturation
    return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
#endif
}
inline Floats joined(Integers high, Integers low) {
    return {_mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(high.a, 7), low.a))};
}
inline void store_codes(int8_t* p, Floats x) {
    const __m256i code = _mm256_cvtps_epi32(x.a);
    const __m128i both = _mm_packs_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(both, both));
}
inline void store_planes(int8_t* p, Floats x) {
    const __m256i code = _mm256_cvtps_epi32(x.a);
    const __m256i high = _mm256_srai_epi32(_mm256_add_epi32(code, _mm256_set1_epi32(64)), 7);
    const __m256i both = _mm256_packs_epi32(high, _mm256_sub_epi32(code, _mm256_slli_epi32(high, 7)));
    const __m256i planes = _mm256_packs_epi16(both, both);
    _mm_storel_epi64((__m128i*)p, _mm256_castsi256_si128(planes));
    _mm_storel_epi64((__m128i*)(p + kQuadBytes), _mm256_extracti128_si256(planes, 1));
}

#else

struct Integers {
    int32_t v[kLanes];
};
struct Codes {
    int8_t v[kLanes][4];
};
inline Integers zero_integers() { return {}; }
inline Codes load_codes(const int8_t* p) {
    Codes codes;
    memcpy(codes.v, p, sizeof codes.v);
    return codes;
}
template <int Lane>
inline Integers add_dot(Integers sum, Codes codes, Quads quads) {
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < 4; ++j) sum.v[i] += int32_t(codes.v[i][j]) * quads[4 * Lane + j];
    return sum;
}
inline Floats joined(Integers high, Integers low) {
    Floats out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = float(128 * high.v[i] + low.v[i]);
    return out;
}
inline void store_codes(int8_t* p, Floats x) {
    for (int i = 0; i < kLanes; ++i) p[i] = int8_t(lrintf(x.v[i]));
}
inline void store_planes(int8_t* p, Floats x) {
    for (int i = 0; i < kLanes; ++i) {
        const int32_t code = int32_t(lrintf(x.v[i])), high = (code + 64) >> 7;
        int8_t* quad = p + i / 4 * kQuadBytes + i % 4;
        quad[0] = int8_t(high);
        quad[4] = int8_t(code - 128 * high);
    }
}

#endif
#endif

// How a group becomes codes: x * factor, each of them worth `unit`.
struct Units {
    float factor, unit;

    // For a group of that magnitude. With an Inf or a NaN in it the unit is NaN, so that it is seen.
    Units(float magnitude, float most_code) : factor(0.0f), unit(0.0f) {
        if (!(magnitude < INFINITY)) {
            unit = NAN;
        } else if (magnitude >= kLeastNumber) {
            factor = most_code / magnitude;
            unit = magnitude / most_code;
        }
    }
    bool zero() const { return factor == 0.0f; }  // all codes are 0
};

// x [n], n a multiple of kLanes.
inline float magnitude_of(const float* x, int64_t n) {
    Floats most = splat(0.0f);
    for (int64_t i = 0; i < n; i += kLanes) most = max_magnitude(most, load(x + i));
    return largest_magnitude(most);
}

// x [n] of that magnitude as one of four vectors, n a multiple of kLanes. Returns what a code is worth.
inline float quantize(const float* x, int64_t n, float magnitude, int8_t* planes) {
    const Units units(magnitude, kMostPlanes);
    for (int64_t i = 0; i < n; i += kLanes, planes += kLanes / 4 * kQuadBytes)
        store_planes(planes, units.zero() ? splat(0.0f) : load(x + i) * splat(units.factor));
    return units.unit;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
