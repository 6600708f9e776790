// The tile kernels of this ISA, as templates over formats.
#pragma once

#include "isa.h"

// clang-format off: the order matters
#if QUIRE_ISA_ID == 0
#include "matrix_plain.h"
#elif QUIRE_NEON
#include "matrix_neon.h"
#include "matrix_vector.h"
#include "matrix_neon_int4.h"
#elif QUIRE_ISA_ID == 2
#include "matrix_avx2.h"
#include "matrix_vector.h"
#elif QUIRE_ISA_ID == 3
#include "matrix_avx512.h"
#include "matrix_vector.h"
#elif QUIRE_ISA_ID == 4
#include "matrix_avxvnni.h"
#include "matrix_vector.h"
#endif
#include "matrix_tiles.h"
#if QUIRE_ISA_ID == 1
#include "matrix_neon_panel.h"
#elif QUIRE_ISA_ID == 5
#include "matrix_neon_i8mm.h"
#endif
#if QUIRE_NEON
#include "matrix_neon_float_panel.h"
#elif QUIRE_ISA_ID >= 2
#include "matrix_x86_panel.h"
#endif
// clang-format on

namespace quire::QUIRE_ISA {
namespace {

// The tiles for many rows, and from how many rows on they are used.
#if QUIRE_ISA_ID == 0
template <class Format>
using Unpacked = InPlace<Format>;
template <class Format>
constexpr int64_t kPanelRows = 1;
#elif QUIRE_ISA_ID == 1
template <class Format>
constexpr int64_t kPanelRows = InPlace<Format>::max_rows + 1;
#elif QUIRE_ISA_ID == 5
template <class Format>
constexpr int64_t kPanelRows = 9;  // estimated from the number of unpacking instructions; not measured
#else
template <class Format>
constexpr int64_t kPanelRows = Simd::min_panel_rows;
#endif

template <class Format>
FormatKernels format_kernels() {
    return {&kTileKernels<InPlace<Format>>, &kTileKernels<Unpacked<Format>>, kPanelRows<Format>};
}

}  // namespace
}  // namespace quire::QUIRE_ISA
