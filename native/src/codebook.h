// Codebooks: the values that stored indices stand for. 16 values or, for indices of 3 bits, 8 and zeros behind them.
#pragma once

#include <cstdint>

namespace quire {

enum class Codebook : int { None, IQ4, E2M1, IQ1, IQ2, IQ3_XXS, IQ3_S, NF4, FP4 };

constexpr int8_t kCodebooks[9][16] = {
    {},                                                                          // quantized values are stored directly
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},  // IQ4_NL, IQ4_XS
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},                   // MXFP4, NVFP4: twice the float
    {-7, 1, 9, 0, -9, -1, 7, 0},                                                 // IQ1_S, IQ1_M: in eighths
    {8, 25, 43, 0, -8, -25, -43, 0},                                             // IQ2_XXS, IQ2_XS, IQ2_S
    {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62},      // IQ3_XXS
    {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15},              // IQ3_S
    {-112, -78, -59, -44, -32, -21, -10, 0, 9, 18, 28, 38, 49, 63, 81, 112},     // NF4: in 112ths, rounded
    {0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30},       // FP4: in 120ths; 1/192 becomes 1/120
};

constexpr float kNF4Steps = 112, kFP4Steps = 120;  // 1.0 in the tables

}  // namespace quire
