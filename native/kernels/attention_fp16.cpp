// Attention over pages of fp16.

#include "attention_kernel.h"
#include "attention_latent.h"

namespace quire::QUIRE_ISA {

const AttentionKernels fp16_attention = kAttentionKernels<FloatPages<Fp16>>;
const AttentionKernels latent_fp16_attention = kAttentionKernels<LatentPages<Fp16>>;

}  // namespace quire::QUIRE_ISA
