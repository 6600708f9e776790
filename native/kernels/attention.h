// The attention kernels of each type of pages: a file each, as they take long to compile.
#pragma once

#include "ops.h"

// Attention over float pages has the same code in some ISAs: it is compiled for one of them.
#ifndef QUIRE_FLOAT_ATTENTION_ISA
#define QUIRE_FLOAT_ATTENTION_ISA QUIRE_ISA
#endif

namespace quire {

struct AttentionKernels {
    decltype(OpKernels::attend) attend;
    decltype(OpKernels::attend_splits) attend_splits;
};

namespace QUIRE_FLOAT_ATTENTION_ISA {
extern const AttentionKernels fp16_attention, bf16_attention, fp32_attention;
extern const AttentionKernels latent_fp16_attention, latent_bf16_attention, latent_fp32_attention;
}  // namespace QUIRE_FLOAT_ATTENTION_ISA

namespace QUIRE_ISA {
extern const AttentionKernels int8_attention;
}  // namespace QUIRE_ISA

}  // namespace quire
