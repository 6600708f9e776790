// Norms, rope, activations and writes to pages. They are specified in ops.h.

#include "ops.h"

#include <math.h>

#include "activation.h"
#include "inline.h"
#include "int8.h"

namespace quire::QUIRE_ISA {

void attend(const AttentionTile& tile);  // attention.cpp
void attend_splits(const AttentionTile& tile, int64_t first, int64_t end, float* partials, int64_t split_stride);
void merge_splits(const AttentionTile& tile, float* partials, int64_t num_splits, int64_t split_stride);
int64_t total_weight(const float* x, int64_t n, const Softmax& softmax);                                  // softmax.cpp
int64_t find_racers(const float* x, int64_t first, int64_t end, const RaceBounds& bounds, int32_t* ids);  // race.cpp

namespace {

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
    const int64_t whole = n / kLanes * kLanes, rest = n - whole;
    Floats squares = splat(0.0f);
    for (int64_t i = 0; i < whole; i += kLanes) squares = multiply_add(load(x + i), load(x + i), squares);
    if (rest) squares = multiply_add(load_part(x + whole, rest), load_part(x + whole, rest), squares);
    const float inverse_rms = 1.0f / sqrtf(sum(squares) / float(n) + eps);
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * inverse_rms * weight[i];
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* out) {
    const int64_t whole = n / kLanes * kLanes, rest = n - whole;
    Floats sums = splat(0.0f), squares = splat(0.0f);
    for (int64_t i = 0; i < whole; i += kLanes) sums = sums + load(x + i);
    if (rest) sums = sums + load_part(x + whole, rest);
    const float mean = sum(sums) / float(n);
    for (int64_t i = 0; i < whole; i += kLanes) {
        const Floats centered = load(x + i) - splat(mean);
        squares = multiply_add(centered, centered, squares);
    }
    if (rest) {
        float centered[kLanes] = {};
        for (int64_t i = 0; i < rest; ++i) centered[i] = x[whole + i] - mean;
        squares = multiply_add(load(centered), load(centered), squares);
    }
    const float inverse_std = 1.0f / sqrtf(sum(squares) / float(n) + eps);
    for (int64_t i = 0; i < n; ++i) {
        const float normed = (x[i] - mean) * inverse_std * (weight ? weight[i] : 1.0f);
        out[i] = bias ? normed + bias[i] : normed;
    }
}

void rope_angles(int32_t position, const float* inv_freq, float scale, int64_t half, float* out) {
    for (int64_t i = 0; i < half; ++i) {
        const float angle = float(position) * inv_freq[i];
        out[i] = cosf(angle) * scale;
        out[half + i] = sinf(angle) * scale;
    }
}

void rope(float* x, const float* angles, int64_t half, int64_t num_heads, int64_t head_dim) {
    const float* __restrict cos = angles, * __restrict sin = angles + half;
    for (int64_t head = 0; head < num_heads; ++head) {
        float* __restrict low = x + head * head_dim, * __restrict high = low + half;
        for (int64_t i = 0; i < half; ++i) {
            const float a = low[i], b = high[i];
            low[i] = a * cos[i] - b * sin[i];
            high[i] = b * cos[i] + a * sin[i];
        }
    }
}

template <Activation Kind>
void activate_with(const float* x, int64_t n, float* out) {
    const int64_t whole = n / kLanes * kLanes, rest = n - whole;
    for (int64_t i = 0; i < whole; i += kLanes) store(out + i, activated<Kind>(load(x + i)));
    if (rest) store_part(out + whole, activated<Kind>(load_part(x + whole, rest)), rest);
}

template <Activation Kind>
void activate_and_mul_with(const float* x, int64_t n, float* out) {
    const float *gate = x, *up = x + n;
    const int64_t whole = n / kLanes * kLanes, rest = n - whole;
    int64_t c = 0;
    const auto take = [&](auto count) {
        Floats active[count];
        QUIRE_UNROLL
        for (int i = 0; i < count; ++i) active[i] = load(gate + c + i * kLanes);
        activate_each<Kind>(active);
        QUIRE_UNROLL
        for (int i = 0; i < count; ++i, c += kLanes) store(out + c, active[i] * factor_of<Kind>(load(up + c)));
    };
    while (c + 2 * kLanes <= whole) take(std::integral_constant<int, 2>{});
    while (c < whole) take(std::integral_constant<int, 1>{});
    if (rest)
        store_part(out + whole,
                   activated<Kind>(load_part(gate + whole, rest)) * factor_of<Kind>(load_part(up + whole, rest)), rest);
}

#define QUIRE_EACH_ACTIVATION(function)                                                                   \
    {function<Activation::Silu>,    function<Activation::Gelu>,          function<Activation::GeluTanh>,  \
     function<Activation::Relu>,    function<Activation::ReluSquared>,   function<Activation::QuickGelu>, \
     function<Activation::Tanh>,    function<Activation::ClampedSwiglu>, function<Activation::Elu>,       \
     function<Activation::Sigmoid>, function<Activation::Softplus>}

void activate(Activation kind, const float* x, int64_t n, float* out) {
    static constexpr void (*kKernels[kNumActivations])(const float*, int64_t, float*) =
        QUIRE_EACH_ACTIVATION(activate_with);
    kKernels[int(kind)](x, n, out);
}

void activate_and_mul(Activation kind, const float* x, int64_t n, float* out) {
    static constexpr void (*kKernels[kNumActivations])(const float*, int64_t, float*) =
        QUIRE_EACH_ACTIVATION(activate_and_mul_with);
    kKernels[int(kind)](x, n, out);
}

void soft_cap(float* x, float cap, int64_t n) {
    const Floats down = splat(1.0f / cap), up = splat(cap);
    const int64_t whole = n / kLanes * kLanes, rest = n - whole;
    for (int64_t i = 0; i < whole; i += kLanes) store(x + i, tanh(load(x + i) * down) * up);
    if (rest) store_part(x + whole, tanh(load_part(x + whole, rest) * down) * up, rest);
}

void scale(const float* x, float factor, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor;
}

void clamp(const float* x, float limit, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];  // NaN stays NaN
}

