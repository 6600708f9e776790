// Prefetches the keys and values that a thread will attend to, while it waits at a barrier.
#pragma once

#include "ops.h"

namespace quire {

class KVPrefetch {
 public:
    KVPrefetch() = default;
    // The blocks [first, end) of a block table, for one KV head.
    KVPrefetch(const Pages& pages, int64_t layer, int64_t kv_head, const int32_t* first, const int32_t* end)
        : pages_(&pages), layer_(layer), kv_head_(kv_head), block_(first), end_(end) {}

    // Prefetches the next few cache lines. Returns whether any were left.
    bool prefetch_lines() {
        if (block_ == end_) return false;
        const uint8_t *keys = pages_->keys(*block_, layer_, kv_head_),
                      *values = pages_->values(*block_, layer_, kv_head_);
        for (const size_t end = offset_ + kBytesPerCall; offset_ < end; offset_ += kLine) {
            __builtin_prefetch(keys + offset_, 0, 2);
            __builtin_prefetch(values + offset_, 0, 2);
        }
        if (offset_ >= pages_->head_bytes()) offset_ = 0, ++block_;
        return true;
    }

 private:
    static constexpr size_t kLine = 64, kBytesPerCall = 4 * kLine;

    const Pages* pages_ = nullptr;
    int64_t layer_ = 0, kv_head_ = 0;
    const int32_t *block_ = nullptr, *end_ = nullptr;
    size_t offset_ = 0;  // bytes of the block's keys, and of its values, that are prefetched
};

}  // namespace quire
