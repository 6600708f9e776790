#include "thread_pool.h"

#include <omp.h>

#include <thread>

namespace quire {

namespace {

constexpr int kSpins = 2000;

void relax() {
#if defined(__aarch64__)
    asm volatile("yield");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace

bool Barrier::arrive(int num_threads, uint32_t now) {
    if (num_threads == 1) return true;
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) < num_threads - 1) return false;
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(now + 1, std::memory_order_release);
    return true;
}

void Barrier::spin_then_yield(uint32_t now) {
    for (int turn = 0; generation_.load(std::memory_order_acquire) == now; ++turn) {
        if (turn < kSpins)
            relax();
        else
            std::this_thread::yield();
    }
}

void run_in_pool(int num_threads, const std::function<void(const ThreadPool&)>& work) {
    Barrier shared_barrier;
    if (num_threads == 1) return work(ThreadPool{0, 1, &shared_barrier});
#pragma omp parallel num_threads(num_threads)
    work(ThreadPool{omp_get_thread_num(), omp_get_num_threads(), &shared_barrier});
}

}  // namespace quire
