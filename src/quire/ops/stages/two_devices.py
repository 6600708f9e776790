"""TwoDeviceOps: the first layers of a model on one device, the others on another, in one process: a step goes through
both, one after the other."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quire.ops.kv_spec import KVCache, KVSpec
from quire.ops.opset import Chain, HiddenStates, Program, ProgramSpec, StepBatch
from quire.ops.stages.opset import StageCache, StageOps
from quire.ops.stages.parts import StagePart

Forward = Callable[[Any, Any], Any]


class TwoDeviceOps(StageOps):
    """The op set of the last layers. `first`: that of the layers before them, whose backend is a CPU's."""

    first_forward: Forward  # of the same model, loaded with `first`

    def __init__(self, first: Any, last: Any) -> None:
        super().__init__(last)
        self.first = StageOps(first)

    def begin_both(self, parts: Sequence[StagePart], max_tokens: int) -> None:
        """The weights of a model come next."""
        first, last = parts
        self.first.begin(first)
        self.begin(last)
        self.received = self.backend.new_hidden_states(max_tokens, first.handed_columns)

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> "TwoCaches":
        caches = [StageOps.new_cache(ops, spec, num_blocks, num_host_blocks) for ops in (self.first, self)]
        return TwoCaches(spec, *caches)

    def compile(self, forward: Forward, cache: KVCache, spec: ProgramSpec) -> "TwoPrograms":
        assert isinstance(cache, TwoCaches) and self.received is not None
        of_first = replace(spec, sampler=None, sources=False, tree_nodes=0, hidden=None)
        first = self.first.compile(self.first_forward, cache.first, of_first)
        last = super().compile(forward, cache.last, spec)
        return TwoPrograms(first, last, self.received)


class TwoCaches(StageCache):
    """The layers of every block on both devices: what moves on one moves on the other."""

    def __init__(self, spec: KVSpec, first: StageCache, last: StageCache) -> None:
        super().__init__(spec, last.own)
        self.first, self.last = first, last
        for how in ("copy", "swap_out", "swap_in", "move"):
            setattr(self, how, _both(getattr(first, how), getattr(last, how)))
        self.join_swaps = self._join_swaps

    def _join_swaps(self) -> None:
        self.first.join_swaps()
        self.last.join_swaps()


def _both(first: Callable[[Any], None], last: Callable[[Any], None]) -> Callable[[Any], None]:
    def move(pairs: Any) -> None:
        last(pairs)  # queued, where the device queues
        first(pairs)

    return move


class TwoPrograms:
    takes_trees = False
    chain: Chain | None = None
    kept = None

    def __init__(self, first: Program, last: Program, received: HiddenStates) -> None:
        self._first, self._last, self._received = first, last, received

    def run(self, batch: StepBatch) -> Any:
        """-> logits"""
        num_rows = batch.num_tokens
        self._first.run(replace(batch, logit_rows=np.zeros(0, np.int32)))
        assert self._first.kept is not None
        self._received.load(self._first.kept[:num_rows])
        return self._last.run(replace(batch, hidden_rows=np.arange(num_rows, dtype=np.int32)))
