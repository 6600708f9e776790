// The recurrence of RWKV 7. It is specified in scan.h.

#include "inline.h"
#include "scan.h"
#include "vec.h"

namespace quire::QUIRE_ISA {

namespace {

constexpr int kVectors = 4;  // of columns that are in registers at once

// N vectors of columns of a state. `read` and `write` take whole vectors, or the part of one at the end of a row.
template <int N, class Read, class Write>
QUIRE_INLINE void run_columns(const WkvToken& w, int64_t first, const Read& read, const Write& write) {
    Floats recalled[N], sums[N], value[N];
    QUIRE_UNROLL
    for (int j = 0; j < N; ++j) {
        recalled[j] = sums[j] = splat(0.0f);
        value[j] = read(w.value + first + j * kLanes);
    }
    const float* row = w.state + first;
    for (int64_t i = 0; i < w.key_dim; ++i, row += w.value_dim) {
        const Floats recall = splat(w.recall[i]);
        QUIRE_UNROLL
        for (int j = 0; j < N; ++j) recalled[j] = multiply_add(read(row + j * kLanes), recall, recalled[j]);
    }
    float* changed = w.state + first;
    for (int64_t i = 0; i < w.key_dim; ++i, changed += w.value_dim) {
        const Floats kept = splat(w.decay[i]), key = splat(w.key[i]), erased = splat(-w.erase[i]);
        const Floats query = splat(w.query[i]);
        QUIRE_UNROLL
        for (int j = 0; j < N; ++j) {
            Floats next = multiply_add(value[j], key, read(changed + j * kLanes) * kept);
            next = multiply_add(recalled[j], erased, next);
            write(changed + j * kLanes, next);
            sums[j] = multiply_add(next, query, sums[j]);
        }
    }
    QUIRE_UNROLL
    for (int j = 0; j < N; ++j) write(w.out + first + j * kLanes, sums[j]);
}

}  // namespace

void wkv7(const WkvToken& w) {
    const auto read = [](const float* p) QUIRE_INLINED { return load(p); };
    const auto write = [](float* p, Floats x) QUIRE_INLINED { store(p, x); };
    int64_t c = 0;
    for (; c + kVectors * kLanes <= w.value_dim; c += kVectors * kLanes) run_columns<kVectors>(w, c, read, write);
    for (; c + kLanes <= w.value_dim; c += kLanes) run_columns<1>(w, c, read, write);
    const int64_t rest = w.value_dim - c;
    if (rest)
        run_columns<1>(
            w, c, [rest](const float* p) { return load_part(p, rest); },
            [rest](float* p, Floats x) { store_part(p, x, rest); });
}

}  // namespace quire::QUIRE_ISA
