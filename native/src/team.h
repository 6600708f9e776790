// The threads that walk a tape together.
#pragma once

#include <cstdint>
#include <functional>

namespace quire {

struct Range {
    int64_t first, last;  // half-open
};

// One thread's place among the others.
struct Team {
    int thread, num_threads;

    // This thread's share of n rows: always the same one, so that work on rows needs no barrier between one op and the next.
    Range share(int64_t n) const { return {n * thread / num_threads, n * (thread + 1) / num_threads}; }
    void barrier() const;  // nobody passes before everybody is here
};

// Runs `work` in num_threads threads at once, or in fewer where the system gives fewer.
void run_team(int num_threads, const std::function<void(const Team&)>& work);

}  // namespace quire
