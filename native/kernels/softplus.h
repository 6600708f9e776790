// The softplus of a vector.
#pragma once

#include "activation.h"
#include "inline.h"
#include "vec.h"

namespace quire::QUIRE_ISA {
namespace {

// log(1 + exp(x)), with a relative error below 3e-7. With u = exp(-|x|): max(x, 0) + log(1 + u), and log(1 + u) =
// 2 atanh(u / (2 + u)), whose argument is at most 1/3.
QUIRE_INLINE Floats softplus(Floats x) {
    const Floats zero = splat(0.0f), u = exp(zero - max(x, zero - x));
    const Floats z = u / (splat(2.0f) + u), z2 = z * z;
    Floats series = splat(1.0f / 13);
    for (int odd = 11; odd >= 1; odd -= 2) series = multiply_add(series, z2, splat(1.0f / float(odd)));
    return multiply_add(z + z, series, max(x, zero));
}

}  // namespace
}  // namespace quire::QUIRE_ISA
