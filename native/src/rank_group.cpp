#include "rank_group.h"

#include <unistd.h>

#include <chrono>
#include <climits>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#endif

namespace quire {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpins = 2000;
constexpr auto kYielding = std::chrono::microseconds(500);
constexpr auto kSleep = std::chrono::milliseconds(50);  // at most, before a rank looks again
constexpr auto kBeat = std::chrono::milliseconds(100);

void relax() {
#if defined(__aarch64__)
    asm volatile("yield");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Sleeps while *word is `value`, until it is woken or kSleep has passed.
void sleep_while(std::atomic<uint32_t>& word, [[maybe_unused]] uint32_t value) {
#if defined(__linux__)
    static_assert(sizeof(word) == sizeof(uint32_t), "a futex is a word");
    const timespec timeout{0, std::chrono::nanoseconds(kSleep).count()};
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &timeout, nullptr, 0);
#else
    (void)word;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
#endif
}

void wake_all([[maybe_unused]] std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

}  // namespace

RankGroup::~RankGroup() {
    if (!heart_.joinable()) return;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopped_ = true;
    }
    stops_.notify_all();
    heart_.join();
}

bool RankGroup::barrier() {
    RankMemory::Rank& mine = memory_->ranks[rank_];
    mine.turn.store(++turn_);  // sequentially consistent, as are `sleepers`: either we see a sleeper, or it sees us
    if (mine.sleepers.load()) wake_all(mine.turn);
    for (int other = 0; other < size_; ++other)
        if (other != rank_ && !wait_for(memory_->ranks[other])) return false;
    return true;
}

bool RankGroup::wait_for(RankMemory::Rank& other) {
    const auto is_here = [&] { return int32_t(other.turn.load(std::memory_order_acquire) - turn_) >= 0; };
    for (int spin = 0; spin < kSpins; ++spin) {
        if (is_here()) return !aborted();
        relax();
    }
    for (const auto end = Clock::now() + kYielding; Clock::now() < end; std::this_thread::yield())
        if (is_here() || aborted()) return !aborted();
    while (!is_here() && !aborted()) {
        other.sleepers.fetch_add(1);
        const uint32_t seen = other.turn.load();
        if (int32_t(seen - turn_) < 0 && !aborted()) sleep_while(other.turn, seen);
        other.sleepers.fetch_sub(1);
    }
    return !aborted();
}

void RankGroup::abort() {
    memory_->aborted.store(1);
    for (int rank = 0; rank < size_; ++rank) wake_all(memory_->ranks[rank].turn);
}

void RankGroup::start_heartbeat(int64_t parent) {
    if (!heart_.joinable()) heart_ = std::thread([this, parent] { beat(parent); });
}

void RankGroup::beat(int64_t parent) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopped_) {
        if (getppid() != parent) _exit(1);
        memory_->hearts[rank_].beats.fetch_add(1, std::memory_order_relaxed);
        stops_.wait_for(lock, kBeat, [this] { return stopped_; });
    }
}

}  // namespace quire
