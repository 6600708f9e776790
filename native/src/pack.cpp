#include "pack.h"

#include <cassert>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "half.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace quire {

namespace {

// Where things lie in one group of one tile of an integer layout.
struct GroupShape {
    int scale_bytes, offsets, codes, bytes;

    explicit GroupShape(const PackedMatrix& m) {
        scale_bytes = m.scale_type == ScaleType::Float32 ? 4 : 2;
        offsets = kTileOutputs * scale_bytes;
        codes = m.has_offset ? 2 * offsets : offsets;
        bytes = codes + kTileOutputs * (m.layout == Layout::Int8 ? m.group : m.group / 2);
    }
};

int64_t element_bytes(Layout layout) { return layout == Layout::Float32 ? 4 : 2; }

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
        m.layout = info.max_code - info.min_code < 16 && info.group == kGroupInputs ? Layout::Int4 : Layout::Int8;
        if (info.codebook != Codebook::None) m.layout = Layout::Codebook4;
        m.zero = m.layout == Layout::Int4 ? -info.min_code : 0;
        m.codebook = info.codebook;
        m.group = info.group;
        m.scale_type = info.scale_type;
        m.has_offset = info.has_offset;
        tile_bytes = num_inputs / m.group * GroupShape(m).bytes;
    }
    m.nbytes = size_t(m.num_tiles() * tile_bytes);
    return m;
}

void store_scale(uint8_t* to, int output, ScaleType type, float value) {
    if (type == ScaleType::Float32) {
        std::memcpy(to + 4 * output, &value, 4);
    } else {
        const uint16_t bits = type == ScaleType::BFloat16 ? uint16_t(bits_of_float(value) >> 16) : exact_half(value);
        std::memcpy(to + 2 * output, &bits, 2);
    }
}

float load_scale(const uint8_t* from, int output, ScaleType type) {
    if (type == ScaleType::Float32) {
        float value;
        std::memcpy(&value, from + 4 * output, 4);
        return value;
    }
    uint16_t bits;
    std::memcpy(&bits, from + 2 * output, 2);
    return type == ScaleType::BFloat16 ? bfloat_to_float(bits) : half_to_float(bits);
}

// 4 codes, one in each byte.
uint32_t quad_at(const int8_t* codes) {
    uint32_t quad;
    std::memcpy(&quad, codes, 4);
    return quad;
}

// Put one group of one output into its place. `to` is the group's memory in the tile.
void store_group(const PackedMatrix& m, const GroupShape& at, const int8_t* codes, float scale, float offset,
                 int output, uint8_t* to) {
    store_scale(to, output, m.scale_type, scale);
    if (m.has_offset) store_scale(to + at.offsets, output, m.scale_type, offset);
    uint8_t* quads = to + at.codes + 4 * output;
    if (m.layout == Layout::Int8) {
        for (int q = 0; q < m.group / 4; ++q) std::memcpy(quads + q * 4 * kTileOutputs, codes + 4 * q, 4);
        return;
    }
    assert(m.zero == 0 || m.zero == 8);
    const uint32_t nibbles = 0x0f0f0f0f;
    const uint32_t zeros = 0x01010101u * uint32_t(m.zero);  // (code & 15) ^ 8 is code + 8 for -8 .. 7
    for (int p = 0; p < 4; ++p) {
        const uint32_t low = (quad_at(codes + 4 * p) & nibbles) ^ zeros;
        const uint32_t high = (quad_at(codes + 16 + 4 * p) & nibbles) ^ zeros;
        const uint32_t pair = low | high << 4;
        std::memcpy(quads + p * 4 * kTileOutputs, &pair, 4);
    }
}

