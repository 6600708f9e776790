// Some floats, side by side: `Floats`. The vector arithmetic of native/kernels, written once for each vector unit.
//
// The last version, loops over an array, is the specification of the others; they differ from it in one thing, that
// their multiply_add rounds once. Everything here has internal linkage, as every instruction set has its own.
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
static_assert(kLanes <= kMostLanes);

struct Half {
    uint16_t bits;
};
struct Bfloat {
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
inline Floats load(const Half* p) {
    const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(&p->bits));
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
}
inline Floats load(const Bfloat* p) {
    const uint16x8_t b = vld1q_u16(&p->bits);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(b), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(b, 16))};
}
inline void store(float* p, Floats x) { vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b); }
inline void store(Half* p, Floats x) {
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
// x, but 0 where the key is the bound.
inline Floats zero_at(Floats x, Floats key, Floats bound) {
    return {vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x.a), vceqq_f32(key.a, bound.a))),
            vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x.b), vceqq_f32(key.b, bound.b)))};
}
// The larger of most and |x|, most being a magnitude itself: as bits, where Inf is above all numbers and NaN above Inf.
inline float32x4_t max_magnitude(float32x4_t most, float32x4_t x) {
    return vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(most), vreinterpretq_u32_f32(vabsq_f32(x))));
}
inline Floats max_magnitude(Floats most, Floats x) { return {max_magnitude(most.a, x.a), max_magnitude(most.b, x.b)}; }
inline float largest_magnitude(Floats most) {
    return from_bits(vmaxvq_u32(vreinterpretq_u32_f32(max_magnitude(most.a, most.b))));
}
// x * 2^n, where n stands in the low bits of `shifted`; the product must be a normal number.
inline float32x4_t scale_by_power(float32x4_t x, float32x4_t shifted) {
    const int32x4_t power = vshlq_n_s32(vreinterpretq_s32_f32(shifted), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), power));
}
inline Floats scale_by_power(Floats x, Floats shifted) {
    return {scale_by_power(x.a, shifted.a), scale_by_power(x.b, shifted.b)};
}

// Eight halves, and arithmetic in them.
#define QUIRE_HALF_MATH
struct Halves {
    float16x8_t v;
};
inline Halves to_halves(Floats x) { return {vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b)}; }
inline Floats to_floats(Halves x) { return {vcvt_f32_f16(vget_low_f16(x.v)), vcvt_high_f32_f16(x.v)}; }
inline Halves load_halves(const Half* p) { return {vreinterpretq_f16_u16(vld1q_u16(&p->bits))}; }
inline Halves operator+(Halves x, Halves y) { return {vaddq_f16(x.v, y.v)}; }
inline Halves zero_halves() { return {vreinterpretq_f16_u16(vdupq_n_u16(0))}; }
// x[Lane] * y + sum. Compilers copy the lane to a vector first, which takes as long as the multiplication, and put
// additions to one sum behind each other.
template <int Lane>
inline Halves multiply_add(Halves x, Halves y, Halves sum) {
    __asm__ volatile("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(sum.v) : "w"(y.v), "x"(x.v), "i"(Lane));
    return sum;
}

// N rows become columns: out[N * j + i] = rows[i][j].
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
inline void store_columns(Half* out, const Floats (&rows)[8]) {
    uint16x8_t x[8];
    for (int i = 0; i < 8; ++i) x[i] = vreinterpretq_u16_f16(to_halves(rows[i]).v);
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
inline Floats load(const Half* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline Floats load(const Bfloat* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x.a); }
inline void store(Half* p, Floats x) {
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
inline Floats max_magnitude(Floats most, Floats x) {
    const __m512i magnitude = _mm512_castps_si512(_mm512_abs_ps(x.a));
    return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(most.a), magnitude))};
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
inline Floats load(const Half* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
inline Floats load(const Bfloat* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x.a); }
inline void store(Half* p, Floats x) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT)); }
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
inline Floats max_magnitude(Floats most, Floats x) {
    const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x.a);
    return {_mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(most.a), _mm256_castps_si256(magnitude)))};
}
inline Floats scale_by_power(Floats x, Floats shifted) {
    const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted.a), 23);
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.a), power))};
}

#else

struct Floats {
    float v[kLanes];
};

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
    Floats out;                                               \
    for (int i = 0; i < kLanes; ++i) out.v[i] = (expression); \
    return out
