// The sum of the softmax weights of a row of logits. softmax.h specifies one weight.

#include "softmax.h"

namespace quire::QUIRE_ISA {

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;  // every supported CPU has these
#endif
constexpr int64_t kLogits = kBytes / 8;

typedef float Floats __attribute__((vector_size(kBytes / 2)));
typedef double Doubles __attribute__((vector_size(kBytes)));
typedef uint64_t Words __attribute__((vector_size(kBytes)));

QUIRE_ALWAYS_INLINE Words weights_of(const float* x, const Softmax& softmax) {
    Floats logits;
    std::memcpy(&logits, x, sizeof logits);
    return Softmax::weight_of<Doubles, Words>(softmax.distance_of(__builtin_convertvector(logits, Doubles)));
}

}  // namespace

int64_t total_weight(const float* x, int64_t n, const Softmax& softmax) {
    const Softmax local = softmax;  // in registers
    Words sum{};
    int64_t i = 0;
    for (; i + 4 * kLogits <= n; i += 4 * kLogits) {  // one dependency chain would not fill the vector pipes
        const Words a = weights_of(x + i, local), b = weights_of(x + i + kLogits, local);
        const Words c = weights_of(x + i + 2 * kLogits, local), d = weights_of(x + i + 3 * kLogits, local);
        sum += (a + b) + (c + d);
    }
    int64_t total = 0;
    for (int lane = 0; lane < kLogits; ++lane) total += int64_t(sum[lane]);
    for (; i < n; ++i) total += local.weight(x[i]);
    return total;
}

}  // namespace quire::QUIRE_ISA
