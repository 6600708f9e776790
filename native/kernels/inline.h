// Inlining and unrolling.
#pragma once

#include <utility>

// Arrays of vectors stay in registers only if every function that touches them is inlined, and loops over them are
// unrolled early.
#define QUIRE_INLINE inline __attribute__((always_inline))
#define QUIRE_INLINED __attribute__((always_inline))  // for lambdas
#define QUIRE_UNROLL _Pragma("GCC unroll 16")

namespace quire::QUIRE_ISA {
namespace {

// f(0), f(1), .. f(N - 1), each with a compile-time constant.
template <class F, int... I>
QUIRE_INLINE void each(const F& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
QUIRE_INLINE void each(const F& f) {
    each(f, std::make_integer_sequence<int, N>{});
}

}  // namespace
}  // namespace quire::QUIRE_ISA
