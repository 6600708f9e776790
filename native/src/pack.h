// Packs stored matrices into the layouts of the kernels.
#pragma once

#include <memory>
#include <vector>

#include "dequantize.h"
#include "matrix.h"

namespace quire {

// A packed matrix and its memory.
//
//   stored                  layout     group  scale, offset   bits a weight   values
//   Q4_0                    Int4       32     fp16            4.5             exact
//   Q4_1                    Int4       32     fp16, fp16      5               exact
//   Q4_K                    Int4       32     two levels      4.625           exact
//   IQ4_NL                  Codebook4  32     fp16            4.5             exact
//   IQ4_XS                  Codebook4  32     two levels      4.3125          exact
//   MXFP4                   Codebook4  32     bf16            4.5             exact
//   Q5_0                    Int5       32     fp16            5.5             exact
//   Q5_1                    Int5       32     fp16, fp16      6               exact
//   Q8_0                    Int8       32     fp16            8.5             exact
//   Q5_K                    Int5       32     two levels      5.625           exact
//   Q6_K                    Int6       16     two levels      6.5625          exact
//   Q3_K                    Int3       16     two levels      3.5625          exact
//   Q2_K                    Int2       16     two levels      3.125           exact
//   TQ1_0, TQ2_0            Int2       32     fp16            2.5             exact
//   IQ1_S, IQ2_XXS          Codebook3  32     two levels      3.375           exact
//   IQ1_M, IQ2_XS, IQ2_S    Codebook3  16     two levels      3.625           exact
//   IQ3_XXS, IQ3_S          Codebook4  32     two levels      4.375           exact
//   NVFP4                   Codebook4  16     fp16            5               exact
//   Q4_Z                    Int4       32     fp16, zero      5               exact
//   Q4_F                    Int4       32     fp32, fp32      6               scales of 22 bits
//   Q8_F                    Int8       32     fp32            9               scales of 22 bits
//   Q8_M                    Int8       32     fp32, fp32      10              scales of 22 bits
//   NF4, FP4                Codebook4  32     fp32            5               the table in 112ths or 120ths
//   F32, F16, BF16          as stored                         32, 16, 16      exact
//   F8_E4M3, F8_E5M2        BFloat16                          16              exact
//   FP8                     BFloat16                          16              rounded to bf16
//
// Q2_K, Q4_K and Q5_K have offsets of two levels too. Exact: unpack_row returns the bits that dequantize_row returns
// for the stored row. No file stores blocks of Q4_Z to FP8: the checkpoint readers make them (weights/blocks.py).
class Matrix {
 public:
    // Packs one row of num_inputs weights (a multiple of the type's block) per output. Column k is input
    // input_order[k], or input k if that is null. Only a matrix that has_columns may have a threshold. Runs on the
    // OpenMP threads of the caller. Throws std::bad_alloc.
    Matrix(Storage storage, const std::vector<const uint8_t*>& rows, int64_t num_inputs,
           const int32_t* input_order = nullptr, float threshold = 0);
    Matrix(const Matrix&) = delete;
    Matrix& operator=(const Matrix&) = delete;

    const PackedMatrix& packed() const { return packed_; }

 private:
    PackedMatrix packed_;
    std::shared_ptr<uint8_t> memory_;
    std::vector<int32_t> input_order_;
};

// The weights of one output as the kernels see them: fp32 [num_inputs], in the original order of inputs.
void unpack_row(const PackedMatrix& matrix, int64_t output, float* out);

}  // namespace quire
