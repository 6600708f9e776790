// Binds Matrix (packed weights), dequantize, decode and quantize, and for tests and benchmarks a matmul.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <new>
#include <optional>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "pack.h"
#include "quantize.h"

namespace nb = nanobind;

namespace {

using namespace quire;

using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Order = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using QuantMatrix = nb::ndarray<nb::numpy, int8_t, nb::ndim<2>>;
using ByteMatrix = nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>;
using FloatMatrix = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

[[noreturn]] void refuse(const char* format, ...) {
    char message[256];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    throw nb::value_error(message);
}

const char* layout_name(Layout layout) {
    switch (layout) {
        case Layout::Int2: return "int2";
        case Layout::Int3: return "int3";
        case Layout::Int4: return "int4";
        case Layout::Int5: return "int5";
        case Layout::Int6: return "int6";
        case Layout::Int8: return "int8";
        case Layout::Codebook3: return "codebook3";
        case Layout::Codebook4: return "codebook4";
        case Layout::Float16: return "float16";
        case Layout::BFloat16: return "bfloat16";
        case Layout::Float32: return "float32";
    }
    return "";
}

// The storage type, after a check that the data is rows of it.
const StorageInfo& checked_storage(const std::string& name, const Bytes& data, int64_t num_columns) {
    const StorageInfo* info = find_storage(name.c_str());
    if (!info) refuse("'%s' is not a storage type", name.c_str());
    if (num_columns <= 0 || num_columns % info->block)
        refuse("%lld columns are not a positive multiple of the block of %s, %d", (long long)num_columns, info->name,
               info->block);
    const int64_t row_bytes = num_columns / info->block * info->block_bytes;
    if (int64_t(data.shape(1)) != row_bytes)
        refuse("a row of %lld columns of %s has %lld bytes, not %lld", (long long)num_columns, info->name,
               (long long)row_bytes, (long long)data.shape(1));
    return *info;
}

FloatMatrix new_floats(int64_t rows, int64_t columns) {
    float* values = new float[size_t(rows * columns)];
    nb::capsule owner(values, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    return FloatMatrix(values, {size_t(rows), size_t(columns)}, owner);
}

// The entries, after a check that they are a permutation; null if there is no order.
const int32_t* checked_order(const std::optional<Order>& order, const char* name, const char* things, int64_t count) {
    if (!order) return nullptr;
    if (int64_t(order->shape(0)) != count)
        refuse("%s has %lld entries for %lld %s", name, (long long)order->shape(0), (long long)count, things);
    std::vector<bool> taken(size_t(count), false);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t entry = order->data()[i];
        if (entry < 0 || entry >= count || taken[size_t(entry)])
            refuse("%s is not a permutation of %lld %s: entry %lld is %lld", name, (long long)count, things,
                   (long long)i, (long long)entry);
        taken[size_t(entry)] = true;
    }
    return order->data();
}

void construct(Matrix* matrix, const std::string& storage, const std::vector<Bytes>& parts, int64_t num_columns,
               const std::optional<Order>& row_order, const std::optional<Order>& column_order, float threshold) {
    std::vector<const uint8_t*> stored;
    for (const Bytes& data : parts) {
        checked_storage(storage, data, num_columns);
        for (size_t row = 0; row < data.shape(0); ++row) stored.push_back(data.data() + row * data.shape(1));
    }
    if (stored.empty()) refuse("a matrix of 0 rows");
    const StorageInfo& info = *find_storage(storage.c_str());
    if (!(threshold >= 0)) refuse("a threshold of %g", double(threshold));
    if (threshold > 0 && (info.storage != Storage::Q8_0 && info.storage != Storage::Q8_F))
        refuse("a threshold for %s, and only Q8_0 and Q8_F may have one", info.name);
    const int32_t* order = checked_order(row_order, "row_order", "rows", int64_t(stored.size()));
    const int32_t* columns = checked_order(column_order, "column_order", "columns", num_columns);
    nb::gil_scoped_release unlocked;
    std::vector<const uint8_t*> rows(stored.size());
    for (size_t o = 0; o < rows.size(); ++o) rows[o] = stored[order ? size_t(order[o]) : o];
    new (matrix) Matrix(info.storage, rows, num_columns, columns, threshold);
}

FloatMatrix dequantize(const std::string& storage, const Bytes& data, int64_t num_columns) {
    const StorageInfo& info = checked_storage(storage, data, num_columns);
    const int64_t num_rows = int64_t(data.shape(0)), row_bytes = int64_t(data.shape(1));
    FloatMatrix out = new_floats(num_rows, num_columns);
    const uint8_t* from = data.data();
    float* to = out.data();
    {
        nb::gil_scoped_release unlocked;
#pragma omp parallel for schedule(static)
        for (int64_t r = 0; r < num_rows; ++r)
            dequantize_row(info.storage, from + r * row_bytes, to + r * num_columns, num_columns);
    }
    return out;
}

// -> (quantized values int8 [rows, columns], scales, offsets or None [rows, groups], codebook or None)
nb::tuple decode(const std::string& storage, const Bytes& data, int64_t num_columns) {
    const StorageInfo& info = checked_storage(storage, data, num_columns);
    if (info.group == 0) refuse("%s is not a quantized type", info.name);
    const int64_t num_rows = int64_t(data.shape(0)), row_bytes = int64_t(data.shape(1));
    const int64_t num_groups = num_columns / info.group, groups_per_block = info.block / info.group;
    int8_t* quants = new int8_t[size_t(num_rows * num_columns)];
    nb::capsule owner(quants, [](void* p) noexcept { delete[] static_cast<int8_t*>(p); });
    FloatMatrix scales = new_floats(num_rows, num_groups);
    FloatMatrix offsets = new_floats(info.has_offset ? num_rows : 0, num_groups);
    const uint8_t* from = data.data();
    float *to_scales = scales.data(), *to_offsets = offsets.data();
    {
        nb::gil_scoped_release unlocked;
        const DecodeBlock decode_block = block_decoder(info.storage);
#pragma omp parallel for schedule(static)
        for (int64_t r = 0; r < num_rows; ++r) {
            DecodedBlock block;
            for (int64_t b = 0; b < num_columns / info.block; ++b) {
                decode_block(from + r * row_bytes + b * info.block_bytes, block);
                std::copy_n(block.quants, info.block, quants + r * num_columns + b * info.block);
                const int64_t group = r * num_groups + b * groups_per_block;
                std::copy_n(block.scales, groups_per_block, to_scales + group);
                if (info.has_offset) std::copy_n(block.offsets, groups_per_block, to_offsets + group);
            }
        }
    }
    nb::object book = nb::none();
    if (info.codebook != Codebook::None) {
        nb::list values;
        for (const int8_t value : kCodebooks[int(info.codebook)]) values.append(int(value));
        book = values;
    }
    const QuantMatrix all(quants, {size_t(num_rows), size_t(num_columns)}, owner);
    return nb::make_tuple(all, scales, info.has_offset ? nb::cast(offsets) : nb::none(), book);
}

ByteMatrix quantize(const std::string& storage, const Bytes& data, int64_t num_columns, const std::string& target) {
    const StorageInfo& info = checked_storage(storage, data, num_columns);
    const StorageInfo* to = find_storage(target.c_str());
    if (!to || !can_quantize_to(to->storage)) refuse("'%s' is not a type to quantize to", target.c_str());
    if (num_columns % to->block) refuse("%lld columns are not a multiple of %d", (long long)num_columns, to->block);
    const int64_t num_rows = int64_t(data.shape(0)), row_bytes = int64_t(data.shape(1));
    const int64_t out_bytes = num_columns / to->block * to->block_bytes;
    uint8_t* out = new uint8_t[size_t(num_rows * out_bytes)];
    nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<uint8_t*>(p); });
    const uint8_t* from = data.data();
    {
        nb::gil_scoped_release unlocked;
#pragma omp parallel
        {
            std::vector<float> row(static_cast<size_t>(num_columns));
#pragma omp for schedule(static)
            for (int64_t r = 0; r < num_rows; ++r) {
                dequantize_row(info.storage, from + r * row_bytes, row.data(), num_columns);
                quantize_row(to->storage, row.data(), num_columns, out + r * out_bytes);
            }
        }
    }
    return ByteMatrix(out, {size_t(num_rows), size_t(out_bytes)}, owner);
}

