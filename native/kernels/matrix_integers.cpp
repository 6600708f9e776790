// The tile kernels of quantized weights of 2, 3, 5, 6 and 8 bits.

#include "matrix_isa.h"

namespace quire::QUIRE_ISA {

FormatKernels integer_kernels(const PackedMatrix& w) {
    constexpr ScaleType kWide = ScaleType::WideTwoLevel, kTwoLevel = ScaleType::TwoLevel, kFp32 = ScaleType::Float32;
    switch (w.layout) {
        case Layout::Int2:
            if (!w.has_offset) return format_kernels<IntFormat<2, 32, ScaleType::Float16, false, 1>>();
            return format_kernels<IntFormat<2, 16, kTwoLevel, true>>();
        case Layout::Int3: return format_kernels<IntFormat<3, 16, kTwoLevel, false, 4>>();
        case Layout::Codebook3:
            if (w.codebook == Codebook::IQ1 && w.group == 16)
                return format_kernels<CodebookFormat<3, 16, kWide, Codebook::IQ1>>();
            if (w.codebook == Codebook::IQ1) return format_kernels<CodebookFormat<3, 32, kWide, Codebook::IQ1>>();
            if (w.group == 16) return format_kernels<CodebookFormat<3, 16, kWide, Codebook::IQ2>>();
            return format_kernels<CodebookFormat<3, 32, kWide, Codebook::IQ2>>();
        case Layout::Int5:
            if (!w.has_offset) return format_kernels<IntFormat<5, 32, ScaleType::Float16, false, 16>>();
            if (w.scale_type == kTwoLevel) return format_kernels<IntFormat<5, 32, kTwoLevel, true>>();
            return format_kernels<IntFormat<5, 32, ScaleType::Float16, true>>();
        case Layout::Int6: return format_kernels<IntFormat<6, 16, kTwoLevel, false, 32>>();
        case Layout::Int8:
            if (w.scale_type == kFp32 && w.has_offset) return format_kernels<IntFormat<8, 32, kFp32, true>>();
            if (w.scale_type == kFp32) return format_kernels<IntFormat<8, 32, kFp32, false>>();
            if (w.has_offset) return format_kernels<IntFormat<8, 32, ScaleType::Float16, true>>();
            return format_kernels<IntFormat<8, 32, ScaleType::Float16, false>>();
        case Layout::Int4:
        case Layout::Codebook4:
        case Layout::Float16:
        case Layout::BFloat16:
        case Layout::Float32: break;
    }
    return {};
}

}  // namespace quire::QUIRE_ISA
