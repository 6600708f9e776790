#include "shared_prefix.h"

#include <algorithm>

#include "tape.h"

namespace quire {

void SharedPrefixes::find(const Step& step, int64_t split_blocks, int64_t block_size, int64_t max_seqs) {
    groups_.clear();
    order_.clear();
    num_members_ = 0;
    const auto table = [&](int64_t seq) { return step.block_tables + seq * step.table_stride; };
    const auto whole_splits = [&](int64_t seq) { return step.context_lens[seq] / (split_blocks * block_size); };
    for (int64_t seq = 0; seq < step.num_seqs; ++seq)
        if (step.seq_starts[seq + 1] - step.seq_starts[seq] == 1 && whole_splits(seq) > 0)
            order_.push_back(int32_t(seq));
    std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) { return *table(a) < *table(b); });
    for (size_t begin = 0, end; begin < order_.size(); begin = end) {
        const int32_t first = order_[begin];
        Group group{{first}, whole_splits(first)};
        for (end = begin + 1; end < order_.size() && int64_t(group.seqs.size()) < max_seqs; ++end) {
            const int32_t seq = order_[end];
            const int64_t splits = std::min(group.num_splits, whole_splits(seq)), blocks = splits * split_blocks;
            const int64_t shared_blocks =
                std::mismatch(table(first), table(first) + blocks, table(seq)).first - table(first);
            if (shared_blocks < split_blocks) break;
            group.num_splits = shared_blocks / split_blocks;
            group.seqs.push_back(seq);
        }
        if (group.seqs.size() < 2) continue;
        if (groups_.empty()) {
            member_.assign(step.num_seqs, -1);
            shared_.assign(step.num_seqs, 0);
        }
        for (const int32_t seq : group.seqs) {
            member_[seq] = num_members_++;
            shared_[seq] = group.num_splits;
        }
        groups_.push_back(std::move(group));
    }
}

}  // namespace quire
