// Tables of 16 numbers that 4-bit codes stand for.
#pragma once

#include <cstdint>

namespace quire {

enum class Codebook : int { None, IQ4, E2M1 };

constexpr int8_t kCodebooks[3][16] = {
    {},                                                                          // codes are numbers themselves
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},  // IQ4_NL, IQ4_XS
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},                   // MXFP4: doubled floats of 4 bits
};

}  // namespace quire