void add_scaled(const float* x, float factor, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] += x[i] * factor;
}

void add(const float* x, const float* y, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] + y[i];
}

void mul(const float* x, const float* y, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * y[i];
}

void causal_conv(const float* const* inputs, const float* weight, int64_t weight_stride, const float* bias,
                 int64_t taps, int64_t n, float* out) {
    const int64_t whole = n / kLanes * kLanes, rest = n - whole;
    for (int64_t i = 0; i < whole; i += kLanes) {
        Floats sums = bias ? load(bias + i) : splat(0.0f);
        for (int64_t tap = 0; tap < taps; ++tap)
            if (inputs[tap]) sums = multiply_add(load(inputs[tap] + i), load(weight + tap * weight_stride + i), sums);
        store(out + i, sums);
    }
    if (!rest) return;
    Floats sums = bias ? load_part(bias + whole, rest) : splat(0.0f);
    for (int64_t tap = 0; tap < taps; ++tap)
        if (inputs[tap])
            sums = multiply_add(load_part(inputs[tap] + whole, rest),
                                load_part(weight + tap * weight_stride + whole, rest), sums);
    store_part(out + whole, sums, rest);
}

Floats load_up_to(const float* p, int64_t n) { return n == kLanes ? load(p) : load_part(p, n); }

// Writes k [count, head_dim] into keys [head_dim, block_size], from column `offset` on: a vector of tokens at a time.
template <class T>
void write_keys(const float* k, int64_t stride, int64_t count, int64_t head_dim, int64_t block_size, int64_t offset,
                T* keys) {
    for (int64_t d = 0; d < head_dim; d += kLanes) {
        const int64_t n = head_dim - d < kLanes ? head_dim - d : kLanes;
        T* to = keys + d * block_size + offset;
        int64_t token = 0;
        for (; token + kLanes <= count; token += kLanes) {
            Floats rows[kLanes];
            for (int i = 0; i < kLanes; ++i) rows[i] = load_up_to(k + (token + i) * stride + d, n);
            float columns[kLanes * kLanes];
            store_columns(columns, rows);
            for (int64_t i = 0; i < n; ++i) store(to + i * block_size + token, load(columns + kLanes * i));
        }
        for (; token < count; ++token) {
            T column[kLanes];
            store(column, load_part(k + token * stride + d, n));
            for (int64_t i = 0; i < n; ++i) to[i * block_size + token] = column[i];
        }
    }
}

