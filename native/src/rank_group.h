// Ranks: processes of one machine that compute a step together. They wait for each other wherever one reads what others
// have written.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace quire {

constexpr int kMaxRanks = 64;

// What ranks share, zero at first. A rank writes its own cache lines and reads those of others.
struct RankMemory {
    struct alignas(64) Rank {
        std::atomic<uint32_t> turn;      // barriers that it has come to
        std::atomic<uint32_t> sleepers;  // ranks that sleep until `turn` changes
    };
    struct alignas(64) Heart {
        std::atomic<uint32_t> beats;
    };
    alignas(64) std::atomic<uint32_t> aborted;
    Rank ranks[kMaxRanks];
    Heart hearts[kMaxRanks];
};

// One rank's view of the group.
class RankGroup {
 public:
    RankGroup(RankMemory* memory, int rank, int size) : memory_(memory), rank_(rank), size_(size) {}
    ~RankGroup();

    // Waits until all ranks are here: what they wrote before is seen by all afterwards. It spins for some microseconds,
    // yields for some hundred, then sleeps. Returns false, at once, if the group is aborted.
    bool barrier();

    // No rank waits for another from now on: one of them is gone.
    void abort();
    bool aborted() const { return memory_->aborted.load(std::memory_order_acquire) != 0; }

    // A thread that counts a rank's beats. It ends the process, whatever that does, when its parent is no longer
    // `parent`.
    void start_heartbeat(int64_t parent);
    uint32_t beats(int rank) const { return memory_->hearts[rank].beats.load(std::memory_order_relaxed); }

    int rank() const { return rank_; }
    int size() const { return size_; }

 private:
    bool wait_for(RankMemory::Rank& other);
    void beat(int64_t parent);

    RankMemory* const memory_;
    const int rank_, size_;
    uint32_t turn_ = 0;
    std::thread heart_;
    std::mutex mutex_;
    std::condition_variable stops_;
    bool stopped_ = false;
};

}  // namespace quire
