// How the pieces of a kernel become one loop.
#pragma once

// Arrays of vectors stay in registers only where all that touches them is one function, and where loops over them are
// unrolled early.
#define QUIRE_INLINE inline __attribute__((always_inline))
#define QUIRE_UNROLL _Pragma("GCC unroll 16")
