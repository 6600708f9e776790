// `Floats`, a vector of floats, and its arithmetic, written once for each ISA.
//
// The last version, loops over an array, is the specification of the others. They differ from it in one way: their
// multiply_add rounds once. Everything here has internal linkage, as every ISA has its own copy.
#pragma once

#include <stdint.h>
#include <string.h>

#include "ops.h"

#if defined(__ARM_FEATURE_DOTPROD)
#define QUIRE_FLOATS_NEON
#include <arm_neon.h>
#elif defined(__AVX512F__) && defined(__AVX512DQ__)
#define QUIRE_FLOATS_AVX512
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define QUIRE_FLOATS_AVX
#include <immintrin.h>
#endif

namespace quire::QUIRE_ISA {
namespace {

#if defined(QUIRE_FLOATS_AVX512)
constexpr int64_t kLanes = 16;
#else
constexpr int64_t kLanes = 8;
#endif
static_assert(kLanes <= kMaxLanes);
inline int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }  // to whole vectors

struct Fp16 {
    uint16_t bits;
};
struct Bf16 {
    uint16_t bits;
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

#if defined(QUIRE_FLOATS_NEON)

struct Floats {
    float32x4_t a, b;
};

inline Floats splat(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Floats load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline Floats load(const Fp16* p) {
    const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(&p->bits));
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
}
inline Floats load(const Bf16* p) {
    const uint16x8_t b = vld1q_u16(&p->bits);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(b), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(b, 16))};
}
inline void store(float* p, Floats x) { vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b); }
inline void store(Fp16* p, Floats x) {
    vst1q_u16(&p->bits, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b)));
}
inline Floats operator+(Floats x, Floats y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
inline Floats operator-(Floats x, Floats y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
inline Floats operator*(Floats x, Floats y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
inline Floats operator/(Floats x, Floats y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
inline Floats multiply_add(Floats x, Floats y, Floats sum) {
    return {vfmaq_f32(sum.a, x.a, y.a), vfmaq_f32(sum.b, x.b, y.b)};
}
inline Floats max(Floats x, Floats y) { return {vmaxq_f32(x.a, y.a), vmaxq_f32(x.b, y.b)}; }
inline Floats min(Floats x, Floats y) { return {vminq_f32(x.a, y.a), vminq_f32(x.b, y.b)}; }
inline float largest(Floats x) { return vmaxnmvq_f32(vmaxnmq_f32(x.a, x.b)); }
// x, but 0 in lanes where key == bound.
inline Floats zero_at(Floats x, Floats key, Floats bound) {
    return {vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x.a), vceqq_f32(key.a, bound.a))),
            vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x.b), vceqq_f32(key.b, bound.b)))};
}
// x in lanes where a > b, y in the others.
inline Floats select_greater(Floats a, Floats b, Floats x, Floats y) {
    return {vbslq_f32(vcgtq_f32(a.a, b.a), x.a, y.a), vbslq_f32(vcgtq_f32(a.b, b.b), x.b, y.b)};
}
// The larger of `maximum`, itself a magnitude, and |x|. Compared as bits: Inf is above all numbers and NaN above Inf.
inline float32x4_t max_magnitude(float32x4_t maximum, float32x4_t x) {
    return vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(maximum), vreinterpretq_u32_f32(vabsq_f32(x))));
}
inline Floats max_magnitude(Floats maximum, Floats x) {
    return {max_magnitude(maximum.a, x.a), max_magnitude(maximum.b, x.b)};
}
inline float reduce_max_magnitude(Floats maximum) {
    return from_bits(vmaxvq_u32(vreinterpretq_u32_f32(max_magnitude(maximum.a, maximum.b))));
}
// x * 2^n, with n in the low bits of `shifted`. The result must be a normal number.
inline float32x4_t scale_by_power(float32x4_t x, float32x4_t shifted) {
    const int32x4_t power = vshlq_n_s32(vreinterpretq_s32_f32(shifted), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), power));
}
inline Floats scale_by_power(Floats x, Floats shifted) {
    return {scale_by_power(x.a, shifted.a), scale_by_power(x.b, shifted.b)};
}

