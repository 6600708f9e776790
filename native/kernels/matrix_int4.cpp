// The tile kernels of 4-bit weights: integers, and indices into codebooks.

#include "matrix_isa.h"

namespace quire::QUIRE_ISA {

FormatKernels int4_kernels(const PackedMatrix& w) {
    constexpr ScaleType kWide = ScaleType::WideTwoLevel, kTwoLevel = ScaleType::TwoLevel, kFp32 = ScaleType::Float32;
    switch (w.codebook) {
        case Codebook::None:
            if (!w.has_offset) return format_kernels<IntFormat<4, 32, ScaleType::Float16, false, 8>>();
            if (w.scale_type == kFp32) return format_kernels<IntFormat<4, 32, kFp32, true>>();
            if (w.scale_type == kTwoLevel) return format_kernels<IntFormat<4, 32, kTwoLevel, true>>();
            if (w.scale_type == ScaleType::ZeroPoint)
                return format_kernels<IntFormat<4, 32, ScaleType::ZeroPoint, true>>();
            return format_kernels<IntFormat<4, 32, ScaleType::Float16, true>>();
        case Codebook::IQ4:
            if (w.scale_type == kTwoLevel) return format_kernels<CodebookFormat<4, 32, kTwoLevel, Codebook::IQ4>>();
            return format_kernels<CodebookFormat<4, 32, ScaleType::Float16, Codebook::IQ4>>();
        case Codebook::E2M1:
            if (w.group == 16) return format_kernels<CodebookFormat<4, 16, ScaleType::Float16, Codebook::E2M1>>();
            return format_kernels<CodebookFormat<4, 32, ScaleType::BFloat16, Codebook::E2M1>>();
        case Codebook::IQ3_XXS: return format_kernels<CodebookFormat<4, 32, kWide, Codebook::IQ3_XXS>>();
        case Codebook::IQ3_S: return format_kernels<CodebookFormat<4, 32, kWide, Codebook::IQ3_S>>();
        case Codebook::NF4: return format_kernels<CodebookFormat<4, 32, kFp32, Codebook::NF4>>();
        case Codebook::FP4: return format_kernels<CodebookFormat<4, 32, kFp32, Codebook::FP4>>();
        case Codebook::IQ1:
        case Codebook::IQ2: break;  // 3 bits
    }
    return {};
}

}  // namespace quire::QUIRE_ISA
