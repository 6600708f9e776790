// Weight matrices, packed for the vector unit, and their products with rows of activations.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "codebook.h"

namespace quire {

// How a packed matrix is laid out. Outputs come in tiles of kTileOutputs, the last one padded with zeros; a tile is one
// contiguous run of memory that a kernel reads once, forwards.
//
//   Int2 .. Int8,  a tile is a sequence of blocks of inputs, ascending: of kBlockInputs where scales have two levels,
//   Codebook3, 4   else of kGroupInputs. A block is
//                    units    [16]          fp16, or fp32 if wide; another 16 where `has_offset`: two levels only
//                    scales   [groups][16]  of `scale_type`, one for each `group` inputs
//                    offsets  [groups][16]  the same, where `has_offset`
//                    codes    of 32 inputs, of the next 32, ..
//                  w = scale * code + offset. Int8 stores the code, others code + zero (0 .. 2^bits - 1), Codebooks the
//                  code's place in `codebook`.
//   floats         [num_inputs][16], in the type the file has
//
// Codes of 32 inputs are 8 quads of 4 neighbours, in planes. A plane has B bits of each code, [B][16][4] bytes for 16
// outputs and 4 inputs: row q % B holds those of quad q, from bit q / B * B on. Codes of 8, 4 and 2 bits are a plane;
// those of 6, 5 and 3 are two, the first with the lowest 4, 4 and 2 bits.
//
// One 16, 32 or 64 byte load thus feeds the 4-way dot product of 4, 8 or 16 outputs without a shuffle.
enum class Layout : int { Int2, Int3, Int4, Int5, Int6, Int8, Codebook3, Codebook4, Float16, BFloat16, Float32 };

// Each holds exactly what some files say. ZeroPoint: scales are halves, and what stands for the offset is an fp16 count
// of scales, offset = scale * count: a zero point, with its sign changed. TwoLevel: scales and offsets are int8 counts
// of a unit that the block's groups share, a half, or where it is wide an fp32 number of 11 bits. A Float32 scale has
// 22 bits at most.
enum class ScaleType : int { Float16, BFloat16, Float32, ZeroPoint, TwoLevel, WideTwoLevel };

constexpr bool has_two_levels(ScaleType type) { return type == ScaleType::TwoLevel || type == ScaleType::WideTwoLevel; }

constexpr int kTileOutputs = 16;
constexpr int kGroupInputs = 32;   // activations that share a scale
constexpr int kBlockInputs = 256;  // weights that share the units of their scales, where there are two levels

struct PackedMatrix {
    Layout layout;
    int64_t num_outputs, num_inputs;
    int group;          // inputs that share a scale: 16 or 32, a divisor of num_inputs; 0 for float layouts
    int zero;           // Int2 .. Int6: what was added to the codes to store them; else 0
    Codebook codebook;  // Codebook3, 4: what its codes stand for; else None
    ScaleType scale_type;
    bool has_offset;      // offsets are stored; else they are 0
    bool half_sums;       // Float16, and no weight reaches kHalfSumLimit: products of a HalfGroup add up in halves
    const uint8_t* data;  // 64-byte aligned, owned by whoever packed it
    // Where the matrix was packed with its inputs in another order: x[input_order[k]] meets column k. Null: their own.
    const int32_t* input_order;
    size_t nbytes;
    // Inputs of this magnitude and more are multiplied as they are, not in 8 bits (outliers.h). 0: none.
    float threshold;