// `rows` are the stored rows of the tile's outputs, null past the last one; `tile` starts as zeros.
void pack_integer_tile(Storage storage, const PackedMatrix& m, const uint8_t* const* rows, uint8_t* tile) {
    const StorageInfo& info = storage_info(storage);
    const DecodeBlock decode = block_decoder(storage);
    const GroupShape at(m);
    const int groups_per_block = info.block / m.group;
    DecodedBlock block;
    for (int64_t b = 0; b < m.num_inputs / info.block; ++b) {
        for (int o = 0; o < kTileOutputs && rows[o]; ++o) {
            decode(rows[o] + b * info.block_bytes, block);
            for (int g = 0; g < groups_per_block; ++g)
                store_group(m, at, block.codes + g * m.group, block.scales[g], block.offsets[g], o,
                            tile + (b * groups_per_block + g) * at.bytes);
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

// Four elements of 16 bits of each of four rows become four of each of four columns.
void turn(uint64_t (&x)[4]) {
    constexpr uint64_t kEven = 0x0000ffff0000ffff, kLow = 0x00000000ffffffff;
    const uint64_t even01 = (x[0] & kEven) | (x[1] & kEven) << 16, odd01 = (x[0] >> 16 & kEven) | (x[1] & ~kEven);
    const uint64_t even23 = (x[2] & kEven) | (x[3] & kEven) << 16, odd23 = (x[2] >> 16 & kEven) | (x[3] & ~kEven);
    x[0] = (even01 & kLow) | even23 << 32;
    x[1] = (odd01 & kLow) | odd23 << 32;
    x[2] = even01 >> 32 | (even23 & ~kLow);
    x[3] = odd01 >> 32 | (odd23 & ~kLow);
}

// What pack_float_tile<uint16_t> does, for a whole tile of a multiple of four inputs: three times as fast.
void pack_halves_tile(const PackedMatrix& m, const uint8_t* const* rows, uint8_t* tile) {
    static_assert(kTileOutputs % 4 == 0);
    constexpr int64_t kRun = 256;  // inputs: 8 KB of rows and 8 KB of the tile, in L1
    for (int64_t first = 0; first < m.num_inputs; first += kRun) {
        const int64_t last = first + kRun < m.num_inputs ? first + kRun : m.num_inputs;
        for (int o = 0; o < kTileOutputs; o += 4) {
            for (int64_t k = first; k < last; k += 4) {
                uint64_t x[4];
                for (int i = 0; i < 4; ++i) std::memcpy(&x[i], rows[o + i] + 2 * k, 8);
                turn(x);
                for (int i = 0; i < 4; ++i) std::memcpy(tile + 2 * ((k + i) * kTileOutputs + o), &x[i], 8);
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

Matrix::Matrix(Storage storage, const std::vector<const uint8_t*>& rows, int64_t num_inputs, const int32_t* input_order)
    : packed_(shape_of(storage, int64_t(rows.size()), num_inputs)) {
    const int64_t num_outputs = packed_.num_outputs;
    assert(num_outputs > 0 && num_inputs > 0 && num_inputs % storage_info(storage).block == 0);
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
        else if (tile_rows[kTileOutputs - 1] && num_inputs % 4 == 0)
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
    const GroupShape at(m);
    for (int64_t first = 0; first < m.num_inputs; first += m.group, tile += at.bytes) {
        const float scale = load_scale(tile, o, m.scale_type);
        const uint8_t* codes = tile + at.codes + 4 * o;
        for (int i = 0; i < m.group; ++i) {
            int code;
            if (m.layout == Layout::Int8) {
                code = int8_t(codes[i / 4 * 4 * kTileOutputs + i % 4]);
            } else {
                const uint8_t pair = codes[i % 16 / 4 * 4 * kTileOutputs + i % 4];
                const int stored = i < 16 ? pair & 15 : pair >> 4;
                code = m.layout == Layout::Int4 ? stored - m.zero : kCodebooks[int(m.codebook)][stored];
            }
            const float value = scale * float(code);
            const float unit = m.scale_type == ScaleType::ZeroPoint ? scale : 1.0f;
            out[input(first + i)] =
                m.has_offset ? value + unit * load_scale(tile + at.offsets, o, m.scale_type) : value;
        }
    }
}

}  // namespace quire
