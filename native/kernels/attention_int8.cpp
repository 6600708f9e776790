// Attention over pages of int8.

#include "attention_int8.h"

#include "attention_kernel.h"

namespace quire::QUIRE_ISA {

const AttentionKernels int8_attention = kAttentionKernels<Int8Pages>;

}  // namespace quire::QUIRE_ISA
