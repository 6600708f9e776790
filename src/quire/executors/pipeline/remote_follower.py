"""The process of a stage whose engine is on another machine. `quire stage` has accepted the connections.

Started as `python -m quire.executors.pipeline.remote_follower MODEL THREADS SOCKET MEMORY NEXT [BEFORE] RANK SIZE
PARENT`: model files and threads are those of this machine, and PARENT is its `quire stage`."""

import os
import sys
from dataclasses import replace

from quire.executors.pipeline.follower import StageFollower, linked
from quire.executors.ranks.follower import follow, started_options
from quire.executors.ranks.messages import StartRank
from quire.ops.ranks.group import RankGroup


def main(model: str, threads: int, file: int, memory: int, *files_and_ids: int) -> int:
    *links, rank, size, parent = files_and_ids
    after, before = linked(links)
    group = RankGroup(memory, rank, size)

    def new_follower(start: StartRank) -> StageFollower:
        """The engine's path is of no use here."""
        own = replace(started_options(start), threads=size * threads)  # which stages divide
        return StageFollower(model, own, group, after, before, is_alone=True)

    return follow(file, group, parent, new_follower)


if __name__ == "__main__":
    status = main(sys.argv[1], *map(int, sys.argv[2:]))
    sys.stderr.flush()
    os._exit(status)  # at once: what it has is memory