// Eight fp16 values, and fp16 arithmetic.
#define QUIRE_FP16_MATH
struct Fp16x8 {
    float16x8_t v;
};
inline Fp16x8 to_fp16(Floats x) { return {vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b)}; }
inline Floats to_floats(Fp16x8 x) { return {vcvt_f32_f16(vget_low_f16(x.v)), vcvt_high_f32_f16(x.v)}; }
inline Fp16x8 load_fp16(const Fp16* p) { return {vreinterpretq_f16_u16(vld1q_u16(&p->bits))}; }
inline Fp16x8 operator+(Fp16x8 x, Fp16x8 y) { return {vaddq_f16(x.v, y.v)}; }
inline Fp16x8 zero_fp16() { return {vreinterpretq_f16_u16(vdupq_n_u16(0))}; }
// x[Lane] * y + sum. Compilers would copy the lane to a vector first, which takes as long as the multiplication, and
// would put additions to one sum behind each other.
template <int Lane>
inline Fp16x8 multiply_add(Fp16x8 x, Fp16x8 y, Fp16x8 sum) {
    __asm__ volatile("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(sum.v) : "w"(y.v), "x"(x.v), "i"(Lane));
    return sum;
}

// Transposes N rows: out[N * j + i] = rows[i][j].
inline void store_columns(float* out, const Floats (&rows)[8]) {
    for (int half = 0; half < 2; ++half) {
        const Floats* r = rows + 4 * half;
        const float32x4_t from[2][4] = {{r[0].a, r[1].a, r[2].a, r[3].a}, {r[0].b, r[1].b, r[2].b, r[3].b}};
        for (int columns = 0; columns < 2; ++columns) {
            const float32x4_t* x = from[columns];
            const float64x2_t even01 = vreinterpretq_f64_f32(vtrn1q_f32(x[0], x[1])),
                              odd01 = vreinterpretq_f64_f32(vtrn2q_f32(x[0], x[1])),
                              even23 = vreinterpretq_f64_f32(vtrn1q_f32(x[2], x[3])),
                              odd23 = vreinterpretq_f64_f32(vtrn2q_f32(x[2], x[3]));
            float* to = out + 32 * columns + 4 * half;
            vst1q_f32(to, vreinterpretq_f32_f64(vtrn1q_f64(even01, even23)));
            vst1q_f32(to + 8, vreinterpretq_f32_f64(vtrn1q_f64(odd01, odd23)));
            vst1q_f32(to + 16, vreinterpretq_f32_f64(vtrn2q_f64(even01, even23)));
            vst1q_f32(to + 24, vreinterpretq_f32_f64(vtrn2q_f64(odd01, odd23)));
        }
    }
}
inline void store_columns(Fp16* out, const Floats (&rows)[8]) {
    uint16x8_t x[8];
    for (int i = 0; i < 8; ++i) x[i] = vreinterpretq_u16_f16(to_fp16(rows[i]).v);
    uint32x4_t pairs[8];  // columns 0, 2, 4, 6 of rows (0, 1), (2, 3), ..; then columns 1, 3, 5, 7
    for (int i = 0; i < 4; ++i) {
        pairs[i] = vreinterpretq_u32_u16(vtrn1q_u16(x[2 * i], x[2 * i + 1]));
        pairs[4 + i] = vreinterpretq_u32_u16(vtrn2q_u16(x[2 * i], x[2 * i + 1]));
    }
    for (int odd = 0; odd < 2; ++odd) {
        const uint32x4_t* p = pairs + 4 * odd;
        const uint64x2_t low04 = vreinterpretq_u64_u32(vtrn1q_u32(p[0], p[1])),
                         low26 = vreinterpretq_u64_u32(vtrn2q_u32(p[0], p[1])),
                         high04 = vreinterpretq_u64_u32(vtrn1q_u32(p[2], p[3])),
                         high26 = vreinterpretq_u64_u32(vtrn2q_u32(p[2], p[3]));
        uint16_t* to = &out->bits + 8 * odd;
        vst1q_u16(to, vreinterpretq_u16_u64(vtrn1q_u64(low04, high04)));
        vst1q_u16(to + 16, vreinterpretq_u16_u64(vtrn1q_u64(low26, high26)));
        vst1q_u16(to + 32, vreinterpretq_u16_u64(vtrn2q_u64(low04, high04)));
        vst1q_u16(to + 48, vreinterpretq_u16_u64(vtrn2q_u64(low26, high26)));
    }
}

#elif defined(QUIRE_FLOATS_AVX512)

struct Floats {
    __m512 a;
};

inline Floats splat(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Floats load(const Fp16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline Floats load(const Bf16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x.a); }
inline void store(Fp16* p, Floats x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
}
inline Floats operator+(Floats x, Floats y) { return {_mm512_add_ps(x.a, y.a)}; }
inline Floats operator-(Floats x, Floats y) { return {_mm512_sub_ps(x.a, y.a)}; }
inline Floats operator*(Floats x, Floats y) { return {_mm512_mul_ps(x.a, y.a)}; }
inline Floats operator/(Floats x, Floats y) { return {_mm512_div_ps(x.a, y.a)}; }
inline Floats multiply_add(Floats x, Floats y, Floats sum) { return {_mm512_fmadd_ps(x.a, y.a, sum.a)}; }
inline Floats max(Floats x, Floats y) { return {_mm512_max_ps(x.a, y.a)}; }
inline Floats min(Floats x, Floats y) { return {_mm512_min_ps(x.a, y.a)}; }
inline Floats zero_at(Floats x, Floats key, Floats bound) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(key.a, bound.a, _CMP_NEQ_UQ), x.a)};
}
inline Floats select_greater(Floats a, Floats b, Floats x, Floats y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.a, b.a, _CMP_GT_OQ), y.a, x.a)};
}
inline Floats max_magnitude(Floats maximum, Floats x) {
    const __m512i magnitude = _mm512_castps_si512(_mm512_abs_ps(x.a));
    return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(maximum.a), magnitude))};
}
inline Floats scale_by_power(Floats x, Floats shifted) {
    const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted.a), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x.a), power))};
}

