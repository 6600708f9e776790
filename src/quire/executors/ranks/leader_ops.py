"""LeaderOps: the op set of rank 0. What its caches, programs and hidden states do, it tells the other ranks first."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Self

from quire.executors.ranks.messages import MOVES, MoveBlocks, PutHiddenStates, RunStep
from quire.executors.ranks.processes import RankProcesses
from quire.ops.compiled import native
from quire.ops.kv_spec import KVCache, KVSpec
from quire.ops.opset import Chain, HiddenStates, Int32, Program, ProgramSpec, StepBatch
from quire.ops.ranks.opset import HostPart, RankCache, RankOps

Tell = Callable[[Any], None]

POLL_SECONDS = 50e-6  # between looks at what other ranks have done


class LeaderOps(RankOps):
    """What its caches, programs and hidden states do, those of the other ranks do too: they have the same numbers."""

    _ranks: RankProcesses
    _moves: "Moves"
    _caches: Iterator[int]
    _programs: Iterator[int]
    _hidden_states: Iterator[int]

    @classmethod
    def leading(cls, ops: RankOps, ranks: RankProcesses) -> Self:
        leader = cls(ops.backend, ops.index, ops.expert_parallel)
        leader._ranks, leader._moves = ranks, Moves(ranks)
        leader._caches, leader._programs, leader._hidden_states = count(), count(), count()
        return leader

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> RankCache:
        cache = super().new_cache(spec, num_blocks, num_host_blocks)
        host = self.share_host_blocks(cache, num_host_blocks) if num_host_blocks else []
        return LeaderCache(cache, next(self._caches), self._moves, host)

    def compile(self, forward: Callable[[Any, Any], Any], cache: KVCache, spec: ProgramSpec) -> "LeaderProgram":
        if isinstance(spec.hidden, LeaderHiddenStates):
            spec = replace(spec, hidden=spec.hidden.own)
        return LeaderProgram(super().compile(forward, cache, spec), next(self._programs), self._ranks)

    def new_hidden_states(self, num_rows: int, num_columns: int) -> "LeaderHiddenStates":
        own = self.backend.new_hidden_states(num_rows, num_columns)
        return LeaderHiddenStates(own, next(self._hidden_states), self._ranks)


class Moves:
    """Moves of blocks that the other ranks were told, and how many of them they have done."""

    def __init__(self, ranks: RankProcesses) -> None:
        self._ranks, self._told = ranks, 0
        self._done = ranks.group.counters()

    def tell(self, message: MoveBlocks) -> None:
        self._told += 1
        self._ranks.tell(message)

    def join(self) -> None:
        """Wait until all are done, which takes as long as this rank's own."""
        while min(self._done[1:]) < self._told:
            if self._ranks.lost:
                raise self._ranks.lost
            time.sleep(POLL_SECONDS)


class LeaderCache(RankCache):
    def __init__(self, cache: RankCache, number: int, moves: Moves, host: Sequence[HostPart]) -> None:
        """`host`: the host blocks of each rank."""
        super().__init__(cache.spec, cache.own)
        self._moves = moves
        for how in MOVES:
            setattr(self, how, telling(how, getattr(cache.own, how), number, moves.tell))
        self.swapped = self._swapped
        self.host_buffers = lambda host_block: [part.blocks[host_block] for part in host]
        self.host_page_buffers = lambda host_block: [part.pages[host_block] for part in host]
        self.host_state_buffers = lambda host_slot: [part.slots[host_slot] for part in host]
        self.rank_bytes = [part.blocks.shape[1] for part in host]  # of a block of each rank

    def _swapped(self) -> Callable[[], None]:
        """Host blocks of all ranks may be read and written when this returns."""
        self._moves.join()
        return self.own.swapped()


def telling(how: str, own: Callable[[Any], None], number: int, tell: Tell) -> Callable[[Any], None]:
    def move(pairs: Sequence[tuple[int, int]]) -> None:
        tell(MoveBlocks(number, how, [(int(source), int(target)) for source, target in pairs]))
        own(pairs)

    return move


class LeaderHiddenStates:
    def __init__(self, own: HiddenStates, number: int, ranks: RankProcesses) -> None:
        self.own, self._number, self._ranks = own, number, ranks

    def put(self, rows: Int32, program: Program, lines: Int32) -> None:
        assert isinstance(program, LeaderProgram)
        self._ranks.tell(PutHiddenStates(self._number, program.number, rows.tobytes(), lines.tobytes()))
        self.own.put(rows, program.own, lines)


class LeaderProgram:
    def __init__(self, own: Program, number: int, ranks: RankProcesses) -> None:
        self.own, self.number, self._ranks = own, number, ranks
        self.takes_trees, self.kept = own.takes_trees, own.kept
        self.chain: Chain | None = None

    def run(self, batch: StepBatch) -> Any:
        """-> logits of all ranks"""
        if self._ranks.lost:
            raise self._ranks.lost
        self._ranks.tell(RunStep.of(self.number, batch))
        try:
            logits = self.own.run(batch)
        except native.RankLost:
            raise self._ranks.reason() from None
        self.kept = self.own.kept
        return logits
