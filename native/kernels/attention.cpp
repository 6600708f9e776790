// Attention: chooses the kernels for the type of pages, and merges splits.

#include "attention.h"

#include "partial_softmax.h"

namespace quire::QUIRE_ISA {
namespace {

const AttentionKernels& kernels_of(const Pages& pages) {
    using namespace QUIRE_FLOAT_ATTENTION_ISA;
    switch (pages.type) {
        case PageType::Float16: return pages.latent ? latent_fp16_attention : fp16_attention;
        case PageType::Bfloat16: return pages.latent ? latent_bf16_attention : bf16_attention;
        case PageType::Float32: return pages.latent ? latent_fp32_attention : fp32_attention;
        case PageType::Int8: break;
    }
    return int8_attention;
}

}  // namespace

void attend(const AttentionTile& t);
void attend(const AttentionTile& t) { kernels_of(*t.pages).attend(t); }

void attend_splits(const AttentionTile& t, int64_t first, int64_t end, float* partials, int64_t split_stride);
void attend_splits(const AttentionTile& t, int64_t first, int64_t end, float* partials, int64_t split_stride) {
    kernels_of(*t.pages).attend_splits(t, first, end, partials, split_stride);
}

void merge_splits(const AttentionTile& t, float* partials, int64_t num_splits, int64_t split_stride);
void merge_splits(const AttentionTile& t, float* partials, int64_t num_splits, int64_t split_stride) {
    const int64_t value_dim = t.pages->value_dim();
    const PartialSoftmax merged{partials, value_dim};
    for (int64_t split = 1; split < num_splits; ++split)
        merge(merged, PartialSoftmax{partials + split * split_stride, value_dim}, t.num_queries);
    finish(t, merged);
}

}  // namespace quire::QUIRE_ISA
