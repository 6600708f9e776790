// Barriers between processes: what one writes before a barrier, all read after it; a rank that never comes is given up.

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

#include "rank_group.h"

namespace {

using namespace quire;

constexpr int kRanks = 3, kTurns = 4000;

struct Shared {
    RankMemory group;
    int64_t written[2][kRanks];  // by turns: a rank is at most one barrier ahead
};

Shared* new_shared() {
    void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<Shared*>(memory);
}

// Every rank writes a number a turn and reads those of all. Some turns one rank comes late: the others sleep.
int run_rank(Shared* shared, int rank) {
    RankGroup group(&shared->group, rank, kRanks);
    for (int64_t turn = 0; turn < kTurns; ++turn) {
        if (turn % 1000 == 999 && rank == turn / 1000 % kRanks) usleep(5000);
        shared->written[turn % 2][rank] = turn * 10 + rank;
        if (!group.barrier()) return 1;
        for (int other = 0; other < kRanks; ++other)
            if (shared->written[turn % 2][other] != turn * 10 + other) return 2;
    }
    return 0;
}

template <class Work>
pid_t start(const Work& work) {
    const pid_t child = fork();
    if (child == 0) _exit(work());
    return child;
}

bool ended_well(pid_t child) {
    int status = 0;
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool all_read_what_all_wrote() {
    Shared* shared = new_shared();
    pid_t children[kRanks];
    for (int rank = 0; rank < kRanks; ++rank) children[rank] = start([&] { return run_rank(shared, rank); });
    bool ok = true;
    for (const pid_t child : children) ok = ended_well(child) && ok;
    return ok;
}

bool waiting_ends_with_the_group() {
    Shared* shared = new_shared();
    const pid_t waits = start([&] { return RankGroup(&shared->group, 0, 2).barrier() ? 1 : 0; });
    usleep(20000);  // long enough that it sleeps
    RankGroup(&shared->group, 1, 2).abort();
    return ended_well(waits);
}

bool a_heartbeat_is_counted() {
    Shared* shared = new_shared();
    RankGroup group(&shared->group, 1, 2);
    group.start_heartbeat(getppid());
    for (int turn = 0; turn < 100 && group.beats(1) < 2; ++turn) usleep(20000);
    return group.beats(1) >= 2;
}

}  // namespace

void test_ranks(int& passed, int& failed) {
    const auto check = [&](bool ok, const char* what) {
        ++(ok ? passed : failed);
        if (!ok) std::printf("ranks: %s\n", what);
    };
    check(all_read_what_all_wrote(), "a rank read something else than was written before the barrier");
    check(waiting_ends_with_the_group(), "a rank waited on when the group had ended");
    check(a_heartbeat_is_counted(), "no heartbeat");
}