// Quantizes x [head_dim] to int8 [columns]. Returns the scale.
float quantize_head(const float* x, int64_t head_dim, int64_t columns, int8_t* quants) {
    float padded[kMaxInt8Depth];
    memcpy(padded, x, head_dim * sizeof(float));
    for (int64_t d = head_dim; d < columns; ++d) padded[d] = 0.0f;
    const Int8Scale scale(magnitude_of(padded, columns), kInt8Max);
    for (int64_t d = 0; d < columns; d += kLanes)
        store_quants(quants + d, scale.zero() ? splat(0.0f) : load(padded + d) * splat(scale.inverse));
    return scale.scale;
}

// Writes one token and head. If the key or the value has an Inf or NaN, both scales are NaN: otherwise a NaN weight
// could be lost.
void write_head(const Pages& pages, const float* k, const float* v, int64_t offset, uint8_t* keys, uint8_t* values) {
    const int64_t columns = pages.stored_columns();
    int8_t quants[kMaxInt8Depth];
    const float key_scale = quantize_head(k, pages.head_dim, columns, quants);
    for (int64_t d = 0; d < columns; d += 4) memcpy(keys + d * pages.block_size + 4 * offset, quants + d, 4);
    const float value_scale = quantize_head(v, pages.head_dim, columns, quants);
    int8_t* to = (int8_t*)values + offset / 4 * 4 * columns + offset % 4;
    for (int64_t d = 0; d < columns; ++d) to[4 * d] = quants[d];
    const float nan_or_zero = (key_scale - key_scale) + (value_scale - value_scale);  // 0 or NaN
    pages.scales(keys)[offset] = key_scale + nan_or_zero;
    pages.scales(values)[offset] = value_scale + nan_or_zero;
}

template <class T>
void write_columns(const float* x, int64_t n, T* to) {
    for (int64_t d = 0; d < n; d += kLanes) {
        const int64_t count = n - d < kLanes ? n - d : kLanes;
        if (count == kLanes)
            store(to + d, load(x + d));
        else
            store_part(to + d, load_part(x + d, count), count);
    }
}

void write_kv(const Pages& pages, int64_t layer, int32_t slot, int64_t count, const float* k, int64_t k_stride,
              const float* v, int64_t v_stride) {
    const int64_t block = slot / pages.block_size, offset = slot % pages.block_size, head_dim = pages.head_dim;
    for (int64_t head = 0; head < pages.num_kv_heads; ++head, k += head_dim, v += head_dim) {
        uint8_t *keys = pages.keys(block, layer, head), *values = pages.values(block, layer, head);
        const auto as = [&](auto* type) {
            write_keys(k, k_stride, count, head_dim, pages.block_size, offset, decltype(type)(keys));
            for (int64_t i = 0; i < count; ++i)
                write_columns(v + i * v_stride, head_dim, decltype(type)(values) + (offset + i) * head_dim);
        };
        switch (pages.type) {
            case PageType::Float16: as((Fp16*)nullptr); break;
            case PageType::Bfloat16: as((Bf16*)nullptr); break;
            case PageType::Float32: as((float*)nullptr); break;
            case PageType::Int8:
                for (int64_t i = 0; i < count; ++i)
                    write_head(pages, k + i * k_stride, v + i * v_stride, offset + i, keys, values);
        }
    }
}

void write_latent(const Pages& pages, int64_t layer, int32_t slot, const float* latent, const float* k_rope) {
    uint8_t* block = pages.keys(slot / pages.block_size, layer, 0);
    const auto as = [&](auto* type) {
        auto* row = decltype(type)(block) + slot % pages.block_size * pages.head_dim;
        write_columns(latent, pages.latent, row);
        write_columns(k_rope, pages.head_dim - pages.latent, row + pages.latent);
    };
    switch (pages.type) {
        case PageType::Float16: as((Fp16*)nullptr); break;
        case PageType::Bfloat16: as((Bf16*)nullptr); break;
        case PageType::Float32: as((float*)nullptr); break;
        case PageType::Int8: break;  // latent pages are floats
    }
}

}  // namespace

extern const OpKernels op_kernels;
const OpKernels op_kernels = {
    rms_norm,     layer_norm, rope_angles,   rope,         activate,     activate_and_mul, add,
    mul,          scale,      clamp,         add_scaled,   soft_cap,     causal_conv,      write_kv,
    write_latent, attend,     attend_splits, merge_splits, total_weight, find_racers,
};

}  // namespace quire::QUIRE_ISA
