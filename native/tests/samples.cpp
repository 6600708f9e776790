#include "samples.h"

#include <cstring>

#include "fp16.h"

namespace quire::tests {

namespace {

// Types whose blocks begin with an fp32 scale, some with an offset behind it.
bool has_float_scale(Storage storage) { return storage >= Storage::Q4_F && storage <= Storage::FP4; }
bool has_float_offset(Storage storage) { return storage == Storage::Q4_F || storage == Storage::Q8_M; }

// The byte offsets of the fp16 scale and offset of a block, -1 for none.
void scale_offsets(Storage storage, int offsets[2]) {
    offsets[0] = 0;
    offsets[1] = -1;
    switch (storage) {
        case Storage::Q4_1:
        case Storage::Q5_1:
        case Storage::Q4_K:
        case Storage::Q5_K: offsets[1] = 2; break;
        case Storage::Q2_K: offsets[0] = 80, offsets[1] = 82; break;
        case Storage::Q3_K: offsets[0] = 108; break;
        case Storage::Q6_K: offsets[0] = 208; break;
        case Storage::TQ1_0: offsets[0] = 52; break;
        case Storage::TQ2_0: offsets[0] = 64; break;
        case Storage::MXFP4:
        case Storage::NVFP4:
        case Storage::IQ1_M: offsets[0] = -1; break;  // exponents, 8-bit scales, and a super-scale spread over words
        default:
            if (has_float_scale(storage)) offsets[0] = -1;
            break;
    }
}

uint16_t some_fp16(Random& random) {  // of magnitude 2^-7 .. 2^-6
    return uint16_t((random.bits() & 0x83ff) | (8 << 10));
}

void fill_floats(Storage storage, uint8_t* row, int64_t n, Random& random) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = bits_of_float(random.uniform());
        const uint16_t bfloat = uint16_t(bits >> 16), half = some_fp16(random);
        if (storage == Storage::F32) std::memcpy(row + 4 * i, &bits, 4);
        if (storage == Storage::BF16) std::memcpy(row + 2 * i, &bfloat, 2);
        if (storage == Storage::F16) std::memcpy(row + 2 * i, &half, 2);
        if (storage == Storage::F8_E4M3 || storage == Storage::F8_E5M2) row[i] = uint8_t(half >> 8);
        if (storage == Storage::FP8 && i % 32 == 0) std::memcpy(row + i / 32 * 36, &bits, 4);
        if (storage == Storage::FP8) row[i / 32 * 36 + 4 + i % 32] = uint8_t(half >> 8);
    }
}

}  // namespace

std::vector<uint8_t> sample_rows(Storage storage, int64_t rows, int64_t n, Random& random) {
    const StorageInfo& info = storage_info(storage);
    const int64_t bytes = row_bytes(storage, n);
    std::vector<uint8_t> data(size_t(rows * bytes));
    int offsets[2];
    scale_offsets(storage, offsets);
    for (int64_t r = 0; r < rows; ++r) {
        uint8_t* row = data.data() + r * bytes;
        if (info.group == 0) {
            fill_floats(storage, row, n, random);
            continue;
        }
        const uint8_t extremes[4] = {0x80, 0x7f, 0xff, 0x00};
        for (int64_t i = 0; i < bytes; ++i) row[i] = r % 5 == 4 ? extremes[r / 5 % 4] : uint8_t(random.bits());
        for (int64_t block = 0; block < bytes; block += info.block_bytes) {
            if (storage == Storage::MXFP4) row[block] = uint8_t(118 + random.bits() % 8);
            if (storage == Storage::NVFP4)
                for (int g = 0; g < 4; ++g) row[block + g] &= 0x3f;
            if (storage == Storage::IQ1_M)
                for (int w = 0; w < 4; ++w) row[block + 49 + 2 * w] = uint8_t((row[block + 49 + 2 * w] & 15) | 0x20);
            const uint16_t zero_point = uint16_t(0x4880 + 0x80 * (random.bits() % 6));  // 9 .. 14: no row is all zero
            if (storage == Storage::Q4_Z) std::memcpy(row + block + 2, &zero_point, 2);
            const float scales[2] = {random.uniform(), random.uniform()};
            if (has_float_scale(storage)) std::memcpy(row + block, scales, has_float_offset(storage) ? 8 : 4);
            for (int offset : offsets) {
                const uint16_t half = some_fp16(random);
                if (offset >= 0) std::memcpy(row + block + offset, &half, 2);
            }
        }
    }
    return data;
}

std::vector<float> sample_activations(int64_t rows, int64_t n, Random& random) {
    std::vector<float> x(size_t(rows * n));
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < n; ++i)
            x[size_t(r * n + i)] = r % 5 == 0 ? (r % 2 ? -3.0f : 3.0f) : random.uniform() * float(1 + r % 3);
    return x;
}

}  // namespace quire::tests
