"""Stages that have a GPU each, and stages of ranks that do: the tokens of one GPU.

python -m pytest tests/gpu_many (on a machine with several GPUs)"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.gpu_serving import Tokens, engine, run
from gpu_many.test_ranks import path, requests
from pipeline.test_processes import stages
from quire.core.errors import EngineFailed

assert path  # a fixture
NUM_GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(NUM_GPUS < 2, reason="needs several GPUs")

DEGREES = [(2, 1), (4, 1), (2, 2), (4, 2)]  # stages, ranks of each


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "op by op"])
def test_stages_give_the_tokens_of_one_gpu(path: Path, dtype: str, eager: bool) -> None:
    found: list[Tokens] = []
    given: dict[str, Any] = {"dtype": dtype, "enforce_eager": eager, "batch_invariant": True}
    for pp, tp in [(1, 1), *(degree for degree in DEGREES if degree[0] * degree[1] <= NUM_GPUS)]:
        with engine(path, pipeline_parallel_size=pp, tensor_parallel_size=tp, **given) as served:
            found.append(run(served, requests()))
    assert all(tokens == found[0] for tokens in found)


def test_the_first_gpu_is_that_of_the_engine(path: Path) -> None:
    with engine(path, pipeline_parallel_size=2, kv_cache_memory_bytes=None) as served:
        assert served.executor._ops.device == torch.device("cuda", 0)  # type: ignore[attr-defined]
        assert served.capacity.num_blocks > 100
        run(served, requests())


def test_a_killed_stage_is_noticed(path: Path) -> None:
    with engine(path, pipeline_parallel_size=2) as served:
        run(served, requests())
        [stage] = stages(os.getpid())
        os.kill(stage, signal.SIGKILL)
        with pytest.raises(EngineFailed, match=r"stage 1 of 2 .* was killed by signal 9"):
            run(served, requests())
