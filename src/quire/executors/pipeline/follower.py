"""The process of a stage other than the last: it does what the engine's process says, and has no scheduler and no
sampler of its own.

Started as `python -m quire.executors.pipeline.follower SOCKET MEMORY NEXT [BEFORE] RANK SIZE PARENT` with inherited
file descriptors: NEXT and BEFORE are links to the stages after and before it. The first stage has no BEFORE."""

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.executors.backends import Turn
from quire.executors.options import ExecutorOptions
from quire.executors.pipeline.links import LinkClosed, sender
from quire.executors.pipeline.slots import sender_from
from quire.executors.pipeline.stage import StageExecutor, own_options
from quire.executors.ranks.follower import FollowerExecutor, follow, move_blocks, started_options
from quire.executors.ranks.messages import FromRank, MoveBlocks, RankAdapter, RunStep, StartRank, ToRank
from quire.models.config import ModelConfig
from quire.ops.compiled import native
from quire.ops.kv_spec import KVCache, KVSpec
from quire.ops.opset import Program, ProgramSpec, StepBatch
from quire.ops.ranks.group import RankGroup
from quire.ops.stages.opset import StageCache, StageOps

NOTICE_SECONDS = 1.0  # until a stage ends that has lost its neighbour: the engine is to notice the neighbour first


class StageFollowerOps(StageOps):
    """Keeps what the engine's process calls by number."""

    def __init__(self, ops: Any) -> None:
        super().__init__(ops)
        self.caches: list[StageCache] = []
        self.programs: list[Program] = []

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> StageCache:
        self.caches.append(super().new_cache(spec, num_blocks, num_host_blocks))
        return self.caches[-1]

    def new_sampler(self, num_rows: int, vocab_size: int) -> None:
        return None

    def move_blocks(self, message: MoveBlocks) -> None:
        move_blocks(self.caches, message)

    def compile(self, forward: Callable[[Any, Any], Any], cache: KVCache, spec: ProgramSpec) -> Program:
        self.programs.append(super().compile(forward, cache, spec))
        return self.programs[-1]


class StageFollower(StageExecutor, FollowerExecutor):
    """`before`: None in the first stage. `is_alone`: the other stages are on other machines."""

    def __init__(
        self,
        path: str,
        options: ExecutorOptions,
        group: RankGroup,
        after: socket.socket,
        before: socket.socket | None,
        is_alone: bool = False,
    ) -> None:
        super().__init__(path, options, group)
        self._ends, self._is_alone = (after, before), is_alone
        self._num_steps = 0

    @property
    def _turn(self) -> Turn:
        return Turn(0, self.options.tensor_parallel_size) if self._is_alone else super()._turn

    def _new_ops(self, options: ExecutorOptions, config: ModelConfig) -> StageFollowerOps:  # type: ignore[override]
        own = own_options(options, self.stage, self.group.size)
        ops = self._connect(StageFollowerOps(self._new_backend(own)), options, config)
        after, before = self._ends
        assert self.handed_on is not None
        self._after = sender_from(sender(after, self.handed_on), self.handed_on, options, ops)
        self._before = None if before is None or self.received is None else self._receiver(before, ops)
        return ops

    def do(self, message: ToRank) -> FromRank | None:
        if not isinstance(message, RunStep):
            return self._do_together(message)
        try:
            self._run(self._ops.programs[message.program], message.batch())
        except LinkClosed as error:
            time.sleep(NOTICE_SECONDS)
            raise native.RankLost("a neighbour is gone") from error
        return None

    def _do_together(self, message: ToRank) -> FromRank | None:
        """What rank 0 of a stage is told of adapters, it tells the others."""
        if self.members is None or not isinstance(message, RankAdapter):
            return super().do(message)
        self.members.tell(message)
        answer = super().do(message)
        if answer is not None:
            self.members.answers()
        return answer

    def _run(self, program: Any, batch: StepBatch) -> None:
        step, num_rows = self._num_steps, batch.num_tokens
        self._num_steps += 1
        if not self.options.on_gpu:  # its graphs are those of steps that sample
            batch.logit_rows = np.zeros(0, np.int32)
        if self._before is not None:
            batch.hidden_rows = self._before.receive(step, num_rows)
        program.run(batch)
        self._after.send(step, program.kept[:num_rows])


def linked(links: Sequence[int]) -> tuple[socket.socket, socket.socket | None]:
    """The sockets to the stages after and before this one, of their file descriptors."""
    after, *before = [socket.socket(fileno=link) for link in links]
    return after, before[0] if before else None


def main(file: int, memory: int, *files_and_ids: int) -> int:
    *links, rank, size, parent = files_and_ids
    after, before = linked(links)
    group = RankGroup(memory, rank, size)

    def new_follower(start: StartRank) -> StageFollower:
        return StageFollower(start.path, started_options(start), group, after, before)

    return follow(file, group, parent, new_follower)


if __name__ == "__main__":
    status = main(*map(int, sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)  # at once: what it has is memory
