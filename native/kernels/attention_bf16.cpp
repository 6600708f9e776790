// Attention over pages of bf16.

#include "attention_kernel.h"
#include "attention_latent.h"

namespace quire::QUIRE_ISA {

const AttentionKernels bf16_attention = kAttentionKernels<FloatPages<Bf16>>;
const AttentionKernels latent_bf16_attention = kAttentionKernels<LatentPages<Bf16>>;

}  // namespace quire::QUIRE_ISA
