// Attention over pages of fp32.

#include "attention_kernel.h"
#include "attention_latent.h"

namespace quire::QUIRE_ISA {

const AttentionKernels fp32_attention = kAttentionKernels<FloatPages<float>>;
const AttentionKernels latent_fp32_attention = kAttentionKernels<LatentPages<float>>;

}  // namespace quire::QUIRE_ISA
