// The tile kernels of float weights.

#include "matrix_isa.h"
#if QUIRE_NEON
#include "matrix_neon_fp16.h"
#endif

namespace quire::QUIRE_ISA {

FormatKernels float_kernels(const PackedMatrix& w) {
#if QUIRE_NEON
    if (w.fp16_sums) return {&kTileKernels<Fp16Tiles>, &kTileKernels<Fp16Tiles>, INT64_MAX};
#endif
    if (w.layout == Layout::Float32) return format_kernels<FloatFormat<Layout::Float32>>();
    if (w.layout == Layout::Float16) return format_kernels<FloatFormat<Layout::Float16>>();
    return format_kernels<FloatFormat<Layout::BFloat16>>();
}

}  // namespace quire::QUIRE_ISA
