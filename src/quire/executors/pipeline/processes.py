"""The processes of all stages but the last: started, connected with their neighbours, told what to do, and watched."""

import socket

from quire.executors.ranks.processes import RankProcess, RankProcesses


class StageProcess(RankProcess):
    module = "quire.executors.pipeline.follower"


class StageProcesses(RankProcesses):
    """Stages 1 and following, as people count: rank n is stage n, and rank 0, the engine's, is the last."""

    member = "stage"
    last_end: socket.socket | None = None  # the end of the newest link that the next stage reads from

    def _start(self, rank: int, size: int, memory: int) -> RankProcess:
        theirs, end = socket.socketpair()
        with theirs:
            before = [] if self.last_end is None else [self.last_end.fileno()]
            started = StageProcess(rank, size, memory, [theirs.fileno(), *before])
        if self.last_end is not None:
            self.last_end.close()
        self.last_end = end
        return started

    def stop(self) -> None:
        super().stop()
        if self.last_end is not None:
            self.last_end.close()