FloatMatrix dequantized(const Matrix& matrix) {
    const PackedMatrix& w = matrix.packed();
    FloatMatrix out = new_floats(w.num_outputs, w.num_inputs);
    for (int64_t o = 0; o < w.num_outputs; ++o) unpack_row(w, o, out.data() + o * w.num_inputs);
    return out;
}

FloatMatrix multiply(const Matrix& matrix, const FloatRows& x, int num_threads) {
    const PackedMatrix& w = matrix.packed();
    const int64_t rows = int64_t(x.shape(0)), num_inputs = w.num_inputs;
    if (int64_t(x.shape(1)) != num_inputs)
        refuse("x has %lld columns for %lld inputs", (long long)x.shape(1), (long long)num_inputs);
    if (num_threads < 1) refuse("%d threads", num_threads);
    if (w.input_order) refuse("the matrix has an input order, which only a tape supports");
    if (w.threshold > 0) refuse("the matrix has an outlier threshold, which only a tape supports");
    FloatMatrix out = new_floats(rows, w.num_outputs);
    if (rows == 0) return out;
    const MatrixKernels& matrix_kernels = kernels().matrix;
    const GroupOrder order(rows, matrix_kernels.row_block, num_inputs);
    std::vector<QuantizedGroup> groups(w.is_integer() ? size_t(order.size(rows)) : 0);
    Buffer<uint8_t> panels;
    panels.reserve(size_t(num_threads * kPanelBytes));
    std::vector<Fp16Group> fp16(matrix_kernels.reads_fp16(w) ? size_t(order.size(rows)) : 0);
    const Activations a{x.data(), num_inputs, groups.data(), fp16.data()};
    float* to = out.data();
    std::vector<std::atomic<int64_t>> taken(num_threads);
    {
        nb::gil_scoped_release unlocked;
#pragma omp parallel num_threads(num_threads)
        {
            if (w.is_integer()) {
#pragma omp for schedule(static)
                for (int64_t r = 0; r < rows; ++r)
                    matrix_kernels.quantize(a.x + r * num_inputs, num_inputs, groups.data() + order.start(r),
                                            order.block_rows);
            }
            if (!fp16.empty()) {
#pragma omp for schedule(static)
                for (int64_t r = 0; r < rows; ++r)
                    matrix_kernels.to_fp16(a.x + r * num_inputs, num_inputs, fp16.data() + order.start(r),
                                           order.block_rows);
            }
            const int thread = omp_get_thread_num();
            const Worker worker{thread, omp_get_num_threads(), panels.get() + thread * kPanelBytes, taken.data()};
            matrix_kernels.multiply(w, a, rows, to, w.num_outputs, worker);
        }
    }
    return out;
}

}  // namespace

