// The threads that run a tape together.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace quire {

struct Range {
    int64_t first, last;  // half-open
};

// A barrier that spins for some microseconds and then yields the CPU. Ops are far shorter than a time slice: a thread
// that only spins while another one is descheduled would waste the whole slice.
class Barrier {
 public:
    // While it waits, a thread calls idle() for as long as that returns true.
    template <class Idle>
    void wait(int num_threads, const Idle& idle) {
        const uint32_t now = generation_.load(std::memory_order_relaxed);
        if (arrive(num_threads, now)) return;
        while (generation_.load(std::memory_order_acquire) == now && idle()) {
        }
        spin_then_yield(now);
    }

 private:
    bool arrive(int num_threads, uint32_t now);  // returns whether this thread is the last
    void spin_then_yield(uint32_t now);          // until all threads have arrived

    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
};

// One thread's view of the thread pool.
struct ThreadPool {
    int thread, num_threads;  // thread: the index of this one
    Barrier* shared_barrier;

    // This thread's share of n rows. It is always the same, so ops that work by rows need no barrier between them.
    Range share(int64_t n) const { return {n * thread / num_threads, n * (thread + 1) / num_threads}; }
    // Waits until all threads are here.
    void barrier() const {
        barrier([] { return false; });
    }
    template <class Idle>
    void barrier(const Idle& idle) const {
        shared_barrier->wait(num_threads, idle);
    }
};

// Runs `work` in num_threads threads at once, or in fewer if the system grants fewer.
void run_in_pool(int num_threads, const std::function<void(const ThreadPool&)>& work);

}  // namespace quire
