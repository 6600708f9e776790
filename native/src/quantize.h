// Quantization of floats while a checkpoint is loaded.
#pragma once

#include "dequantize.h"

namespace quire {

// Whether quantize_row knows the type: Q8_0, Q4_1, NF4.
bool can_quantize_to(Storage storage);

// n weights, a multiple of 32 -> blocks of the type. Weights are rounded to the nearest quantized value:
//   Q8_0   scale = max |w| / 127, q in -127 .. 127
//   Q4_1   scale = (max - min) / 15, offset = min, q in 0 .. 15
//   NF4    scale = max |w|, the index of the nearest value of the codebook
// Scales and offsets are rounded to the type's precision first. A block that is all zeros, or too small for an fp16
// scale, becomes zeros. A block with an Inf or NaN becomes NaN.
void quantize_row(Storage storage, const float* weights, int64_t n, uint8_t* out);

}  // namespace quire
