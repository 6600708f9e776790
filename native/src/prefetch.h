// Keys and values that a thread will attend to, fetched into its cache while it waits for the others.
#pragma once

#include "ops.h"

namespace quire {

class Ahead {
 public:
    Ahead() = default;
    // Of one KV head, the blocks [first, end) of a block table.
    Ahead(const Pages& pages, int64_t layer, int64_t kv_head, const int32_t* first, const int32_t* end)
        : pages_(&pages), layer_(layer), kv_head_(kv_head), block_(first), end_(end) {}

    // Asks for the next few lines; returns whether there were any.
    bool fetch() {
        if (block_ == end_) return false;
        const uint8_t *keys = pages_->keys(*block_, layer_, kv_head_),
                      *values = pages_->values(*block_, layer_, kv_head_);
        for (const size_t end = at_ + kAtOnce; at_ < end; at_ += kLine) {
            __builtin_prefetch(keys + at_, 0, 2);
            __builtin_prefetch(values + at_, 0, 2);
        }
        if (at_ >= pages_->head_bytes()) at_ = 0, ++block_;
        return true;
    }

 private:
    static constexpr size_t kLine = 64, kAtOnce = 4 * kLine;

    const Pages* pages_ = nullptr;
    int64_t layer_ = 0, kv_head_ = 0;
    const int32_t *block_ = nullptr, *end_ = nullptr;
    size_t at_ = 0;  // bytes of the block's keys, and of its values, that are asked for
};

}  // namespace quire
