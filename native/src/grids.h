// GGUF's i-quants, whose quantized values are indices into grids of vectors. A block has 256 weights.
#pragma once

#include "dequantize.h"

namespace quire {

void decode_iq1_s(const uint8_t* block, DecodedBlock& out);
void decode_iq1_m(const uint8_t* block, DecodedBlock& out);
void decode_iq2_xxs(const uint8_t* block, DecodedBlock& out);
void decode_iq2_xs(const uint8_t* block, DecodedBlock& out);
void decode_iq2_s(const uint8_t* block, DecodedBlock& out);
void decode_iq3_xxs(const uint8_t* block, DecodedBlock& out);
void decode_iq3_s(const uint8_t* block, DecodedBlock& out);

}  // namespace quire
