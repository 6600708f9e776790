// AVX-VNNI, dot products for CPUs without AVX-512: 8 outputs per vector.
#pragma once

#include "matrix_avx.h"
#include "matrix_vnni.h"

namespace quire::QUIRE_ISA {
namespace {

struct AvxVnni : Avx {
    QUIRE_INLINE static Int add_words(Int sum, Int a, Int b) { return _mm256_dpwssd_avx_epi32(sum, a, b); }
    QUIRE_INLINE static Int add_dot(Int sum, Int w, Int x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
};

using Simd = Vnni<AvxVnni>;

}  // namespace
}  // namespace quire::QUIRE_ISA
