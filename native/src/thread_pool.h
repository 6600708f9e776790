// The threads that walk a tape together.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace quire {

struct Range {
    int64_t first, last;  // half-open
};

// Where threads wait for each other: busily for some microseconds, then leaving the CPU to whoever wants it. Ops are
// far shorter than a time slice, so a thread that waits busily for one that is not running would waste all of it.
class Barrier {
 public:
    // While others are awaited, idle() is called for as long as it returns true.
    template <class Idle>
    void wait(int num_threads, const Idle& idle) {
        const uint32_t now = generation_.load(std::memory_order_relaxed);
        if (arrive(num_threads, now)) return;
        while (generation_.load(std::memory_order_acquire) == now && idle()) {
        }
        rest(now);
    }

 private:
    bool arrive(int num_threads, uint32_t now);  // returns whether everybody is here
    void rest(uint32_t now);                     // until everybody is

    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
};

// One thread's place among the others.
struct Team {
    int thread, num_threads;
    Barrier* meeting;

    // This thread's share of n rows: always the same one, so that work on rows needs no barrier between one op and the
    // next.
    Range share(int64_t n) const { return {n * thread / num_threads, n * (thread + 1) / num_threads}; }
    // Nobody passes before everybody is here.
    void barrier() const {
        barrier([] { return false; });
    }
    template <class Idle>
    void barrier(const Idle& idle) const {
        meeting->wait(num_threads, idle);
    }
};

// Runs `work` in num_threads threads at once, or in fewer where the system gives fewer.
void run_team(int num_threads, const std::function<void(const Team&)>& work);

}  // namespace quire
