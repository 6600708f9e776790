#include "team.h"

#include <omp.h>

namespace quire {

void Team::barrier() const {
#pragma omp barrier
}

void run_team(int num_threads, const std::function<void(const Team&)>& work) {
    if (num_threads == 1) return work(Team{0, 1});
#pragma omp parallel num_threads(num_threads)
    work(Team{omp_get_thread_num(), omp_get_num_threads()});
}

}  // namespace quire
