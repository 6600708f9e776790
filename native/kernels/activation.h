// Activations of a vector.
#pragma once

#include "inline.h"
#include "ops.h"
#include "vec.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float kLog2e = 1.44269504f;

QUIRE_INLINE Floats exp(Floats x) { return exp2(x * splat(kLog2e)); }
// x = x * sigmoid(factor * x)
template <int N>
QUIRE_INLINE void swish_each(Floats (&x)[N], float factor) {
    Floats raised[N];
    QUIRE_UNROLL
    for (int i = 0; i < N; ++i) raised[i] = x[i] * splat(-kLog2e * factor);
    exp2_each(raised);
    QUIRE_UNROLL
    for (int i = 0; i < N; ++i) x[i] = x[i] / (splat(1.0f) + raised[i]);
}
QUIRE_INLINE Floats swish(Floats x, float factor) {
    Floats one[1] = {x};
    swish_each(one, factor);
    return one[0];
}
// Absolute error below 2e-7.
QUIRE_INLINE Floats tanh(Floats x) { return splat(1.0f) - splat(2.0f) / (splat(1.0f) + exp(x + x)); }

// 1 - erf(x) for x >= 0, with an absolute error below 2e-7: Abramowitz and Stegun, 7.1.26.
QUIRE_INLINE Floats erfc(Floats x) {
    const Floats t = splat(1.0f) / multiply_add(x, splat(0.3275911f), splat(1.0f));
    Floats p = splat(1.061405429f);
    p = multiply_add(p, t, splat(-1.453152027f));
    p = multiply_add(p, t, splat(1.421413741f));
    p = multiply_add(p, t, splat(-0.284496736f));
    p = multiply_add(p, t, splat(0.254829592f));
    return p * t * exp(splat(0.0f) - x * x);
}

// log(1 + exp(x)), with a relative error below 3e-7. With u = exp(-|x|): max(x, 0) + log(1 + u), and log(1 + u) =
// 2 atanh(u / (2 + u)), whose argument is at most 1/3.
QUIRE_INLINE Floats softplus(Floats x) {
    const Floats zero = splat(0.0f), u = exp(zero - max(x, zero - x));
    const Floats z = u / (splat(2.0f) + u), z2 = z * z;
    Floats series = splat(1.0f / 13);
    for (int odd = 11; odd >= 1; odd -= 2) series = multiply_add(series, z2, splat(1.0f / float(odd)));
    return multiply_add(z + z, series, max(x, zero));
}

QUIRE_INLINE Floats clamp_max(Floats x, float limit) { return splat(0.0f) - max(splat(0.0f) - x, splat(-limit)); }

constexpr float kSwigluLimit = 7.0f;

template <Activation Kind>
QUIRE_INLINE Floats activated(Floats x) {
    const Floats zero = splat(0.0f);
    if constexpr (Kind == Activation::ClampedSwiglu) return swish(clamp_max(x, kSwigluLimit), 1.702f);
    if constexpr (Kind == Activation::Silu) return swish(x, 1.0f);
    if constexpr (Kind == Activation::QuickGelu) return swish(x, 1.702f);
    if constexpr (Kind == Activation::Relu) return max(zero, x);
    if constexpr (Kind == Activation::Tanh) return tanh(x);
    if constexpr (Kind == Activation::Elu) return max(zero, x) + (exp(clamp_max(x, 0.0f)) - splat(1.0f));
    if constexpr (Kind == Activation::Sigmoid) return splat(1.0f) / (splat(1.0f) + exp(zero - x));
    if constexpr (Kind == Activation::Softplus) return softplus(x);
    if constexpr (Kind == Activation::ReluSquared) return max(zero, x) * max(zero, x);
    if constexpr (Kind == Activation::Gelu) {  // x P(x), or x - x P(-x) for x > 0: no cancellation in the far tail
        const Floats magnitude = max(zero - x, x);
        return max(zero, x) - magnitude * splat(0.5f) * erfc(magnitude * splat(0.70710678f));
    }
    if constexpr (Kind == Activation::GeluTanh) {  // 0.5 (1 + tanh(u)) = sigmoid(2 u)
        const Floats cubic = multiply_add(x * x, splat(0.044715f), splat(1.0f)) * x;
        return x / (splat(1.0f) + exp(cubic * splat(-1.59576912f)));
    }
}

template <Activation Kind, int N>
QUIRE_INLINE void activate_each(Floats (&x)[N]) {
    if constexpr (Kind == Activation::Silu) return swish_each(x, 1.0f);
    for (int i = 0; i < N; ++i) x[i] = activated<Kind>(x[i]);
}

// The factor of an activated gate.
template <Activation Kind>
QUIRE_INLINE Floats factor_of(Floats up) {
    if constexpr (Kind == Activation::ClampedSwiglu)
        return max(clamp_max(up, kSwigluLimit), splat(-kSwigluLimit)) + splat(1.0f);
    return up;
}

}  // namespace
}  // namespace quire::QUIRE_ISA
