"""Stages one after the other in one process: the same op sets as processes have, without their start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.checking import BLOCK_SIZE, MAX_LEN, on_host
from quire.executors.pipeline.stage_model import divide_model
from quire.models.registry import family
from quire.ops.native import NativeOps
from quire.ops.native.hidden_states import NativeHiddenStates
from quire.ops.native.recorder import SymbolicBatch
from quire.ops.opset import ProgramSpec
from quire.ops.stages.opset import StageOps
from quire.ops.stages.parts import StagePart
from quire.runtime.adapters import LoraAdapters
from quire.weights.checkpoint import open_checkpoint
from ranks.rank_threads import batch_of, spec_of


class Stage:
    def __init__(
        self, path: Path, index: int, size: int, adapters: dict[str, Path] | None = None, backend: Any = None
    ) -> None:
        """`backend`: the op set; None: a CPU's."""
        checkpoint = open_checkpoint(path)
        module = family(checkpoint.config.architecture)
        config = module.config(checkpoint.config)
        ops = StageOps(NativeOps(1) if backend is None else backend)
        parts: list[StagePart] = divide_model(module, checkpoint, config, MAX_LEN, size)
        self.part = parts[index]
        ops.begin(self.part)
        kind = np.float32 if backend is None or backend.dtype.itemsize == 4 else np.int16
        self.received = np.zeros((MAX_LEN, parts[index - 1].handed_columns), kind)
        if index:
            ops.received = NativeHiddenStates(self.received) if backend is None else _fetched(self.received, backend)
        self.model = module.load(ops, checkpoint, config, MAX_LEN)
        self.spec = spec_of(config)
        self.cache: Any = ops.new_cache(self.spec, MAX_LEN // BLOCK_SIZE)
        held = LoraAdapters(ops, self.model, num_slots=4, max_rank=64) if adapters else None  # type: ignore[arg-type]
        if held:
            ops.bind_slots(held.forward, held.slots, SymbolicBatch())  # type: ignore[arg-type]
        self.program = ops.compile(
            held.forward if held else self.model.forward, self.cache, ProgramSpec(MAX_LEN, 1, MAX_LEN)
        )
        for slot, (name, place) in enumerate((adapters or {}).items()):
            assert held is not None
            held.add(name, held.load(place))
            held.put(slot, name)


class InStages:
    """A model, by `size` stages."""

    def __init__(
        self,
        path: Path,
        size: int,
        adapters: dict[str, Path] | None = None,
        new_backend: Callable[[], Any] = lambda: None,
    ) -> None:
        self.stages = [Stage(path, index, size, adapters, new_backend()) for index in range(size)]

    def logits(self, ids: list[int], start: int = 0, adapter: int | None = None, all_rows: bool = False) -> np.ndarray:
        batch = batch_of(ids, start, adapter)
        if all_rows:
            batch.logit_rows = np.arange(batch.num_tokens, dtype=np.int32)
        wanted, batch.logit_rows = batch.logit_rows, np.zeros(0, np.int32)
        hidden = None
        for stage in self.stages:
            if hidden is not None:
                stage.received[: len(hidden)] = hidden
                batch.hidden_rows = np.arange(len(hidden), dtype=np.int32)
            if stage is self.stages[-1]:
                batch.logit_rows = wanted
            logits = stage.program.run(batch)
            hidden = None if stage is self.stages[-1] else _bits(stage.program.kept[: batch.num_tokens])
        return np.array(on_host(logits))


def _bits(kept: Any) -> np.ndarray:
    """The numbers, or of 16 bits what numpy has for them."""
    return (kept.view(torch.int16).numpy() if kept.dtype in (torch.float16, torch.bfloat16) else on_host(kept)).copy()


def _fetched(rows: np.ndarray, backend: Any) -> Any:
    """As a GPU reads what is on the host."""
    from quire.ops.gpu.stage_rows import FetchedHiddenStates, HostRows

    return FetchedHiddenStates.of(HostRows(rows, backend.dtype, backend.device), len(rows), backend.device)
