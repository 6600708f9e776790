// Weight matrices, packed for SIMD kernels, and their matmuls with rows of activations.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "codebook.h"

namespace quire {

// The layout of a packed matrix. Outputs come in tiles of kTileOutputs, the last one padded with zeros. A tile is
// contiguous, and a kernel reads it once, forwards.
//
//   Int2 .. Int8,  A tile is a sequence of blocks of inputs, ascending: super-blocks of kBlockInputs if scales have
//   Codebook3, 4   two levels, else blocks of kGroupInputs. A block is
//                    super-scales [16]         fp16, or fp32 if wide; another 16 if `has_offset`: two levels only
//                    scales       [groups][16] of `scale_type`, one for each `group` inputs
//                    offsets      [groups][16] the same, if `has_offset`
//                    quantized values of 32 inputs, of the next 32, ..
//                  w = scale * q + offset. Int8 stores q, the others q + zero (0 .. 2^bits - 1), Codebooks the index of
//                  q in `codebook`.
//   floats         [num_inputs][16], in the type of the file
//
// The quantized values of 32 inputs are 8 quads of 4 consecutive inputs, in planes. A plane has B bits of each value,
// [B][16][4] bytes for 16 outputs and 4 inputs: row q % B holds quad q, from bit q / B * B on. Values of 8, 4 and 2
// bits are one plane. Values of 6, 5 and 3 bits are two planes, the first with the lowest 4, 4 and 2 bits.
//
// One load of 16, 32 or 64 bytes thus feeds the 4-way dot product of 4, 8 or 16 outputs without a shuffle.
enum class Layout : int { Int2, Int3, Int4, Int5, Int6, Int8, Codebook3, Codebook4, Float16, BFloat16, Float32 };

// Each holds the scales of some file formats exactly. ZeroPoint: scales are fp16, and an offset is stored as the
// negative zero point, in fp16: offset = scale * stored. TwoLevel: scales and offsets are int8 sub-scales times a
// super-scale that the groups of a block share, in fp16 or, if wide, in fp32 with 11 significant bits. A Float32 scale
// has at most 22 significant bits.
enum class ScaleType : int { Float16, BFloat16, Float32, ZeroPoint, TwoLevel, WideTwoLevel };

constexpr bool has_two_levels(ScaleType type) { return type == ScaleType::TwoLevel || type == ScaleType::WideTwoLevel; }

constexpr int kTileOutputs = 16;
constexpr int kGroupInputs = 32;   // activations that share a scale
constexpr int kBlockInputs = 256;  // weights that share super-scales, if scales have two levels

struct PackedMatrix {
    Layout layout;
    int64_t num_outputs, num_inputs;
    int group;          // inputs that share a scale: 16 or 32, a divisor of num_inputs; 0 for float layouts
    int zero;           // Int2 .. Int6: added to quantized values to store them; else 0
    Codebook codebook;  // Codebook3, 4: the values that stored indices stand for; else None
    ScaleType scale_type;
    bool has_offset;      // offsets are stored, else they are 0
    bool fp16_sums;       // Float16, and all weights are below kFp16SumLimit: a Fp16Group is summed in fp16
    const uint8_t* data;  // 64-byte aligned, not owned
    // If the matrix was packed with its inputs reordered (act-order): column k is multiplied with x[input_order[k]].
    const int32_t* input_order;
    size_t nbytes;
    // Inputs of this magnitude and more are multiplied in fp32, not in 8 bits (outliers.h). 0: none.
    float threshold;