void bind_matrix(nb::module_& m) {
    nb::class_<Matrix>(m, "Matrix", "Weights [num_outputs, num_inputs] in the layout the kernels read")
        .def("__init__", &construct, nb::arg("storage"), nb::arg("parts"), nb::arg("num_columns"),
             nb::arg("row_order") = nb::none(), nb::arg("column_order") = nb::none(), nb::arg("threshold") = 0.0f,
             "Pack stored rows, arrays of uint8 [rows, row_bytes], one below the other. Output o is taken from row "
             "row_order[o] of all of them, and column k is input column_order[k]. Inputs that reach the threshold, if "
             "it is not 0, are multiplied in fp32 and not in 8 bits.")
        .def_prop_ro("num_outputs", [](const Matrix& matrix) { return matrix.packed().num_outputs; })
        .def_prop_ro("num_inputs", [](const Matrix& matrix) { return matrix.packed().num_inputs; })
        .def_prop_ro("layout", [](const Matrix& matrix) { return layout_name(matrix.packed().layout); })
        .def_prop_ro(
            "group", [](const Matrix& matrix) { return matrix.packed().group; },
            "inputs that share a scale, 0 for floats")
        .def_prop_ro("nbytes", [](const Matrix& matrix) { return matrix.packed().nbytes; })
        .def("dequantized", &dequantized, "The values the kernels multiply with, float32 [num_outputs, num_inputs]");
    m.def("dequantize", &dequantize, nb::arg("storage"), nb::arg("data"), nb::arg("num_columns"),
          "The values of stored rows, uint8 [rows, row_bytes] -> float32 [rows, num_columns]");
    m.def("decode", &decode, nb::arg("storage"), nb::arg("data"), nb::arg("num_columns"),
          "The quantized values of stored rows, int8 [rows, num_columns], their scales and offsets (or None) [rows, "
          "groups], "
          "and the codebook (or None)");
    m.def("quantize", &quantize, nb::arg("storage"), nb::arg("data"), nb::arg("num_columns"), nb::arg("target"),
          "Stored rows, uint8 [rows, row_bytes] -> rows of Q8_0, Q4_1 or NF4, rounded to nearest");
    m.def("multiply", &multiply, nb::arg("matrix"), nb::arg("x"), nb::arg("num_threads") = 1,
          "x [rows, num_inputs] -> x @ matrix.T [rows, num_outputs], as a tape would compute it");
}
