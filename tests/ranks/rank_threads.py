"""Ranks as threads of one process: the same op sets, memory and barriers as processes have, without their start."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from models.checking import BLOCK_SIZE, MAX_LEN, on_host
from quire.executors.ranks.shapes import trace_roles
from quire.models.config import ModelConfig
from quire.models.registry import family
from quire.ops.kv_spec import KVSpec
from quire.ops.opset import ProgramSpec, StepBatch
from quire.ops.ranks.cuts import RankIndex
from quire.ops.ranks.group import RankGroup, new_shared_memory
from quire.ops.ranks.lora import bind_slots
from quire.ops.ranks.opset import RankOps
from quire.runtime.adapters import LoraAdapters
from quire.runtime.kv import kv_spec
from quire.weights.checkpoint import open_checkpoint


def backend_ops(backend: str, group: RankGroup | None, threads: int = 1) -> Any:
    """`native`, `native int4` and such, or `torch`."""
    if backend.startswith("native"):
        from quire.ops.native import NativeOps

        return NativeOps(threads, backend.partition(" ")[2] or None, group=group)
    from quire.ops.reference import TorchOps

    return TorchOps(threads=1, group=group)


def spec_of(config: ModelConfig) -> KVSpec:
    """With one state slot, where the model has such."""
    spec = kv_spec(config, BLOCK_SIZE, "float32")
    return replace(spec, states=spec.states and replace(spec.states, num_slots=1))


class OneProcess:
    """A model as one process computes it."""

    def __init__(self, backend: str, path: Path, adapters: dict[str, Path] | None = None) -> None:
        self._load(backend_ops(backend, None), path, adapters)

    def _load(self, ops: Any, path: Path, adapters: dict[str, Path] | None) -> None:
        checkpoint = open_checkpoint(path)
        module = family(checkpoint.config.architecture)
        config = module.config(checkpoint.config)
        spec = spec_of(config)
        if isinstance(ops, RankOps):
            ops = ops.for_model(trace_roles(module, checkpoint, config, spec, MAX_LEN))
        self.model = module.load(ops, checkpoint, config, MAX_LEN)
        self.cache = cache = ops.new_cache(spec, MAX_LEN // BLOCK_SIZE)
        held = LoraAdapters(ops, self.model, num_slots=4, max_rank=64) if adapters else None
        if held:
            bind_slots(held.slots)
        forward = held.forward if held else self.model.forward
        self.program = ops.compile(forward, cache, ProgramSpec(MAX_LEN, 1, MAX_LEN))
        for slot, (name, place) in enumerate((adapters or {}).items()):
            assert held is not None
            held.add(name, held.load(place))
            held.put(slot, name)

    def logits(self, ids: list[int], start: int = 0, adapter: int | None = None) -> np.ndarray:
        return on_host(self.program.run(batch_of(ids, start, adapter)))

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes


class _Rank(OneProcess):
    def __init__(
        self, backend: str, path: Path, group: RankGroup, adapters: dict[str, Path] | None, threads: int, experts: bool
    ) -> None:
        ops = RankOps(backend_ops(backend, group, threads), RankIndex(group.rank, group.size), experts)
        self._load(ops, path, adapters)


class InRanks:
    """The same model, by `size` ranks. `experts`: each has whole ones."""

    def __init__(
        self,
        backend: str,
        path: Path,
        size: int,
        adapters: dict[str, Path] | None = None,
        threads: int = 1,
        experts: bool = False,
    ) -> None:
        memory = new_shared_memory()
        self.groups = [RankGroup(memory, rank, size) for rank in range(size)]
        self.ranks = [_Rank(backend, path, group, adapters, threads, experts) for group in self.groups]
        self._pool = ThreadPoolExecutor(size)

    def logits(self, ids: list[int], start: int = 0, adapter: int | None = None) -> np.ndarray:
        def run(rank: _Rank) -> np.ndarray:
            return rank.logits(ids, start, adapter)

        first, *_ = self._pool.map(run, self.ranks)
        return first


def batch_of(ids: list[int], start: int, adapter: int | None) -> StepBatch:
    positions = np.arange(start, len(ids), dtype=np.int32)
    table = np.arange(MAX_LEN // BLOCK_SIZE, dtype=np.int32)[::-1].copy()
    return StepBatch(
        ids=np.array(ids[start:], np.int32),
        positions=positions,
        slots=table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        seq_starts=np.array([0, len(positions)], np.int32),
        context_lens=np.array([len(ids)], np.int32),
        block_tables=table[None],
        logit_rows=np.array([0, len(positions) - 1], np.int32)[-len(positions) :],
        adapters=None if adapter is None else np.full(len(positions), adapter, np.int32),
        states=np.array([(len(positions), 0 if start else -1, 0)], np.int32),
    )


def steps(logits: Callable[..., np.ndarray], prompt: list[int], adapter: int | None = None) -> list[np.ndarray]:
    """The logits of a prompt in two chunks, then of greedy tokens."""
    seen = [logits(prompt[:7], 0, adapter), logits(prompt, 7, adapter)]
    ids = list(prompt)
    for _ in range(4):
        ids.append(int(seen[-1][-1].argmax()))
        seen.append(logits(ids, len(ids) - 1, adapter))
    return seen
