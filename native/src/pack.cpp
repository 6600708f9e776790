#include "pack.h"

#include <algorithm>
#include <cassert>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "fp16.h"

#ifdef __linux__
#include <sys/mman.h>
#endif
#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace quire {

namespace {

// The narrowest layout for the quantized values of this type.
Layout integer_layout(const StorageInfo& info) {
    const int count = info.max_quant - info.min_quant + 1;
    if (info.codebook != Codebook::None) return count <= 8 ? Layout::Codebook3 : Layout::Codebook4;
    if (count <= 4) return Layout::Int2;
    if (count <= 8) return Layout::Int3;
    if (count <= 16) return Layout::Int4;
    if (count <= 32) return Layout::Int5;
    return count <= 64 ? Layout::Int6 : Layout::Int8;
}

int bits_of(Layout layout) {
    switch (layout) {
        case Layout::Int2: return 2;
        case Layout::Int3:
        case Layout::Codebook3: return 3;
        case Layout::Int4:
        case Layout::Codebook4: return 4;
        case Layout::Int5: return 5;
        case Layout::Int6: return 6;
        case Layout::Int8: return 8;
        case Layout::Float16:
        case Layout::BFloat16: return 16;
        case Layout::Float32: return 32;
    }
    return 0;
}

constexpr int kPlaneRow = 4 * kTileOutputs;  // bytes

// Offsets in one block of one tile of an integer layout.
struct BlockShape {
    int bits, parts, runs;  // parts: groups in a run of 32 inputs; runs: of a block
    int super_scale_bytes, scale_bytes, scales, offsets, quants, run_bytes, bytes;

    explicit BlockShape(const PackedMatrix& m) {
        const bool two_level = has_two_levels(m.scale_type);
        bits = bits_of(m.layout);
        parts = kGroupInputs / m.group;
        runs = two_level ? kBlockInputs / kGroupInputs : 1;
        scale_bytes = two_level ? 1 : m.scale_type == ScaleType::Float32 ? 4 : 2;
        super_scale_bytes = !two_level ? 0 : m.scale_type == ScaleType::WideTwoLevel ? 4 : 2;
        scales = (m.has_offset ? 2 : 1) * super_scale_bytes * kTileOutputs;
        offsets = scales + runs * parts * kTileOutputs * scale_bytes;
        quants = m.has_offset ? 2 * offsets - scales : offsets;
        run_bytes = bits * kPlaneRow;
        bytes = quants + runs * run_bytes;
    }

