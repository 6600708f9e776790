"""Stages of two ranks each, for all kinds of layers: the bits of one process. Ranks are threads here."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.checking import BLOCK_SIZE, MAX_LEN, PROMPT, TINY, random_model
from pipeline.test_families import CASES
from quire.executors.options import ExecutorOptions
from quire.executors.pipeline.slots import received_from, shared_slots
from quire.executors.pipeline.stage_model import begin_stage, divide_model
from quire.models.registry import family
from quire.ops.native import NativeOps
from quire.ops.opset import ProgramSpec
from quire.ops.ranks.cuts import RankIndex
from quire.ops.ranks.group import RankGroup, new_shared_memory
from quire.ops.ranks.opset import RankOps
from quire.ops.stages.opset import StageOps
from quire.runtime.kv import kv_spec
from quire.weights.checkpoint import open_checkpoint
from ranks.rank_threads import OneProcess, batch_of, steps

SIZE = 2  # stages, and ranks of each
# One of each kind of layers, and of weights before and behind them.
NAMES = ["llama", "lfm2", "qwen3-moe", "opt-projected", *(name for name in CASES if name.startswith("deepseek"))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(name: str) -> Path:
        config, options = CASES[name]
        path = tmp_path_factory.mktemp(name)
        random_model(config(**{**TINY, **options}), seed=len(name)).save_pretrained(path)
        return path

    return make


class StageRank:
    def __init__(self, path: Path, stage: int, group: RankGroup, experts: bool) -> None:
        checkpoint = open_checkpoint(path)
        kind = family(checkpoint.config.architecture)
        config = kind.config(checkpoint.config)
        spec = kv_spec(config, BLOCK_SIZE, "float32")
        ops: Any = StageOps(RankOps(NativeOps(1, group=group), RankIndex(group.rank, group.size), experts))
        given: Any = {"tensor_parallel_size": SIZE, "enable_expert_parallel": experts}
        options = ExecutorOptions(max_num_batched_tokens=MAX_LEN, **given)
        begin_stage(ops, options, kind, checkpoint, config, spec, MAX_LEN, stage=stage, num_stages=SIZE)
        if stage:
            [first, _] = divide_model(kind, checkpoint, config, MAX_LEN, SIZE)
            ops.received = received_from(shared_slots(group, options, first.handed_columns, SIZE), options, ops)
        self.received = ops.received
        self.model = kind.load(ops, checkpoint, config, MAX_LEN)
        self.program = ops.compile(
            self.model.forward, ops.new_cache(spec, MAX_LEN // BLOCK_SIZE), ProgramSpec(MAX_LEN, 1, MAX_LEN)
        )


class Grid:
    """A model, by two stages of two ranks."""

    def __init__(self, path: Path, experts: bool = False) -> None:
        memories = [new_shared_memory() for _ in range(SIZE)]
        groups = [[RankGroup(memory, rank, SIZE) for rank in range(SIZE)] for memory in memories]
        self.stages = [[StageRank(path, stage, one, experts) for one in own] for stage, own in enumerate(groups)]
        self._pool = ThreadPoolExecutor(SIZE)

    def logits(self, ids: list[int], start: int = 0, adapter: int | None = None) -> np.ndarray:
        hidden: np.ndarray | None = None
        for ranks in self.stages:
            is_last = ranks is self.stages[-1]
            if hidden is not None:
                ranks[0].received.rows[: len(hidden)] = hidden

            def run(rank: StageRank, is_last: bool = is_last) -> np.ndarray:
                batch = batch_of(ids, start, adapter)
                if not is_last:
                    batch.logit_rows = np.zeros(0, np.int32)
                if rank.received is not None:
                    batch.hidden_rows = np.arange(batch.num_tokens, dtype=np.int32)
                logits = rank.program.run(batch)
                return np.array(logits if is_last else rank.program.kept[: batch.num_tokens])

            first, second = self._pool.map(run, ranks)
            assert is_last or np.array_equal(first, second), "every rank has all hidden states"
            hidden = first
        assert hidden is not None
        return hidden


@pytest.mark.parametrize("name", NAMES)
def test_stages_of_ranks_give_the_bits_of_one_process(checkpoint: Callable[[str], Path], name: str) -> None:
    path = checkpoint(name)
    alone = steps(OneProcess("native", path).logits, PROMPT)
    for experts in (False, True) if "moe" in name else (False,):
        for ours, theirs in zip(steps(Grid(path, experts).logits, PROMPT), alone, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_every_rank_of_every_stage_has_a_quarter_of_the_weights(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("llama")
    whole = OneProcess("native", path).weight_bytes
    parts = [rank.model.weight_bytes for stage in Grid(path).stages for rank in stage]
    assert whole <= sum(parts) < 1.1 * whole and max(parts) < 0.45 * whole