#elif defined(QUIRE_FLOATS_AVX)

struct Floats {
    __m256 a;
};

inline Floats splat(float x) { return {_mm256_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Floats load(const Fp16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
inline Floats load(const Bf16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x.a); }
inline void store(Fp16* p, Floats x) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT)); }
inline Floats operator+(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a)}; }
inline Floats operator-(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a)}; }
inline Floats operator*(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a)}; }
inline Floats operator/(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a)}; }
inline Floats multiply_add(Floats x, Floats y, Floats sum) { return {_mm256_fmadd_ps(x.a, y.a, sum.a)}; }
inline Floats max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a)}; }
inline Floats min(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a)}; }
inline Floats zero_at(Floats x, Floats key, Floats bound) {
    return {_mm256_andnot_ps(_mm256_cmp_ps(key.a, bound.a, _CMP_EQ_OQ), x.a)};
}
inline Floats select_greater(Floats a, Floats b, Floats x, Floats y) {
    return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_GT_OQ))};
}
inline Floats max_magnitude(Floats maximum, Floats x) {
    const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x.a);
    return {_mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(maximum.a), _mm256_castps_si256(magnitude)))};
}
inline Floats scale_by_power(Floats x, Floats shifted) {
    const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted.a), 23);
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.a), power))};
}

#else

#define QUIRE_NO_SIMD
struct Floats {
    float v[kLanes];
};

inline float to_float(Fp16 h) {
    const uint32_t sign = uint32_t(h.bits & 0x8000) << 16, rest = uint32_t(h.bits & 0x7fff) << 13;
    const float finite = from_bits(rest) * 0x1p112f;  // rebiases the exponent, and normalizes subnormals
    return from_bits(sign | (rest >= 0x0f800000 ? rest | 0x7f800000 : to_bits(finite)));
}
inline Fp16 to_fp16(float x) {  // to nearest, ties to even
    const uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    uint32_t half;
    if (rest > 0x7f800000)
        half = 0x7e00;  // NaN
    else if (rest >= 0x477ff000)
        half = 0x7c00;  // 65520 and more: infinity
    else if (rest < 0x38800000)
        half = to_bits(from_bits(rest) + 0.5f) - 0x3f000000;  // subnormal: steps of 2^-24
    else
        half = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
    return {uint16_t(sign | half)};
}

#define QUIRE_LANES(expression)                               \
    Floats out;                                               \
    for (int i = 0; i < kLanes; ++i) out.v[i] = (expression); \
    return out