    bool is_integer() const { return group != 0; }
    bool has_columns() const { return layout == Layout::Int8 && !has_offset; }  // for add_columns
    int64_t num_tiles() const { return (num_outputs + kTileOutputs - 1) / kTileOutputs; }
    int64_t tile_bytes() const { return int64_t(nbytes) / num_tiles(); }
};

// 32 quantized activations, the input of integer layouts: x is about scale * q, scale = max |x| / 127.
struct alignas(64) QuantizedGroup {
    int8_t quants[kGroupInputs];
    float scale;
    float sum;           // scale * quant_sum, to be multiplied with offsets
    float half_sums[2];  // the same for each half of the group, for matrices with groups of 16
    int32_t quant_sum;
    int32_t half_quant_sums[2];
    int32_t unused;
};
static_assert(sizeof(QuantizedGroup) == 64, "a group is one cache line");

// 32 activations in fp16, padded with zeros at the end of a row. x is about scale * value; the scale is the power of
// two that brings the largest magnitude into [2, 4]. With weights below 256, no sum of a group reaches 2^16.
constexpr uint16_t kFp16SumLimit = 0x5c00;  // fp16 256

struct alignas(16) Fp16Group {
    uint16_t values[kGroupInputs];
    float scale;
};

// Prepared rows come in blocks: group g of all rows of a block is contiguous. A matmul of fewer rows than a table's
// row_block is one block of that many rows.
struct GroupOrder {
    int64_t block_rows, num_groups;  // num_groups: per row

    GroupOrder(int64_t rows, int64_t row_block, int64_t num_inputs)
        : block_rows(rows < 1           ? 1
                     : rows < row_block ? rows
                                        : row_block),
          num_groups((num_inputs + kGroupInputs - 1) / kGroupInputs) {}

    // The index of the first group of a row. The next groups follow at distances of block_rows.
    int64_t start(int64_t row) const { return row / block_rows * block_rows * num_groups + row % block_rows; }
    // Groups that `rows` rows take, with the last block padded.
    int64_t size(int64_t rows) const { return (rows + block_rows - 1) / block_rows * block_rows * num_groups; }
};

// Rows of activations. Integer layouts read `groups`; float layouts read `x`, or `fp16` if MatrixKernels::reads_fp16.
// The others may be null.
struct Activations {
    const float* x;  // [rows, num_inputs], rows `stride` floats apart
    int64_t stride;
    const QuantizedGroup* groups;  // in the GroupOrder of these rows
    const Fp16Group* fp16;         // in the same order
};

// Scratch bytes of a thread, for a matmul of many rows.
constexpr int64_t kPanelBytes = 1024 * 1024;

// One of the threads that compute a matmul.
struct Worker {
    int thread, num_threads;
    uint8_t* panel;  // kPanelBytes, private to the thread, aligned to a cache line
    // [num_threads], shared: pieces taken of each thread's share (work stealing). 0 before the matmul begins.
    std::atomic<int64_t>* taken;
};

struct MatrixKernels {
    int64_t row_block;  // rows of a block of GroupOrder

    // x [num_inputs], a multiple of 32 -> num_inputs / 32 groups, `stride` apart. The same bits in every table.
    void (*quantize)(const float* x, int64_t num_inputs, QuantizedGroup* groups, int64_t stride);

    // x [num_inputs], any number -> its HalfGroups, `stride` apart. Null where Float16 matrices read x.
    void (*to_fp16)(const float* x, int64_t num_inputs, Fp16Group* groups, int64_t stride);
    bool reads_fp16(const PackedMatrix& w) const { return to_fp16 && w.fp16_sums; }

    // out[r, o] = sum over inputs of x[r] * w[o], for rows [0, rows). All threads together write each result once.
    // Results are summed in fp32 with fma, inputs ascending; integer layouts are summed by groups:
    //   acc = fma(w.offset, x.sum, acc)                              if there are offsets
    //   acc = fma(float(dot product of q) * w.scale, x.scale, acc)
    // So a result has the same bits in every table, for any other rows and any number of threads. One exception: a
    // table that reads fp16 sums a group in fp16 with fma, inputs ascending, and then
    //   acc = fma(float(sum), x.scale, acc)
    // Its bits differ from those of other tables, but not with rows and threads. If a scale is 2^100 or more, which
    // only MXFP4 can store, results may be NaN in some tables and finite in others.
    void (*multiply)(const PackedMatrix& w, const Activations& a, int64_t rows, float* out, int64_t out_stride,
                     const Worker& worker);

    // out[o] += sum over i of x[i] * w[o, columns[i]], for the outputs o of tiles [first, last) of a matrix that
    // has_columns: acc = fma(scale * q, x[i], acc) in fp32, i ascending. The same bits in every table.
    void (*add_columns)(const PackedMatrix& w, const int32_t* columns, const float* x, int64_t count, int64_t first,
                        int64_t last, float* out);
};

}  // namespace quire
