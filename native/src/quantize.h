// Floats become codes while a checkpoint is loaded.
#pragma once

#include "dequantize.h"

namespace quire {

// Whether quantize_row knows the type: Q8_0, Q4_1, NF4.
bool can_quantize_to(Storage storage);

// n weights, a multiple of 32 -> blocks of the type. Codes are those nearest to the weights:
//   Q8_0   scale = max |w| / 127, codes -127 .. 127
//   Q4_1   scale = (max - min) / 15, offset = min, codes 0 .. 15
//   NF4    scale = max |w|, the nearest place of the table
// Scales and offsets are rounded to what the type stores first. A block that is all zeros, or too small for an fp16
// scale, becomes zeros; one with an Inf or NaN in it becomes NaN.
void quantize_row(Storage storage, const float* weights, int64_t n, uint8_t* out);

}  // namespace quire
