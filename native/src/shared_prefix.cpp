#include "shared_prefix.h"

#include <algorithm>

#include "tape.h"

namespace quire {

void Cascade::find(const Step& step, int64_t part_blocks, int64_t block_size, int64_t most) {
    groups_.clear();
    order_.clear();
    num_members_ = 0;
    const auto table = [&](int64_t seq) { return step.block_tables + seq * step.table_stride; };
    const auto whole_parts = [&](int64_t seq) { return step.context_lens[seq] / (part_blocks * block_size); };
    for (int64_t seq = 0; seq < step.num_seqs; ++seq)
        if (step.seq_starts[seq + 1] - step.seq_starts[seq] == 1 && whole_parts(seq) > 0)
            order_.push_back(int32_t(seq));
    std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) { return *table(a) < *table(b); });
    for (size_t begin = 0, end; begin < order_.size(); begin = end) {
        const int32_t first = order_[begin];
        Group group{{first}, whole_parts(first)};
        for (end = begin + 1; end < order_.size() && int64_t(group.seqs.size()) < most; ++end) {
            const int32_t seq = order_[end];
            const int64_t parts = std::min(group.num_parts, whole_parts(seq)), blocks = parts * part_blocks;
            const int64_t same = std::mismatch(table(first), table(first) + blocks, table(seq)).first - table(first);
            if (same < part_blocks) break;
            group.num_parts = same / part_blocks;
            group.seqs.push_back(seq);
        }
        if (group.seqs.size() < 2) continue;
        if (groups_.empty()) {
            member_.assign(step.num_seqs, -1);
            shared_.assign(step.num_seqs, 0);
        }
        for (const int32_t seq : group.seqs) {
            member_[seq] = num_members_++;
            shared_[seq] = group.num_parts;
        }
        groups_.push_back(std::move(group));
    }
}

}  // namespace quire
