"""Prefixes beyond a GPU's memory: in pinned memory and on disk. On a CPU, the plain cache stands for the GPU's.

python -m pytest tests/engine/test_gpu_tiers.py"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from quire import LLM
from quire.core import kv_tiers
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.executors.local import LocalExecutor
from quire.executors.options import ExecutorOptions
from quire.ops.kv_spec import KVSpec
from quire.ops.reference.cache import TorchCache
from quire.runtime import disk_tier
from quire.runtime.disk_tier import DiskTier

BACKEND = "cuda" if torch.cuda.is_available() else "torch"
BLOCK_BYTES = 2 * 2 * 3 * 16 * 2 * 16  # of the tiny model in 16 bits
PARAMS = SamplingParams(temperature=0, seed=0, max_tokens=3, ignore_eos=True)


@contextmanager
def serving(model: Path, **options: object) -> Iterator[Engine]:
    """A pool of 20 blocks."""
    given = {"max_num_seqs": 4, "max_model_len": 256, "kv_cache_memory_bytes": 20 * BLOCK_BYTES, **options}
    executor = LocalExecutor(model, ExecutorOptions(backend=BACKEND, dtype="float16", **given))
    engine = Engine(executor, EngineOptions(max_num_seqs=4, max_model_len=256))
    try:
        yield engine
    finally:
        engine.stop()


def answer(engine: Engine, name: str, prompt: list[int]) -> tuple[list[int], int]:
    """Tokens, and how many prompt tokens were cached."""
    engine.submit(Request(id=name, prompt_ids=prompt, params=PARAMS))
    tokens, num_cached = [], 0
    while engine.has_work:
        for event in engine.step():
            tokens += event.tokens
            num_cached = max(num_cached, event.num_cached)
    return tokens, num_cached


def prompts() -> list[list[int]]:
    make = torch.Generator().manual_seed(3)
    return [torch.randint(3, 250, (145,), generator=make).tolist() for _ in range(3)]


@pytest.fixture(autouse=True)
def always_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskTier, "read_seconds", lambda self, num_blocks: 0.0)
    monkeypatch.setattr(disk_tier, "FIND_SECONDS", 60.0)
    monkeypatch.setattr(kv_tiers, "MIN_FETCH_SECONDS", 60.0)


def test_evicted_prefixes_come_back_from_the_host_with_the_same_tokens(tiny_model: Path) -> None:
    with serving(tiny_model, offload_bytes=80 * BLOCK_BYTES) as engine:
        assert engine.capacity.offload and engine.capacity.num_host_blocks == 80
        cold = [answer(engine, f"cold {i}", prompt) for i, prompt in enumerate(prompts())]
        warm = [answer(engine, f"warm {i}", prompt) for i, prompt in enumerate(prompts())]
        assert [tokens for tokens, _ in warm] == [tokens for tokens, _ in cold]
        assert [cached for _, cached in warm] == [144] * 3
        assert engine.stats().tiers["host"].hits > 2 * 144  # the rest was still in the pool


def test_a_restarted_engine_reads_the_disk_through_host_blocks(tiny_model: Path, tmp_path: Path) -> None:
    options = {"kv_disk_path": str(tmp_path), "kv_disk_bytes": 2**30, "offload_bytes": 40 * BLOCK_BYTES}
    with serving(tiny_model, **options) as engine:
        cold = [answer(engine, f"cold {i}", prompt)[0] for i, prompt in enumerate(prompts())]
    with serving(tiny_model, **options) as engine:
        warm = [answer(engine, f"warm {i}", prompt) for i, prompt in enumerate(prompts())]
        assert warm == [(tokens, 144) for tokens in cold]
        assert engine.stats().tiers["disk"].hits == 3 * 144


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "fp8"])
def test_the_buffers_of_a_host_block_are_all_of_it(dtype: str) -> None:
    spec = KVSpec(2, 3, 16, 16, dtype)
    cache = TorchCache(spec, 3, 4, "cpu")
    for page in cache.pages:
        page.view(torch.uint8).random_(1, 120)
    cache.swap_out([(1, 2)])
    cache.swapped()()
    content = [buffer.copy() for buffer in cache.host_buffers(2)]
    assert sum(buffer.nbytes for buffer in content) == sum(page[:, 0].nbytes for page in cache.pages)
    for buffer, copied in zip(cache.host_buffers(0), content, strict=True):
        buffer[:] = copied
    cache.swap_in([(0, 2)])
    for page in cache.pages:
        assert torch.equal(page[:, 2].contiguous().view(torch.uint8), page[:, 1].contiguous().view(torch.uint8))


def test_a_cpu_says_that_it_has_no_host_tier(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        llm = LLM(tiny_model, device="cpu", kv_offloading_size=1)
    assert "kv_offloading_size has no effect on a CPU" in caplog.text
    assert llm.engine.capacity.num_host_blocks == 0 and llm.engine.stats().tiers == {}