    bool is_integer() const { return group != 0; }
    bool has_columns() const { return layout == Layout::Int8 && !has_offset; }  // for add_columns
    int64_t num_tiles() const { return (num_outputs + kTileOutputs - 1) / kTileOutputs; }
    int64_t tile_bytes() const { return int64_t(nbytes) / num_tiles(); }
};

// 32 activations as integer layouts want them: x is about scale * code, scale = max |x| / 127.
struct alignas(64) QuantizedGroup {
    int8_t codes[kGroupInputs];
    float scale;
    float sum;           // scale * code_sum, which offsets are multiplied with
    float half_sums[2];  // the same for each half, for matrices in groups of 16
    int32_t code_sum;
    int32_t half_code_sums[2];
    int32_t unused;
};
static_assert(sizeof(QuantizedGroup) == 64, "one cache line a group");

// 32 activations as halves, zeros after the last of a row. x is about scale * value; scale is the power of two that
// brings the largest magnitude into [2, 4]: with weights below 256, no sum of a group reaches 2^16.
constexpr uint16_t kHalfSumLimit = 0x5c00;  // the half 256

struct alignas(16) HalfGroup {
    uint16_t values[kGroupInputs];
    float scale;
};

// Prepared rows come in blocks: what the rows of a block have of one group lies together. A product of fewer rows than
// a table's row_block is one block of that many.
struct GroupOrder {
    int64_t block_rows, num_groups;  // num_groups: of a row

    GroupOrder(int64_t rows, int64_t row_block, int64_t num_inputs)
        : block_rows(rows < 1           ? 1
                     : rows < row_block ? rows
                                        : row_block),
          num_groups((num_inputs + kGroupInputs - 1) / kGroupInputs) {}

    // Where a row's first group lies; the next ones follow at distances of block_rows.
    int64_t start(int64_t row) const { return row / block_rows * block_rows * num_groups + row % block_rows; }
    // What `rows` rows take: the last block is whole.
    int64_t size(int64_t rows) const { return (rows + block_rows - 1) / block_rows * block_rows * num_groups; }
};

// Rows of activations: integer layouts read `groups`, float layouts `x`, or `halves` where MatrixKernels::reads_halves;
// what is not read may be null.
struct Activations {
    const float* x;  // [rows, num_inputs], rows `stride` floats apart
    int64_t stride;
    const QuantizedGroup* groups;  // in the GroupOrder of these rows
    const HalfGroup* halves;       // likewise
};

// Memory a thread needs for a product of many rows.
constexpr int64_t kPanelBytes = 1024 * 1024;

// One of the threads that compute a product.
struct Worker {
    int thread, num_threads;
    uint8_t* panel;  // kPanelBytes of its own, at a cache line's boundary
    // [num_threads], theirs together, 0 before the first of them begins: pieces that are taken of each one's share.
    std::atomic<int64_t>* taken;
};

struct MatrixKernels {
    int64_t row_block;  // rows that are multiplied at once

    // x [num_inputs], a multiple of 32 -> num_inputs / 32 groups, `stride` apart. The same bits in every table.
    void (*quantize)(const float* x, int64_t num_inputs, QuantizedGroup* groups, int64_t stride);

    // x [num_inputs], any number -> its HalfGroups, `stride` apart. Null where Float16 matrices read x.
    void (*to_halves)(const float* x, int64_t num_inputs, HalfGroup* groups, int64_t stride);
    bool reads_halves(const PackedMatrix& w) const { return to_halves && w.half_sums; }

    // out[r, o] = sum over inputs of x[r] * w[o], for rows [0, rows); this thread writes some of the results, and all
    // threads together write each once. Summed in fp32 with fma, inputs ascending; for integer layouts by groups:
    //   acc = fma(w.offset, x.sum, acc)                          where there are offsets
    //   acc = fma(float(dot of codes) * w.scale, x.scale, acc)
    // So a result has the same bits in every table, whatever the other rows and however many threads. One exception:
    // where a table reads halves, a group is summed in halves with fma, inputs ascending, and then
    //   acc = fma(float(sum), x.scale, acc)
    // Other tables give other bits there; rows and threads still change nothing. Where a scale is 2^100 or more, as
    // only MXFP4 can say, results may be NaN in some tables and numbers in others.
    void (*multiply)(const PackedMatrix& w, const Activations& a, int64_t rows, float* out, int64_t out_stride,
                     const Worker& worker);

    // out[o] += sum over i of x[i] * w[o, columns[i]], for the outputs o of tiles [first, last) of a matrix that
    // has_columns: acc = fma(scale * code, x[i], acc) in fp32, i ascending. The same bits in every table.
    void (*add_columns)(const PackedMatrix& w, const int32_t* columns, const float* x, int64_t count, int64_t first,
                        int64_t last, float* out);
};

}  // namespace quire
