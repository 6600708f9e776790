// The pooling of compressed attention. It is specified in compress.h.

#include "compress.h"

#include "activation.h"
#include "inline.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

namespace {

template <class T>
void pool_columns(const uint8_t* const* vectors, const uint8_t* const* gates, const float* const* biases, int64_t count,
                  int64_t n, float* out) {
    for (int64_t d = 0; d < n; d += kLanes) {
        const int64_t width = n - d < kLanes ? n - d : kLanes;
        const auto part = [&](const auto* from) {
            return width == kLanes ? load(from + d) : load_part(from + d, width);
        };
        const auto gate = [&](int64_t i) { return part((const T*)gates[i]) + part(biases[i]); };
        Floats most = gate(0), total = splat(0.0f), sum = splat(0.0f);
        for (int64_t i = 1; i < count; ++i) most = max(most, gate(i));
        for (int64_t i = 0; i < count; ++i) {
            const Floats weight = exp(gate(i) - most);
            total = total + weight;
            sum = multiply_add(weight, part((const T*)vectors[i]), sum);
        }
        store_part(out + d, sum / total, width);
    }
}

void pool(PageType type, const uint8_t* const* vectors, const uint8_t* const* gates, const float* const* biases,
          int64_t count, int64_t n, float* out) {
    switch (type) {
        case PageType::Float16: return pool_columns<Fp16>(vectors, gates, biases, count, n, out);
        case PageType::Bfloat16: return pool_columns<Bf16>(vectors, gates, biases, count, n, out);
        case PageType::Float32: return pool_columns<float>(vectors, gates, biases, count, n, out);
        case PageType::Int8: return;  // what is pooled is floats
    }
}

}  // namespace

extern const CompressKernels compress_kernels;
const CompressKernels compress_kernels = {pool};

}  // namespace quire::QUIRE_ISA