inline Floats splat(float x) { QUIRE_LANES(x); }
inline Floats load(const float* p) { QUIRE_LANES(p[i]); }
inline Floats load(const Half* p) { QUIRE_LANES(to_float(p[i])); }
inline Floats load(const Bfloat* p) { QUIRE_LANES(from_bits(uint32_t(p[i].bits) << 16)); }
inline void store(float* p, Floats x) { memcpy(p, x.v, sizeof x.v); }
inline void store(Half* p, Floats x) {
    for (int i = 0; i < kLanes; ++i) p[i] = to_half(x.v[i]);
}
inline Floats operator+(Floats x, Floats y) { QUIRE_LANES(x.v[i] + y.v[i]); }
inline Floats operator-(Floats x, Floats y) { QUIRE_LANES(x.v[i] - y.v[i]); }
inline Floats operator*(Floats x, Floats y) { QUIRE_LANES(x.v[i] * y.v[i]); }
inline Floats operator/(Floats x, Floats y) { QUIRE_LANES(x.v[i] / y.v[i]); }
inline Floats multiply_add(Floats x, Floats y, Floats sum) { QUIRE_LANES(sum.v[i] + x.v[i] * y.v[i]); }
inline Floats max(Floats x, Floats y) { QUIRE_LANES(x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
inline Floats min(Floats x, Floats y) { QUIRE_LANES(x.v[i] < y.v[i] ? x.v[i] : y.v[i]); }
inline Floats zero_at(Floats x, Floats key, Floats bound) { QUIRE_LANES(key.v[i] == bound.v[i] ? 0.0f : x.v[i]); }
inline float max_magnitude(float most, float x) {
    const uint32_t bits = to_bits(x) & 0x7fffffff;
    return bits > to_bits(most) ? from_bits(bits) : most;
}
inline Floats max_magnitude(Floats most, Floats x) { QUIRE_LANES(max_magnitude(most.v[i], x.v[i])); }
inline Floats scale_by_power(Floats x, Floats shifted) {
    QUIRE_LANES(from_bits(to_bits(x.v[i]) + (to_bits(shifted.v[i]) << 23)));
}
#undef QUIRE_LANES

#endif

inline void store(Bfloat* p, Floats x) {  // to nearest, ties to even
    float v[kLanes];
    store(v, x);
    for (int i = 0; i < kLanes; ++i) {
        const uint32_t bits = to_bits(v[i]);
        const bool number = (bits & 0x7fffffff) <= 0x7f800000;
        p[i].bits = number ? uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fc0;
    }
}

// The first n < kLanes lanes of a row's end; the rest is 0 when loaded and left alone when stored.
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

// The lanes' sum: of eight as ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)), of 16 as the eight sums i + (i + 8).
inline float sum(Floats x) {
    float v[kLanes];
    store(v, x);
    for (int i = 8; i < kLanes; ++i) v[i - 8] += v[i];
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

#if defined(QUIRE_FLOATS_AVX512)
inline float largest(Floats x) { return _mm512_reduce_max_ps(x.a); }
inline float largest_magnitude(Floats x) { return from_bits(_mm512_reduce_max_epu32(_mm512_castps_si512(x.a))); }
#elif !defined(QUIRE_FLOATS_NEON)
inline float largest(Floats x) {
    float v[kLanes];
    store(v, x);
    float most = v[0];
    for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
    return most;
}
inline float largest_magnitude(Floats x) {
    float v[kLanes];
    store(v, x);
    uint32_t most = to_bits(v[0]);
    for (int i = 1; i < kLanes; ++i) most = to_bits(v[i]) > most ? to_bits(v[i]) : most;
    return from_bits(most);
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
// Eight rows of eight become columns, `stride` apart.
inline void store_eight_columns(float* out, int64_t stride, const __m256 (&rows)[8]) {
    __m256 pairs[8], fours[8];  // of 4 columns in each half: two rows side by side, then four
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

// A number for all lanes that is to be added to. NEON's multiply-add overwrites the sum: without this, a copy of it is
// made first, which takes as long as a multiplication, while a load takes nothing from the vector pipes.
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

// x becomes 2^x, for x in -127 .. 127, the integer -127 giving 0; between it and -126 something below 2^-126.
// `factors`: of f, f^2, .. in a polynomial for 2^f. Every step is taken for all N before the next one, as it is a long
// chain of them, and a core does not look far enough ahead to find work in the meantime.
template <int N, int Degree>
inline void exp2_within(Floats (&x)[N], const Constant (&factors)[Degree]) {
    static constexpr Constant kOne = 1.0f;
    const Floats magic = splat(0x1.8p23f);  // adding it leaves the nearest integer in the low bits
    Floats shifted[N], p[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) shifted[i] = x[i] + magic;
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
        x[i] = x[i] - (shifted[i] - magic);  // -1/2 .. 1/2
        p[i] = splat(factors[Degree - 1].lanes[0]);
    }
#pragma GCC unroll 8
    for (int d = Degree - 2; d >= -1; --d) {
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) p[i] = multiply_add(p[i], x[i], fresh(d < 0 ? kOne : factors[d]));
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) x[i] = scale_by_power(p[i], shifted[i]);  // 1 * 2^-127: all bits are 0
}
// x becomes 2^x for any x: more than 127 gives 2^127, and -127 or less gives 0. Relative error of the polynomial below
// 1e-7.
template <int N>
inline void exp2_each(Floats (&x)[N]) {
    static constexpr Constant kFactors[] = {0.69314698f, 0.24022242f, 0.05550734f, 0.00967151f, 0.00132647f};
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) x[i] = min(max(x[i], splat(-127.0f)), splat(127.0f));
    exp2_within(x, kFactors);
}
inline Floats exp2(Floats x) {
    Floats one[1] = {x};
    exp2_each(one);
    return one[0];
}
// The same for x up to 127, and 3e-6: for weights that become halves.
template <int N>
inline void coarse_exp2_each(Floats (&x)[N]) {
    static constexpr Constant kFactors[] = {0.69312419f, 0.24024099f, 0.05590643f, 0.00958285f};
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) x[i] = max(x[i], splat(-127.0f));
    exp2_within(x, kFactors);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
