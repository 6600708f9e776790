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
    void wait(int num_threads);

 private:
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
    void barrier() const { meeting->wait(num_threads); }
};

// Runs `work` in num_threads threads at once, or in fewer where the system gives fewer.
void run_team(int num_threads, const std::function<void(const Team&)>& work);

}  // namespace quire
