"""Stages with the GPU's op set where there is no GPU: kernels are interpreted, in processes of their own.

Run as a module, it is the process of such a stage."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.engine.engine import Engine
from quire.engine.start import executor_options, load_tokenizer
from quire.executors.backends import Turn, new_ops
from quire.executors.local import LocalExecutor
from quire.executors.options import ExecutorOptions
from quire.executors.pipeline import follower
from quire.executors.pipeline.leader import PipelineExecutor
from quire.executors.pipeline.processes import StageProcess
from quire.models.config import ModelConfig
from quire.ops.gpu import device


def on_cpu(index: int, size: int) -> tuple[torch.device, int]:
    """In the place of `take_turn`."""
    return torch.device("cpu"), 1


class OnOneDevice(LocalExecutor):
    def _new_ops(self, options: ExecutorOptions, config: ModelConfig) -> Any:
        return new_ops(options, turn=Turn(0, 1))


def llm_of(model: Path, size: int, monkeypatch: pytest.MonkeyPatch, dtype: str = "float32", **options: Any) -> LLM:
    """An engine with `size` stages; of 1: in this process."""
    monkeypatch.setattr(device, "take_turn", on_cpu)
    monkeypatch.setattr(StageProcess, "module", "pipeline.interpreted")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    llm = LLM(model, **options)
    llm.engine.stop()
    given = replace(executor_options(llm.options), backend="cuda", dtype=dtype, batch_invariant=True)
    executor = PipelineExecutor(model, given, size) if size > 1 else OnOneDevice(model, given)
    tokenizer = load_tokenizer(model, llm.options)
    llm.engine = Engine(executor, llm.options, lambda: tokenizer)
    return llm


if __name__ == "__main__":
    import triton_interpreter

    triton_interpreter.prepare()
    device.take_turn = on_cpu
    status = follower.main(*map(int, sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)
