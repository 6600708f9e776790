#include "samples.h"

#include <cstring>

#include "half.h"

namespace quire::tests {

namespace {

// Where a block keeps its 16-bit scales (and offsets), -1 for none.
void scale_places(Storage storage, int places[2]) {
    places[0] = 0;
    places[1] = -1;
    switch (storage) {
        case Storage::Q4_1:
        case Storage::Q5_1:
        case Storage::Q4_K:
        case Storage::Q5_K: places[1] = 2; break;
        case Storage::Q2_K: places[0] = 80, places[1] = 82; break;
        case Storage::Q3_K: places[0] = 108; break;
        case Storage::Q6_K: places[0] = 208; break;
        case Storage::MXFP4: places[0] = -1; break;  // it has exponents
        default: break;
    }
}

uint16_t some_half(Random& random) {  // of magnitude 2^-7 .. 2^-6
    return uint16_t((random.bits() & 0x83ff) | (8 << 10));
}

void fill_floats(Storage storage, uint8_t* row, int64_t n, Random& random) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = bits_of_float(random.uniform());
        const uint16_t bfloat = uint16_t(bits >> 16), half = some_half(random);
        if (storage == Storage::F32) std::memcpy(row + 4 * i, &bits, 4);
        if (storage == Storage::BF16) std::memcpy(row + 2 * i, &bfloat, 2);
        if (storage == Storage::F16) std::memcpy(row + 2 * i, &half, 2);
    }
}

}  // namespace

std::vector<uint8_t> sample_rows(Storage storage, int64_t rows, int64_t n, Random& random) {
    const StorageInfo& info = storage_info(storage);
    const int64_t bytes = row_bytes(storage, n);
    std::vector<uint8_t> data(size_t(rows * bytes));
    int places[2];
    scale_places(storage, places);
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
            for (int place : places) {
                const uint16_t half = some_half(random);
                if (place >= 0) std::memcpy(row + block + place, &half, 2);
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
