"""The process of a rank other than 0: it does what rank 0 says, and has no scheduler and no sampler of its own.

Started as `python -m quire.executors.ranks.follower SOCKET MEMORY RANK SIZE PARENT` with two inherited file
descriptors. It ends when the other end of the socket is closed or when PARENT, the process of rank 0, is gone."""

import logging
import os
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.core.errors import QuireError
from quire.executors.options import ExecutorOptions
from quire.executors.ranks.encoder import RankEncoder
from quire.executors.ranks.messages import (
    MOVES,
    AllocateRank,
    FromRank,
    LoadRankAdapter,
    MoveBlocks,
    PutHiddenStates,
    PutRankAdapter,
    RankFailed,
    RankLoaded,
    RankReady,
    RemoveRankAdapter,
    RunStep,
    StartRank,
    ToRank,
    decode_to_rank,
    encode,
)
from quire.executors.ranks.rank import RankExecutor
from quire.executors.ranks.sizes import counts, smallest
from quire.ipc.channel import Channel
from quire.ops.compiled import native
from quire.ops.kv_spec import KVCache, KVSpec
from quire.ops.opset import Program, ProgramSpec
from quire.ops.ranks.group import RankGroup
from quire.ops.ranks.opset import RankCache, RankOps
from quire.runtime.kv import KVSize


class FollowerOps(RankOps):
    """Keeps what rank 0 calls by number."""

    def __init__(self, ops: Any, index: Any, expert_parallel: bool = False) -> None:
        super().__init__(ops, index, expert_parallel)
        self.caches: list[RankCache] = []
        self.programs: list[Program] = []
        self.hidden_states: list[Any] = []
        self._moves = ops.group.counters()

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> RankCache:
        cache = super().new_cache(spec, num_blocks, num_host_blocks)
        if num_host_blocks:
            self.share_host_blocks(cache, num_host_blocks)
        self.caches.append(cache)
        return cache

    def move_blocks(self, message: MoveBlocks) -> None:
        move_blocks(self.caches, message)
        self._moves[self.index.rank] += 1

    def compile(self, forward: Callable[[Any, Any], Any], cache: KVCache, spec: ProgramSpec) -> Program:
        self.programs.append(super().compile(forward, cache, spec))
        return self.programs[-1]

    def new_hidden_states(self, num_rows: int, num_columns: int) -> Any:
        self.hidden_states.append(self.backend.new_hidden_states(num_rows, num_columns))
        return self.hidden_states[-1]


def move_blocks(caches: Sequence[Any], message: MoveBlocks) -> None:
    assert message.how in MOVES, message.how
    getattr(caches[message.cache], message.how)(message.pairs)
    if message.how == "swap_out":  # the next step may write these blocks
        caches[message.cache].join_swaps()


class FollowerEncoder(RankEncoder):
    ops_type = FollowerOps

    def do(self, message: ToRank) -> FromRank | None:
        if isinstance(message, StartRank):
            return RankReady()
        assert isinstance(message, RunStep), message
        self._ops.programs[message.program].run(message.batch())
        return None


class FollowerExecutor(RankExecutor):
    ops_type = FollowerOps
    size: KVSize  # the largest that fits

    def do(self, message: ToRank) -> FromRank | None:
        match message:
            case RunStep():
                self._ops.programs[message.program].run(message.batch())
            case MoveBlocks():
                self._ops.move_blocks(message)
            case PutHiddenStates(hidden, program):
                rows, lines = message.places
                self._ops.hidden_states[hidden].put(rows, self._ops.programs[program], lines)
            case PutRankAdapter(slot, key):
                self.adapters.put(slot, key)
            case LoadRankAdapter(key, path):
                self.add_adapter(key, self.load_adapter(Path(path)))
                return RankReady()
            case RemoveRankAdapter(key):
                self.remove_adapter(key)
            case AllocateRank():
                self.allocate(smallest([self.size, message]))
                return RankReady()
            case StartRank():
                try:
                    self.size = self.load()
                except QuireError:
                    self.group.native.abort()  # others may wait for this one
                    raise
                return RankLoaded(*counts(self.size), self.weight_bytes)
        return None


Follower = FollowerExecutor | FollowerEncoder


def main(file: int, memory: int, rank: int, size: int, parent: int) -> int:
    group = RankGroup(memory, rank, size)
    return follow(file, group, parent, lambda start: _new_executor(start, group))


def follow(file: int, group: RankGroup, parent: int, new_executor: Callable[[StartRank], Follower]) -> int:
    """Do what rank 0 says, until its end of the socket `file` is closed. -> the exit status"""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to stop
    logging.basicConfig(level=logging.ERROR)  # rank 0 has the same to say
    group.native.start_heartbeat(parent)
    channel = Channel(socket.socket(fileno=file))
    executor: Follower | None = None
    for message in _messages(channel):
        try:
            if isinstance(message, StartRank):
                executor = new_executor(message)
            assert executor is not None, message
            answer = executor.do(message)
        except native.RankLost:
            return 0  # rank 0 knows
        except QuireError as error:
            answer = RankFailed.of(error)
        if answer is not None:
            channel.send(encode(answer))
    return 0


def started_options(start: StartRank) -> ExecutorOptions:
    return ExecutorOptions(**{**start.options, "speculation": start.speculation})  # type: ignore[arg-type]


def _new_executor(start: StartRank, group: RankGroup) -> Follower:
    if start.encodes:
        return FollowerEncoder(Path(start.path), started_options(start), group)
    return FollowerExecutor(start.path, started_options(start), group)


def _messages(channel: Channel) -> Iterator[ToRank]:
    """The messages of rank 0 as they come, until it has closed its end."""
    waiting: deque[bytes] = deque()
    while not channel.ended:
        while waiting:
            yield decode_to_rank(waiting.popleft())
        select.select([channel], [], [])
        waiting += channel.receive()


if __name__ == "__main__":
    status = main(*map(int, sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)  # at once: what it has is memory
