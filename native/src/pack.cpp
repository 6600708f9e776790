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

// The narrowest layout for codes of this type.
Layout integer_layout(const StorageInfo& info) {
    const int count = info.max_code - info.min_code + 1;
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

// Where things lie in one block of one tile of an integer layout.
struct BlockShape {
    int bits, parts, runs;  // parts: groups in a run of 32 inputs
    int unit_bytes, scale_bytes, scales, offsets, codes, run_bytes, bytes;

    explicit BlockShape(const PackedMatrix& m) {
        const bool two_level = has_two_levels(m.scale_type);
        bits = bits_of(m.layout);
        parts = kGroupInputs / m.group;
        runs = two_level ? kBlockInputs / kGroupInputs : 1;
        scale_bytes = two_level ? 1 : m.scale_type == ScaleType::Float32 ? 4 : 2;
        unit_bytes = !two_level ? 0 : m.scale_type == ScaleType::WideTwoLevel ? 4 : 2;
        scales = (m.has_offset ? 2 : 1) * unit_bytes * kTileOutputs;
        offsets = scales + runs * parts * kTileOutputs * scale_bytes;
        codes = m.has_offset ? 2 * offsets - scales : offsets;
        run_bytes = bits * kPlaneRow;
        bytes = codes + runs * run_bytes;
    }

    // Of an output, from the beginning; those of offsets follow.
    int unit(int output, bool of_offset = false) const { return unit_bytes * (kTileOutputs * of_offset + output); }
    // Of a group and an output, from `scales` or `offsets`.
    int place(int group, int output) const { return (group * kTileOutputs + output) * scale_bytes; }
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
        m.zero = bits_of(m.layout) < 8 ? -info.min_code : 0;
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

void store_half(uint8_t* to, float value) {
    const uint16_t bits = exact_half(value);
    std::memcpy(to, &bits, 2);
}

float half_at(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    return half_to_float(bits);
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
        store_half(to, value);
    }
}

void store_unit(uint8_t* to, ScaleType type, float value) {
    if (type == ScaleType::WideTwoLevel)
        std::memcpy(to, &value, 4);
    else
        store_half(to, value);
}

// `unit` is the one of two levels.
float load_scale(const uint8_t* from, ScaleType type, const uint8_t* unit) {
    if (type == ScaleType::TwoLevel) return half_at(unit) * float(int8_t(*from));
    if (type == ScaleType::WideTwoLevel) return float_at(unit) * float(int8_t(*from));
    if (type == ScaleType::Float32) return float_at(from);
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    return type == ScaleType::BFloat16 ? bfloat_to_float(bits) : half_to_float(bits);
}

// `Bits` bits of each code of 8 quads, from bit `first` on, as a plane has them.
template <int Bits>
void store_plane(const uint32_t (&quads)[8], int first, uint8_t* to) {
    constexpr uint32_t kMask = 0x01010101u * ((1u << Bits) - 1);
    for (int row = 0; row < Bits; ++row) {
        uint32_t joined = 0;
        for (int i = 0; i < 8 / Bits; ++i) joined |= (quads[row + i * Bits] >> first & kMask) << (i * Bits);
        std::memcpy(to + row * kPlaneRow, &joined, 4);
    }
}

// The codes of a run of 32 inputs of one output. `to` is the output's place in the first plane.
void store_codes(const PackedMatrix& m, int bits, const int8_t* codes, uint8_t* to) {
    const uint32_t mask = 0x01010101u * ((1u << bits) - 1), zeros = 0x01010101u * uint32_t(m.zero);
    uint32_t quads[8];  // a code in each byte, and room for the sum of its last bits and zero
    std::memcpy(quads, codes, sizeof quads);
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

// What planes have of input i of a run, and what that means.
int load_code(const PackedMatrix& m, const BlockShape& at, const uint8_t* codes, int i) {
    const auto load_bits = [&](const uint8_t* plane, int bits) {
        const int quad = i / 4;
        return plane[quad % bits * kPlaneRow + i % 4] >> (quad / bits * bits) & ((1 << bits) - 1);
    };
    const int low = at.low_bits(), high = at.bits - low;
    const int stored = load_bits(codes, low) | (high ? load_bits(codes + low * kPlaneRow, high) << low : 0);
    if (m.layout == Layout::Int8) return int8_t(stored);
    return m.codebook != Codebook::None ? kCodebooks[int(m.codebook)][stored] : stored - m.zero;
}

// Whether blocks consist of what a packed block has of an output, in the same order: scale, offset, codes.
bool lies_as_packed(Storage storage) {
    return storage == Storage::Q4_0 || storage == Storage::Q4_1 || storage == Storage::IQ4_NL ||
           storage == Storage::Q8_0;
}

// What pack_integer_tile does for a type that lies as packed: three to five times as fast. `Bits` of a code.
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
                std::memcpy(tile + at.codes + i * kPlaneRow + 4 * o, block + begin + 4 * i, 4);
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
    const int runs = info.block / kGroupInputs;  // of a stored block: those of one packed block, or of several
    DecodedBlock stored{};
    for (int64_t b = 0; b < m.num_inputs / info.block; ++b, tile += runs / at.runs * at.bytes) {
        for (int o = 0; o < kTileOutputs && rows[o]; ++o) {
            decode(rows[o] + b * info.block_bytes, stored);
            if (has_two_levels(m.scale_type)) {
                store_unit(tile + at.unit(o), m.scale_type, stored.unit);
                if (m.has_offset) store_unit(tile + at.unit(o, true), m.scale_type, stored.offset_unit);
            }
            for (int g = 0; g < runs * at.parts; ++g) {
                uint8_t* block = tile + g / at.parts / at.runs * at.bytes;
                const int place = at.place(g % (at.runs * at.parts), o);
                store_scale(block + at.scales + place, m.scale_type, stored.scales[g], stored.counts[g]);
                if (m.has_offset)
                    store_scale(block + at.offsets + place, m.scale_type, stored.offsets[g], stored.offset_counts[g]);
            }
            for (int run = 0; run < runs; ++run)
                store_codes(m, at.bits, stored.codes + run * kGroupInputs,
                            tile + run / at.runs * at.bytes + at.codes + run % at.runs * at.run_bytes + 4 * o);
        }
    }
}

template <class Element>
void pack_float_tile(const PackedMatrix& m, const uint8_t* const* rows, uint8_t* tile) {
    constexpr int64_t kRun = 64;  // inputs: a cache line or two of each row, against the tile's memory in L1
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

// Of eight rows of eight elements of 16 bits, the columns: elements of rows 0 and 4, 1 and 5 .. take turns, three
// times.
void turn(Eight (&x)[8]) {
    for (int step = 0; step < 3; ++step) {
        Eight y[8];
        for (int i = 0; i < 4; ++i) {
            y[2 * i] = zip_first(x[i], x[i + 4]);
            y[2 * i + 1] = zip_last(x[i], x[i + 4]);
        }
        std::copy(y, y + 8, x);
    }
}

// What pack_float_tile<uint16_t> does, for a whole tile of a multiple of eight inputs: as fast as copying them.
void pack_halves_tile(const PackedMatrix& m, const uint8_t* const* rows, uint8_t* tile) {
    static_assert(kTileOutputs % 8 == 0);
    constexpr int64_t kRun = 32;  // inputs: a cache line of eight rows, whose lines often fall on the same places of L1
    for (int64_t first = 0; first < m.num_inputs; first += kRun) {
        const int64_t last = first + kRun < m.num_inputs ? first + kRun : m.num_inputs;
        for (int o = 0; o < kTileOutputs; o += 8) {
            for (int64_t k = first; k < last; k += 8) {
                Eight x[8];
                for (int i = 0; i < 8; ++i) x[i] = load_eight(rows[o + i] + 2 * k);
                turn(x);
                for (int i = 0; i < 8; ++i) store_eight(tile + 2 * ((k + i) * kTileOutputs + o), x[i]);
            }
        }
    }
}

// Rounded to the nearest, ties to even.
uint16_t rounded_bfloat(float value) {
    const uint32_t bits = bits_of_float(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);  // NaN
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void pack_float8_tile(Storage storage, const PackedMatrix& m, const uint8_t* const* rows, uint8_t* tile) {
    std::vector<float> values(size_t(m.num_inputs));
    for (int o = 0; o < kTileOutputs && rows[o]; ++o) {
        dequantize_row(storage, rows[o], values.data(), m.num_inputs);
        for (int64_t k = 0; k < m.num_inputs; ++k) {
            const uint16_t bits = rounded_bfloat(values[size_t(k)]);
            std::memcpy(tile + (k * kTileOutputs + o) * 2, &bits, 2);
        }
    }
}

// The largest magnitude of n halves, as bits.
uint16_t largest_half(const uint8_t* halves, int64_t n) {
    uint16_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        uint16_t bits;
        std::memcpy(&bits, halves + 2 * i, 2);
        bits &= 0x7fff;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

constexpr int64_t kLargePage = 2 << 20;
constexpr int64_t kShared = 4 * kLargePage;  // an adapter that stays keeps no more than these from those that went

std::shared_ptr<uint8_t> large_pages(int64_t nbytes) {
    const size_t rounded = size_t((nbytes + kLargePage - 1) / kLargePage * kLargePage);
    void* memory = std::aligned_alloc(size_t(kLargePage), rounded);
    if (!memory) throw std::bad_alloc();
#ifdef __linux__
    madvise(memory, size_t(nbytes / kLargePage * kLargePage), MADV_HUGEPAGE);
#endif
    return {static_cast<uint8_t*>(memory), std::free};
}

// On large pages, where the system has them for who asks: a matrix is written, and read again for every token, with
// fewer of them to look up. Small matrices share some, which are given back with the last of them.
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
    bool half_sums = packed_.layout == Layout::Float16;
#pragma omp parallel for schedule(dynamic, 4) reduction(&& : half_sums)  // in the order they come from the disk
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
            pack_halves_tile(packed_, tile_rows, tile);
        else
            pack_float_tile<uint16_t>(packed_, tile_rows, tile);
        if (packed_.layout == Layout::Float16)
            half_sums = half_sums && largest_half(tile, tile_bytes / 2) < kHalfSumLimit;
    }
    packed_.half_sums = half_sums;
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
                out[input(k)] = m.layout == Layout::Float16 ? half_to_float(bits) : bfloat_to_float(bits);
            }
        }
        return;
    }
    const BlockShape at(m);
    for (int64_t first = 0; first < m.num_inputs; first += at.runs * kGroupInputs, tile += at.bytes) {
        for (int i = 0; i < at.runs * kGroupInputs; ++i) {
            const int place = at.place(i / m.group, o);
            const float scale = load_scale(tile + at.scales + place, m.scale_type, tile + at.unit(o));
            const uint8_t* codes = tile + at.codes + i / kGroupInputs * at.run_bytes + 4 * o;
            const float value = scale * float(load_code(m, at, codes, i % kGroupInputs));
            float& to = out[input(first + i)];
            to = value;
            if (!m.has_offset) continue;
            const float offset = load_scale(tile + at.offsets + place, m.scale_type, tile + at.unit(o, true));
            to = value + (m.scale_type == ScaleType::ZeroPoint ? scale * offset : offset);
        }
    }
}

}  // namespace quire