    // Offset of the super-scale of an output. The super-offsets follow the super-scales.
    int super_scale(int output, bool of_offset = false) const {
        return super_scale_bytes * (kTileOutputs * of_offset + output);
    }
    // Offset of the scale of a group and an output, from `scales` or `offsets`.
    int scale_offset(int group, int output) const { return (group * kTileOutputs + output) * scale_bytes; }
    int low_bits() const { return bits == 8 ? 8 : bits >= 4 ? 4 : 2; }
};

int64_t element_bytes(Layout layout) { return bits_of(layout) / 8; }

bool is_float8(Storage storage) {
    return storage == Storage::F8_E4M3 || storage == Storage::F8_E5M2 || storage == Storage::FP8;
}

PackedMatrix shape_of(Storage storage, int64_t num_outputs, int64_t num_inputs) {
    const StorageInfo& info = storage_info(storage);
    PackedMatrix m{};
    m.num_outputs = num_outputs;
    m.num_inputs = num_inputs;
    int64_t tile_bytes;
    if (info.group == 0) {
        m.layout = Layout::Float32;
        if (storage == Storage::F16) m.layout = Layout::Float16;
        if (storage == Storage::BF16 || is_float8(storage)) m.layout = Layout::BFloat16;
        tile_bytes = num_inputs * kTileOutputs * element_bytes(m.layout);
    } else {
        m.layout = integer_layout(info);
        m.zero = bits_of(m.layout) < 8 ? -info.min_quant : 0;
        m.codebook = info.codebook;
        m.group = info.group;
        m.scale_type = info.scale_type;
        m.has_offset = info.has_offset;
        const BlockShape block(m);
        tile_bytes = num_inputs / (block.runs * kGroupInputs) * block.bytes;
    }
    m.nbytes = size_t(m.num_tiles() * tile_bytes);
    return m;
}

void store_fp16(uint8_t* to, float value) {
    const uint16_t bits = exact_fp16(value);
    std::memcpy(to, &bits, 2);
}

float fp16_at(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    return fp16_to_float(bits);
}

float float_at(const uint8_t* from) {
    float value;
    std::memcpy(&value, from, 4);
    return value;
}

void store_scale(uint8_t* to, ScaleType type, float value, int8_t count) {
    if (has_two_levels(type)) {
        *to = uint8_t(count);
    } else if (type == ScaleType::Float32) {
        std::memcpy(to, &value, 4);
    } else if (type == ScaleType::BFloat16) {
        const uint16_t bits = uint16_t(bits_of_float(value) >> 16);
        std::memcpy(to, &bits, 2);
    } else {
        store_fp16(to, value);
    }
}

void store_super_scale(uint8_t* to, ScaleType type, float value) {
    if (type == ScaleType::WideTwoLevel)
        std::memcpy(to, &value, 4);
    else
        store_fp16(to, value);
}

// `super_scale` is used if scales have two levels.
float load_scale(const uint8_t* from, ScaleType type, const uint8_t* super_scale) {
    if (type == ScaleType::TwoLevel) return fp16_at(super_scale) * float(int8_t(*from));
    if (type == ScaleType::WideTwoLevel) return float_at(super_scale) * float(int8_t(*from));
    if (type == ScaleType::Float32) return float_at(from);
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    return type == ScaleType::BFloat16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

// Stores `Bits` bits of each value of 8 quads, from bit `first` on, as a plane.
template <int Bits>
void store_plane(const uint32_t (&quads)[8], int first, uint8_t* to) {
    constexpr uint32_t kMask = 0x01010101u * ((1u << Bits) - 1);
    for (int row = 0; row < Bits; ++row) {
        uint32_t joined = 0;
        for (int i = 0; i < 8 / Bits; ++i) joined |= (quads[row + i * Bits] >> first & kMask) << (i * Bits);
        std::memcpy(to + row * kPlaneRow, &joined, 4);
    }
}

// Stores the quantized values of a run of 32 inputs of one output. `to`: the output's bytes in the first plane.
void store_quants(const PackedMatrix& m, int bits, const int8_t* quants, uint8_t* to) {
    const uint32_t mask = 0x01010101u * ((1u << bits) - 1), zeros = 0x01010101u * uint32_t(m.zero);
    uint32_t quads[8];  // a value in each byte: its low bits, to which zero is added
    std::memcpy(quads, quants, sizeof quads);
    for (uint32_t& quad : quads) quad = ((quad & mask) + zeros) & mask;
    switch (bits) {
        case 2: return store_plane<2>(quads, 0, to);
        case 3: return store_plane<2>(quads, 0, to), store_plane<1>(quads, 2, to + 2 * kPlaneRow);
        case 4: return store_plane<4>(quads, 0, to);
        case 5: return store_plane<4>(quads, 0, to), store_plane<1>(quads, 4, to + 4 * kPlaneRow);
        case 6: return store_plane<4>(quads, 0, to), store_plane<2>(quads, 4, to + 4 * kPlaneRow);
        default: return store_plane<8>(quads, 0, to);
    }
}

// The quantized value of input i of a run.
int load_quant(const PackedMatrix& m, const BlockShape& at, const uint8_t* quants, int i) {
    const auto load_bits = [&](const uint8_t* plane, int bits) {
        const int quad = i / 4;
        return plane[quad % bits * kPlaneRow + i % 4] >> (quad / bits * bits) & ((1 << bits) - 1);
    };
    const int low = at.low_bits(), high = at.bits - low;
    const int stored = load_bits(quants, low) | (high ? load_bits(quants + low * kPlaneRow, high) << low : 0);
    if (m.layout == Layout::Int8) return int8_t(stored);
    return m.codebook != Codebook::None ? kCodebooks[int(m.codebook)][stored] : stored - m.zero;
}

// Whether a stored block has the bytes of a packed block in the same order: scale, offset, quantized values.
bool lies_as_packed(Storage storage) {
    return storage == Storage::Q4_0 || storage == Storage::Q4_1 || storage == Storage::IQ4_NL ||
           storage == Storage::Q8_0;
}

// pack_integer_tile for a type that lies_as_packed: three to five times as fast. `Bits` of a quantized value.
template <int Bits>
void copy_blocks(const PackedMatrix& m, const uint8_t* const* rows, uint8_t* tile) {
    const BlockShape at(m);
    const int begin = m.has_offset ? 4 : 2, block_bytes = begin + Bits * 4;
    for (int64_t b = 0; b < m.num_inputs / kGroupInputs; ++b, tile += at.bytes) {
        for (int o = 0; o < kTileOutputs && rows[o]; ++o) {
            const uint8_t* block = rows[o] + b * block_bytes;
            std::memcpy(tile + at.scales + 2 * o, block, 2);
            if (m.has_offset) std::memcpy(tile + at.offsets + 2 * o, block + 2, 2);
            for (int i = 0; i < Bits; ++i)
                std::memcpy(tile + at.quants + i * kPlaneRow + 4 * o, block + begin + 4 * i, 4);
        }
    }
}

// `rows` are the stored rows of the tile's outputs, null past the last one; `tile` starts as zeros.
void pack_integer_tile(Storage storage, const PackedMatrix& m, const uint8_t* const* rows, uint8_t* tile) {
    const StorageInfo& info = storage_info(storage);
    if (lies_as_packed(storage))
        return m.layout == Layout::Int8 ? copy_blocks<8>(m, rows, tile) : copy_blocks<4>(m, rows, tile);
    const DecodeBlock decode = block_decoder(storage);
    const BlockShape at(m);
    const int runs = info.block / kGroupInputs;  // of a stored block, which may be several packed blocks
    DecodedBlock stored{};
    for (int64_t b = 0; b < m.num_inputs / info.block; ++b, tile += runs / at.runs * at.bytes) {
        for (int o = 0; o < kTileOutputs && rows[o]; ++o) {
            decode(rows[o] + b * info.block_bytes, stored);
            if (has_two_levels(m.scale_type)) {
                store_super_scale(tile + at.super_scale(o), m.scale_type, stored.super_scale);
                if (m.has_offset) store_super_scale(tile + at.super_scale(o, true), m.scale_type, stored.super_offset);
            }
            for (int g = 0; g < runs * at.parts; ++g) {
                uint8_t* block = tile + g / at.parts / at.runs * at.bytes;
                const int scale_offset = at.scale_offset(g % (at.runs * at.parts), o);
                store_scale(block + at.scales + scale_offset, m.scale_type, stored.scales[g], stored.sub_scales[g]);
                if (m.has_offset)
                    store_scale(block + at.offsets + scale_offset, m.scale_type, stored.offsets[g],
                                stored.sub_offsets[g]);
            }
            for (int run = 0; run < runs; ++run)
                store_quants(m, at.bits, stored.quants + run * kGroupInputs,
                             tile + run / at.runs * at.bytes + at.quants + run % at.runs * at.run_bytes + 4 * o);
        }
    }
}

template <class Element>
void pack_float_tile(const PackedMatrix& m, const uint8_t* const* rows, uint8_t* tile) {
    constexpr int64_t kRun = 64;  // inputs: a cache line or two of each row, so that the tile's memory stays in L1
    for (int64_t first = 0; first < m.num_inputs; first += kRun) {
        const int64_t last = first + kRun < m.num_inputs ? first + kRun : m.num_inputs;
        for (int o = 0; o < kTileOutputs && rows[o]; ++o)
            for (int64_t k = first; k < last; ++k)
                std::memcpy(tile + (k * kTileOutputs + o) * sizeof(Element), rows[o] + k * sizeof(Element),
                            sizeof(Element));
    }
}

#if defined(__SSE2__)
using Eight = __m128i;
Eight load_eight(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const Eight*>(from)); }
void store_eight(uint8_t* to, Eight x) { _mm_storeu_si128(reinterpret_cast<Eight*>(to), x); }
Eight zip_first(Eight a, Eight b) { return _mm_unpacklo_epi16(a, b); }
Eight zip_last(Eight a, Eight b) { return _mm_unpackhi_epi16(a, b); }
#elif defined(__ARM_NEON)
using Eight = uint16x8_t;
Eight load_eight(const uint8_t* from) { return vreinterpretq_u16_u8(vld1q_u8(from)); }
void store_eight(uint8_t* to, Eight x) { vst1q_u8(to, vreinterpretq_u8_u16(x)); }
Eight zip_first(Eight a, Eight b) { return vzip1q_u16(a, b); }
Eight zip_last(Eight a, Eight b) { return vzip2q_u16(a, b); }
#else
struct Eight {
    uint16_t at[8];
};
Eight load_eight(const uint8_t* from) {
    Eight x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
void store_eight(uint8_t* to, const Eight& x) { std::memcpy(to, &x, sizeof x); }
Eight zip_first(const Eight& a, const Eight& b) {
    return {{a.at[0], b.at[0], a.at[1], b.at[1], a.at[2], b.at[2], a.at[3], b.at[3]}};
}
Eight zip_last(const Eight& a, const Eight& b) {
    return {{a.at[4], b.at[4], a.at[5], b.at[5], a.at[6], b.at[6], a.at[7], b.at[7]}};
}
#endif

// Transposes 8 x 8 elements of 16 bits: rows 0 and 4, 1 and 5 .. are zipped, three times.
void transpose(Eight (&x)[8]) {
    for (int step = 0; step < 3; ++step) {
        Eight y[8];
        for (int i = 0; i < 4; ++i) {
            y[2 * i] = zip_first(x[i], x[i + 4]);
            y[2 * i + 1] = zip_last(x[i], x[i + 4]);
        }
        std::copy(y, y + 8, x);
    }
}

// pack_float_tile<uint16_t> for a whole tile of a multiple of eight inputs: as fast as a copy.
void pack_16bit_tile(const PackedMatrix& m, const uint8_t* const* rows, uint8_t* tile) {
    static_assert(kTileOutputs % 8 == 0);
    constexpr int64_t kRun =
        32;  // inputs: a cache line of each of eight rows, whose lines often map to the same set of L1
    for (int64_t first = 0; first < m.num_inputs; first += kRun) {
        const int64_t last = first + kRun < m.num_inputs ? first + kRun : m.num_inputs;
        for (int o = 0; o < kTileOutputs; o += 8) {
            for (int64_t k = first; k < last; k += 8) {
                Eight x[8];
                for (int i = 0; i < 8; ++i) x[i] = load_eight(rows[o + i] + 2 * k);
                transpose(x);
                for (int i = 0; i < 8; ++i) store_eight(tile + 2 * ((k + i) * kTileOutputs + o), x[i]);
            }
        }
    }
}

// To the nearest bf16, ties to even.
uint16_t round_to_bf16(float value) {
    const uint32_t bits = bits_of_float(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);  // NaN
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void pack_float8_tile(Storage storage, const PackedMatrix& m, const uint8_t* const* rows, uint8_t* tile) {
    std::vector<float> values(size_t(m.num_inputs));
    for (int o = 0; o < kTileOutputs && rows[o]; ++o) {
        dequantize_row(storage, rows[o], values.data(), m.num_inputs);
        for (int64_t k = 0; k < m.num_inputs; ++k) {
            const uint16_t bits = round_to_bf16(values[size_t(k)]);
            std::memcpy(tile + (k * kTileOutputs + o) * 2, &bits, 2);
        }
    }
}

// The largest magnitude of n fp16 values, as bits.
uint16_t largest_fp16(const uint8_t* values, int64_t n) {
    uint16_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        uint16_t bits;
        std::memcpy(&bits, values + 2 * i, 2);
        bits &= 0x7fff;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

constexpr int64_t kLargePage = 2 << 20;
constexpr int64_t kShared = 4 * kLargePage;  // bounds the memory that one remaining LoRA adapter keeps allocated

std::shared_ptr<uint8_t> large_pages(int64_t nbytes) {
    const size_t rounded = size_t((nbytes + kLargePage - 1) / kLargePage * kLargePage);
    void* memory = std::aligned_alloc(size_t(kLargePage), rounded);
    if (!memory) throw std::bad_alloc();
#ifdef __linux__
    madvise(memory, size_t(nbytes / kLargePage * kLargePage), MADV_HUGEPAGE);
#endif
    return {static_cast<uint8_t*>(memory), std::free};
}

// Allocates on huge pages, if the system has them: a matrix is read again for every token, with fewer TLB misses. Small
// matrices share huge pages, which are freed with the last of these matrices.
std::shared_ptr<uint8_t> allocate(int64_t nbytes) {
    if (nbytes >= 2 * kLargePage) return large_pages(nbytes);
    static std::mutex mutex;
    static std::weak_ptr<uint8_t> shared;
    static int64_t used = 0;
    const std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<uint8_t> pages = shared.lock();
    if (!pages || used + nbytes > kShared) {
        shared = pages = large_pages(kShared);
        used = 0;
    }
    uint8_t* data = pages.get() + used;
    used += (nbytes + 63) / 64 * 64;
    return {pages, data};
}

}  // namespace

Matrix::Matrix(Storage storage, const std::vector<const uint8_t*>& rows, int64_t num_inputs, const int32_t* input_order,
               float threshold)
    : packed_(shape_of(storage, int64_t(rows.size()), num_inputs)) {
    const int64_t num_outputs = packed_.num_outputs;
    assert(num_outputs > 0 && num_inputs > 0 && num_inputs % storage_info(storage).block == 0);
    assert(threshold == 0 || packed_.has_columns());
    packed_.threshold = threshold;
    if (input_order) {
        input_order_.assign(input_order, input_order + num_inputs);
        packed_.input_order = input_order_.data();
    }
    memory_ = allocate(int64_t(packed_.nbytes));
    uint8_t* data = memory_.get();
    packed_.data = data;
    const int64_t tile_bytes = packed_.tile_bytes();
    bool fp16_sums = packed_.layout == Layout::Float16;
#pragma omp parallel for schedule(dynamic, 4) reduction(&& : fp16_sums)  // in the order of reads from disk
    for (int64_t t = 0; t < packed_.num_tiles(); ++t) {
        const uint8_t* tile_rows[kTileOutputs] = {};
        for (int64_t o = t * kTileOutputs; o < num_outputs && o < (t + 1) * kTileOutputs; ++o)
            tile_rows[o % kTileOutputs] = rows[size_t(o)];
        uint8_t* tile = data + t * tile_bytes;
        if (!tile_rows[kTileOutputs - 1]) std::memset(tile, 0, size_t(tile_bytes));
        if (packed_.is_integer())
            pack_integer_tile(storage, packed_, tile_rows, tile);
        else if (is_float8(storage))
            pack_float8_tile(storage, packed_, tile_rows, tile);
        else if (packed_.layout == Layout::Float32)
            pack_float_tile<uint32_t>(packed_, tile_rows, tile);
        else if (tile_rows[kTileOutputs - 1] && num_inputs % 8 == 0)
            pack_16bit_tile(packed_, tile_rows, tile);
        else
            pack_float_tile<uint16_t>(packed_, tile_rows, tile);
        if (packed_.layout == Layout::Float16)
            fp16_sums = fp16_sums && largest_fp16(tile, tile_bytes / 2) < kFp16SumLimit;
    }
    packed_.fp16_sums = fp16_sums;
}

void unpack_row(const PackedMatrix& m, int64_t output, float* out) {
    assert(output >= 0 && output < m.num_outputs);
    const uint8_t* tile = m.data + output / kTileOutputs * m.tile_bytes();
    const int o = int(output % kTileOutputs);
    const auto input = [&](int64_t column) { return m.input_order ? int64_t(m.input_order[column]) : column; };
    if (!m.is_integer()) {
        for (int64_t k = 0; k < m.num_inputs; ++k) {
            const uint8_t* element = tile + (k * kTileOutputs + o) * element_bytes(m.layout);
            if (m.layout == Layout::Float32) {
                std::memcpy(out + input(k), element, 4);
            } else {
                uint16_t bits;
                std::memcpy(&bits, element, 2);
                out[input(k)] = m.layout == Layout::Float16 ? fp16_to_float(bits) : bf16_to_float(bits);
            }
        }
        return;
    }
    const BlockShape at(m);
    for (int64_t first = 0; first < m.num_inputs; first += at.runs * kGroupInputs, tile += at.bytes) {
        for (int i = 0; i < at.runs * kGroupInputs; ++i) {
            const int scale_offset = at.scale_offset(i / m.group, o);
            const float scale = load_scale(tile + at.scales + scale_offset, m.scale_type, tile + at.super_scale(o));
            const uint8_t* quants = tile + at.quants + i / kGroupInputs * at.run_bytes + 4 * o;
            const float value = scale * float(load_quant(m, at, quants, i % kGroupInputs));
            float& to = out[input(first + i)];
            to = value;
            if (!m.has_offset) continue;
            const float offset =
                load_scale(tile + at.offsets + scale_offset, m.scale_type, tile + at.super_scale(o, true));
            to = value + (m.scale_type == ScaleType::ZeroPoint ? scale * offset : offset);
        }
    }
}

}  // namespace quire
