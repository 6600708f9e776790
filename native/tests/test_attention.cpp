// Pages and attention of every table of this CPU against `plain`. The same bytes are written, by one token or several
// at once, and outputs differ only by the rounding of sums. (Against fp64: tests/ops/test_native_attention.py.)

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "samples.h"

namespace {

using namespace quire;
using namespace quire::tests;

struct Shape {
    int64_t head_dim, block_size, context;
    int queries;
    int64_t latent;
};
constexpr Shape kShapes[] = {{64, 16, 500, 3, 0}, {64, 16, 333, 32, 0},  {128, 32, 70, 4, 0},  {80, 8, 41, 1, 0},
                             {20, 24, 100, 7, 0}, {72, 16, 300, 32, 64}, {26, 12, 50, 20, 20}, {40, 4, 31, 5, 32}};
constexpr const char* kTypes[] = {"fp16", "bf16", "fp32", "int8"};
constexpr int64_t kHeads = 2;

struct Result {
    std::vector<uint8_t> pages;
    std::vector<float> out;  // [queries, head_dim]; for latent pages, the rest of a row stays 0
};

// The last queries of a sequence of random keys and values, by the table in use. `adjusted`: scores with softcap,
// slopes, sinks and biases. Up to `at_once` tokens are written by one call.
Result attend(const Shape& shape, PageType type, bool adjusted, int64_t at_once) {
    const int64_t num_blocks = (shape.context + shape.block_size - 1) / shape.block_size;
    const int64_t num_heads = shape.latent ? 1 : kHeads;
    Pages pages{nullptr, num_blocks, 1, num_heads, shape.head_dim, shape.block_size, type, shape.latent};
    Result result{std::vector<uint8_t>(pages.block_bytes() * size_t(num_blocks) + kPagesSlack, 0xff),
                  std::vector<float>(size_t(shape.queries * shape.head_dim))};
    pages.data = result.pages.data();
    Random random(uint64_t(shape.head_dim));
    const int64_t width = kHeads * shape.head_dim;
    std::vector<float> k(size_t(shape.context * width)), v(k.size()), q(result.out.size());
    std::vector<int32_t> table;
    for (int64_t block = num_blocks; block > 0; --block) table.push_back(int32_t(block - 1));
    for (float& x : k) x = 2 * random.uniform();
    for (size_t i = 0; i < v.size(); ++i) v[i] = random.uniform() * (int64_t(i) / width % 7 ? 1.0f : 0x1p-9f);
    for (int64_t at = 0, count; at < shape.context; at += count) {
        const int64_t offset = at % shape.block_size,
                      slot = table[size_t(at / shape.block_size)] * shape.block_size + offset;
        const float *key = k.data() + at * width, *value = v.data() + at * width;
        count = shape.latent ? 1 : std::min({at_once, shape.block_size - offset, shape.context - at});
        if (shape.latent)
            kernels().ops.write_latent(pages, 0, int32_t(slot), key, key + shape.latent);
        else
            kernels().ops.write_kv(pages, 0, int32_t(slot), count, key, width, value, width);
    }
    for (float& x : q) x = 4 * random.uniform();
    std::vector<float> scratch(size_t(attention_scratch(shape.head_dim, shape.block_size)));
    AttentionTile tile{};
    tile.pages = &pages;
    tile.kv_head = num_heads - 1;
    tile.block_table = table.data();
    tile.num_queries = shape.queries;
    tile.scale = 1.0f / std::sqrt(float(shape.head_dim));
    tile.scratch = scratch.data();
    tile.softcap = adjusted ? 6.0f : 0.0f;
    tile.has_slopes = adjusted;
    tile.has_sinks = adjusted;
    tile.reach = adjusted ? 20 : 0;
    std::vector<float> biases(41);
    for (float& x : biases) x = random.uniform();
    for (int i = 0; i < shape.queries; ++i) {
        tile.q[i] = q.data() + i * shape.head_dim;
        tile.q_rope[i] = tile.q[i] + shape.latent;
        tile.out[i] = result.out.data() + i * shape.head_dim;
        tile.first[i] = i % 2 ? int32_t(shape.context / 3) : 0;
        tile.last[i] = tile.position[i] = int32_t(shape.context - shape.queries + i);
        tile.slope[i] = 1.0f / float(i + 2);
        tile.sink[i] = 3.0f - float(i);
        tile.bias[i] = biases.data() + tile.reach;
    }
    kernels().ops.attend(tile);
    return result;
}

double relative_difference(const std::vector<float>& x, const std::vector<float>& y) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < x.size(); ++i) {
        difference += (double(x[i]) - y[i]) * (double(x[i]) - y[i]);
        size += double(y[i]) * y[i];
    }
    return std::sqrt(difference / size);
}

}  // namespace

void test_attention(int& passed, int& failed) {
    for (const Shape& shape : kShapes) {
        for (int kind = 0; kind < (shape.latent || shape.block_size % 16 ? 6 : 8); ++kind) {
            const int type = kind / 2;
            const bool adjusted = kind % 2;
            use_isa("plain");
            const Result plain = attend(shape, PageType(type), adjusted, 1);
            for (const char* const* isa = available_isas(); *isa; ++isa) {
                use_isa(*isa);
                const Result result = attend(shape, PageType(type), adjusted, 19);
                const bool same = result.pages == plain.pages;
                const double difference = relative_difference(result.out, plain.out);
                const bool near = difference < (PageType(type) == PageType::Float16 ? 4e-3 : 3e-5);
                same&& near ? ++passed : ++failed;
                if (!same || !near)
                    std::printf("failed: %sattention over %s, table %s, head_dim %lld: %s, relative difference %.2g\n",
                                adjusted ? "adjusted " : "", kTypes[type], *isa, (long long)shape.head_dim,
                                same ? "same pages" : "other pages", difference);
            }
        }
    }
}
