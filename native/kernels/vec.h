// Eight floats, side by side: `F8`. The vector arithmetic of native/kernels, written once for each vector unit.
//
// The last version, loops over an array, is the specification of the others; they differ from it in one thing, that
// their multiply_add rounds once. Everything here has internal linkage, as every instruction set has its own.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__ARM_FEATURE_DOTPROD)
#define QUIRE_F8_NEON
#include <arm_neon.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define QUIRE_F8_AVX
#include <immintrin.h>
#endif

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kLanes = 8;

struct Half {
    uint16_t bits;
};

#if defined(QUIRE_F8_NEON)

struct F8 {
    float32x4_t a, b;
};

inline F8 splat(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline F8 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline F8 load(const Half* p) {
    const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(&p->bits));
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
}
inline void store(float* p, F8 x) { vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b); }
inline void store(Half* p, F8 x) {
    vst1q_u16(&p->bits, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b)));
}
inline F8 operator+(F8 x, F8 y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
inline F8 operator-(F8 x, F8 y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
inline F8 operator*(F8 x, F8 y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
inline F8 operator/(F8 x, F8 y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
inline F8 multiply_add(F8 x, F8 y, F8 sum) { return {vfmaq_f32(sum.a, x.a, y.a), vfmaq_f32(sum.b, x.b, y.b)}; }
inline F8 max(F8 x, F8 y) { return {vmaxq_f32(x.a, y.a), vmaxq_f32(x.b, y.b)}; }
inline F8 min(F8 x, F8 y) { return {vminq_f32(x.a, y.a), vminq_f32(x.b, y.b)}; }
// x where the bound is reached, else 0.
inline F8 zero_below(F8 x, F8 key, F8 bound) {
    return {vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x.a), vcgeq_f32(key.a, bound.a))),
            vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x.b), vcgeq_f32(key.b, bound.b)))};
}
// x * 2^n, where n stands in the low bits of `shifted`; the product must be a normal number.
inline float32x4_t scale_by_power(float32x4_t x, float32x4_t shifted) {
    const int32x4_t power = vshlq_n_s32(vreinterpretq_s32_f32(shifted), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), power));
}
inline F8 scale_by_power(F8 x, F8 shifted) { return {scale_by_power(x.a, shifted.a), scale_by_power(x.b, shifted.b)}; }

#elif defined(QUIRE_F8_AVX)

struct F8 {
    __m256 a;
};

inline F8 splat(float x) { return {_mm256_set1_ps(x)}; }
inline F8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline F8 load(const Half* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
inline void store(float* p, F8 x) { _mm256_storeu_ps(p, x.a); }
inline void store(Half* p, F8 x) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT)); }
inline F8 operator+(F8 x, F8 y) { return {_mm256_add_ps(x.a, y.a)}; }
inline F8 operator-(F8 x, F8 y) { return {_mm256_sub_ps(x.a, y.a)}; }
inline F8 operator*(F8 x, F8 y) { return {_mm256_mul_ps(x.a, y.a)}; }
inline F8 operator/(F8 x, F8 y) { return {_mm256_div_ps(x.a, y.a)}; }
inline F8 multiply_add(F8 x, F8 y, F8 sum) { return {_mm256_fmadd_ps(x.a, y.a, sum.a)}; }
inline F8 max(F8 x, F8 y) { return {_mm256_max_ps(x.a, y.a)}; }
inline F8 min(F8 x, F8 y) { return {_mm256_min_ps(x.a, y.a)}; }
inline F8 zero_below(F8 x, F8 key, F8 bound) { return {_mm256_and_ps(x.a, _mm256_cmp_ps(key.a, bound.a, _CMP_GE_OQ))}; }
inline F8 scale_by_power(F8 x, F8 shifted) {
    const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted.a), 23);
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.a), power))};
}

#else

struct F8 {
    float v[kLanes];
};

inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
inline uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float to_float(Half h) {
    const uint32_t sign = uint32_t(h.bits & 0x8000) << 16, rest = uint32_t(h.bits & 0x7fff) << 13;
    const float finite = from_bits(rest) * 0x1p112f;  // moves the exponent, and makes small numbers normal
    return from_bits(sign | (rest >= 0x0f800000 ? rest | 0x7f800000 : to_bits(finite)));
}
inline Half to_half(float x) {  // to nearest, ties to even
    const uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    uint32_t half;
    if (rest > 0x7f800000)
        half = 0x7e00;  // not a number
    else if (rest >= 0x477ff000)
        half = 0x7c00;  // 65520 and more: infinity
    else if (rest < 0x38800000)
        half = to_bits(from_bits(rest) + 0.5f) - 0x3f000000;  // below 2^-14: steps of 2^-24
    else
        half = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
    return {uint16_t(sign | half)};
}

#define QUIRE_LANES(expression)                               \
    F8 out;                                                   \
    for (int i = 0; i < kLanes; ++i) out.v[i] = (expression); \
    return out
inline F8 splat(float x) { QUIRE_LANES(x); }
inline F8 load(const float* p) { QUIRE_LANES(p[i]); }
inline F8 load(const Half* p) { QUIRE_LANES(to_float(p[i])); }
inline void store(float* p, F8 x) { memcpy(p, x.v, sizeof x.v); }
inline void store(Half* p, F8 x) {
    for (int i = 0; i < kLanes; ++i) p[i] = to_half(x.v[i]);
}
inline F8 operator+(F8 x, F8 y) { QUIRE_LANES(x.v[i] + y.v[i]); }
inline F8 operator-(F8 x, F8 y) { QUIRE_LANES(x.v[i] - y.v[i]); }
inline F8 operator*(F8 x, F8 y) { QUIRE_LANES(x.v[i] * y.v[i]); }
inline F8 operator/(F8 x, F8 y) { QUIRE_LANES(x.v[i] / y.v[i]); }
inline F8 multiply_add(F8 x, F8 y, F8 sum) { QUIRE_LANES(sum.v[i] + x.v[i] * y.v[i]); }
inline F8 max(F8 x, F8 y) { QUIRE_LANES(x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
inline F8 min(F8 x, F8 y) { QUIRE_LANES(x.v[i] < y.v[i] ? x.v[i] : y.v[i]); }
inline F8 zero_below(F8 x, F8 key, F8 bound) { QUIRE_LANES(key.v[i] >= bound.v[i] ? x.v[i] : 0.0f); }
inline F8 scale_by_power(F8 x, F8 shifted) { QUIRE_LANES(from_bits(to_bits(x.v[i]) + (to_bits(shifted.v[i]) << 23))); }
#undef QUIRE_LANES

#endif

// The first n < 8 lanes of a row's end; the rest is 0 when loaded and left alone when stored.
template <class T>
inline F8 load_part(const T* p, int64_t n) {
    T padded[kLanes] = {};
    memcpy(padded, p, n * sizeof(T));
    return load(padded);
}
template <class T>
inline void store_part(T* p, F8 x, int64_t n) {
    T padded[kLanes];
    store(padded, x);
    memcpy(p, padded, n * sizeof(T));
}

// The lanes' sum, always as ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)).
inline float sum(F8 x) {
    float v[kLanes];
    store(v, x);
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
inline float largest(F8 x) {
    float v[kLanes];
    store(v, x);
    float most = v[0];
    for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
    return most;
}

// 2^x by a polynomial of degree 6 (relative error below 2e-7), for x up to 127 (more gives 2^127); 0 below -126.
inline F8 exp2(F8 x) {
    const F8 magic = splat(0x1.8p23f);  // adding it leaves the nearest integer in the low bits
    const F8 clamped = min(max(x, splat(-126.0f)), splat(127.0f));
    const F8 shifted = clamped + magic;
    const F8 f = clamped - (shifted - magic);  // -1/2 .. 1/2
    F8 p = splat(0.00015461445f);
    p = multiply_add(p, f, splat(0.0013400428f));
    p = multiply_add(p, f, splat(0.0096180569f));
    p = multiply_add(p, f, splat(0.055503272f));
    p = multiply_add(p, f, splat(0.24022651f));
    p = multiply_add(p, f, splat(0.69314718f));
    p = multiply_add(p, f, splat(1.0f));
    return zero_below(scale_by_power(p, shifted), x, splat(-126.0f));
}

}  // namespace
}  // namespace quire::QUIRE_ISA