inline Floats splat(float x) { QUIRE_LANES(x); }
inline Floats load(const float* p) { QUIRE_LANES(p[i]); }
inline Floats load(const Fp16* p) { QUIRE_LANES(to_float(p[i])); }
inline Floats load(const Bf16* p) { QUIRE_LANES(from_bits(uint32_t(p[i].bits) << 16)); }
inline void store(float* p, Floats x) { memcpy(p, x.v, sizeof x.v); }
inline void store(Fp16* p, Floats x) {
    for (int i = 0; i < kLanes; ++i) p[i] = to_fp16(x.v[i]);
}
inline Floats operator+(Floats x, Floats y) { QUIRE_LANES(x.v[i] + y.v[i]); }
inline Floats operator-(Floats x, Floats y) { QUIRE_LANES(x.v[i] - y.v[i]); }
inline Floats operator*(Floats x, Floats y) { QUIRE_LANES(x.v[i] * y.v[i]); }
inline Floats operator/(Floats x, Floats y) { QUIRE_LANES(x.v[i] / y.v[i]); }
inline Floats multiply_add(Floats x, Floats y, Floats sum) { QUIRE_LANES(sum.v[i] + x.v[i] * y.v[i]); }
inline Floats max(Floats x, Floats y) { QUIRE_LANES(x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
inline Floats min(Floats x, Floats y) { QUIRE_LANES(x.v[i] < y.v[i] ? x.v[i] : y.v[i]); }
inline Floats zero_at(Floats x, Floats key, Floats bound) { QUIRE_LANES(key.v[i] == bound.v[i] ? 0.0f : x.v[i]); }
inline Floats select_greater(Floats a, Floats b, Floats x, Floats y) { QUIRE_LANES(a.v[i] > b.v[i] ? x.v[i] : y.v[i]); }
inline float max_magnitude(float maximum, float x) {
    const uint32_t bits = to_bits(x) & 0x7fffffff;
    return bits > to_bits(maximum) ? from_bits(bits) : maximum;
}
inline Floats max_magnitude(Floats maximum, Floats x) { QUIRE_LANES(max_magnitude(maximum.v[i], x.v[i])); }
inline Floats scale_by_power(Floats x, Floats shifted) {
    QUIRE_LANES(from_bits(to_bits(x.v[i]) + (to_bits(shifted.v[i]) << 23)));
}
#undef QUIRE_LANES

#endif

inline void store(Bf16* p, Floats x) {  // to nearest, ties to even
    float v[kLanes];
    store(v, x);
    for (int i = 0; i < kLanes; ++i) {
        const uint32_t bits = to_bits(v[i]);
        const bool number = (bits & 0x7fffffff) <= 0x7f800000;
        p[i].bits = number ? uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fc0;
    }
}

// The first n < kLanes lanes, for the end of a row. Loads set the other lanes to 0; stores leave memory behind them
// alone.
template <class T>
inline Floats load_part(const T* p, int64_t n) {
    T padded[kLanes] = {};
    memcpy(padded, p, n * sizeof(T));
    return load(padded);
}
template <class T>
inline void store_part(T* p, Floats x, int64_t n) {
    T padded[kLanes];
    store(padded, x);
    memcpy(p, padded, n * sizeof(T));
}

// The sum of the lanes: of 8 lanes as ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)), of 16 lanes as the same over the sums
// i + (i + 8).
inline float sum(Floats x) {
    float v[kLanes];
    store(v, x);
    for (int i = 8; i < kLanes; ++i) v[i - 8] += v[i];
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

#if defined(QUIRE_FLOATS_AVX512)
inline float largest(Floats x) { return _mm512_reduce_max_ps(x.a); }
inline float reduce_max_magnitude(Floats x) { return from_bits(_mm512_reduce_max_epu32(_mm512_castps_si512(x.a))); }
#elif !defined(QUIRE_FLOATS_NEON)
inline float largest(Floats x) {
    float v[kLanes];
    store(v, x);
    float maximum = v[0];
    for (int i = 1; i < kLanes; ++i) maximum = v[i] > maximum ? v[i] : maximum;
    return maximum;
}
inline float reduce_max_magnitude(Floats x) {
    float v[kLanes];
    store(v, x);
    uint32_t maximum = to_bits(v[0]);
    for (int i = 1; i < kLanes; ++i) maximum = to_bits(v[i]) > maximum ? to_bits(v[i]) : maximum;
    return from_bits(maximum);
}
#endif
#if defined(QUIRE_FLOATS_AVX512) || defined(QUIRE_FLOATS_AVX)
inline __m256 eight_of(Floats x, int part) {
#if defined(QUIRE_FLOATS_AVX512)
    return part ? _mm512_extractf32x8_ps(x.a, 1) : _mm512_castps512_ps256(x.a);
#else
    return (void)part, x.a;
#endif
}
// Transposes 8 x 8 floats. Output columns are `stride` apart.
inline void store_eight_columns(float* out, int64_t stride, const __m256 (&rows)[8]) {
    __m256 pairs[8], fours[8];  // 4 columns in each half: two rows interleaved, then four
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; ++j) {
            fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
            fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
        }
    for (int j = 0; j < 4; ++j) {
        _mm256_storeu_ps(out + j * stride, _mm256_permute2f128_ps(fours[j], fours[4 + j], 0x20));
        _mm256_storeu_ps(out + (4 + j) * stride, _mm256_permute2f128_ps(fours[j], fours[4 + j], 0x31));
    }
}
template <int N>
inline void store_columns(float* out, const Floats (&rows)[N]) {
    static_assert(N % 8 == 0);
    for (int first = 0; first < N; first += 8)
        for (int part = 0; part < kLanes / 8; ++part) {
            __m256 eight[8];
            for (int i = 0; i < 8; ++i) eight[i] = eight_of(rows[first + i], part);
            store_eight_columns(out + 8 * part * N + first, N, eight);
        }
}
#elif !defined(QUIRE_FLOATS_NEON)
template <int N>
inline void store_columns(float* out, const Floats (&rows)[N]) {
    for (int i = 0; i < N; ++i) {
        float row[kLanes];
        store(row, rows[i]);
        for (int j = 0; j < kLanes; ++j) out[N * j + i] = row[j];
    }
}
#endif

// A constant addend for all lanes. NEON's multiply-add overwrites its addend: a constant in a register would be copied
// first, which takes as long as a multiplication. A load takes no vector pipe.
struct alignas(16) Constant {
    float lanes[4];
    constexpr Constant(float x) : lanes{x, x, x, x} {}
};
#if defined(QUIRE_FLOATS_NEON)
inline float32x4_t load_here(const Constant& c) {
    float32x4_t v;
    __asm__ volatile("ldr %q0, %1" : "=w"(v) : "m"(c));
    return v;
}
inline Floats fresh(const Constant& c) { return {load_here(c), load_here(c)}; }
#else
inline Floats fresh(const Constant& c) { return splat(c.lanes[0]); }
#endif

// x = 2^x, for x in -127 .. 127. The integer -127 gives 0; values between -127 and -126 give something below 2^-126.
// `coefficients`: of f, f^2, .. in a polynomial for 2^f. Every step is taken for all N vectors before the next one: it
// is a long dependency chain, and the out-of-order window is too short to find other work.
template <int N, int Degree>
inline void exp2_in_range(Floats (&x)[N], const Constant (&coefficients)[Degree]) {
    static constexpr Constant kOne = 1.0f;
    const Floats magic = splat(0x1.8p23f);  // adding it leaves the nearest integer in the low bits
    Floats shifted[N], p[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) shifted[i] = x[i] + magic;
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
        x[i] = x[i] - (shifted[i] - magic);  // -1/2 .. 1/2
        p[i] = splat(coefficients[Degree - 1].lanes[0]);
    }
#pragma GCC unroll 8
    for (int d = Degree - 2; d >= -1; --d) {
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) p[i] = multiply_add(p[i], x[i], fresh(d < 0 ? kOne : coefficients[d]));
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) x[i] = scale_by_power(p[i], shifted[i]);  // 1 * 2^-127: all bits are 0
}
// x = 2^x for any x: above 127 it gives 2^127, and at -127 or below 0. The relative error of the polynomial is below
// 1e-7.
template <int N>
inline void exp2_each(Floats (&x)[N]) {
    static constexpr Constant kCoefficients[] = {0.69314698f, 0.24022242f, 0.05550734f, 0.00967151f, 0.00132647f};
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) x[i] = min(max(x[i], splat(-127.0f)), splat(127.0f));
    exp2_in_range(x, kCoefficients);
}
inline Floats exp2(Floats x) {
    Floats one[1] = {x};
    exp2_each(one);
    return one[0];
}
// The same for x up to 127, with an error of 3e-6: for weights that become fp16.
template <int N>
inline void coarse_exp2_each(Floats (&x)[N]) {
    static constexpr Constant kCoefficients[] = {0.69312419f, 0.24024099f, 0.05590643f, 0.00958285f};
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) x[i] = max(x[i], splat(-127.0f));
    exp2_in_range(x, kCoefficients);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
