"""One rank that exchanges with itself, as ranks with a GPU each do: NCCL in CUDA graphs, with the tokens of an engine
without ranks. A communicator of one is all that one GPU can have; the code is that of several.

    python -m pytest tests/ranks/test_gpu_one_rank.py

Without a GPU, gloo stands for NCCL, and steps are launched op by op."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, MixtralConfig, Qwen3NextConfig

from engine import test_gpu_latent
from engine.gpu_serving import engine, run, save_llama
from engine.test_gpu_adapters import EVERYWHERE, give
from models.checking import PROMPT, TINY, random_model
from models.plain_adapters import write_adapter
from quire.core.request import Request
from quire.engine.options import EngineOptions
from quire.engine.start import executor_options
from quire.executors.ranks.rank import RankExecutor
from quire.ops.gpu.collectives import GpuRankOps, GroupExchange
from quire.ops.ranks.cuts import Cut
from quire.ops.ranks.group import RankGroup, new_shared_memory
from ranks import test_gpu_rank_families
from ranks.gpu_threads import GpuRanks, OnOneDevice
from ranks.test_gpu_rank_engines import requests, save_mixtral, save_next

ON_GPU = torch.cuda.is_available()
COLUMNS, ROWS = "all_columns", "all_rows"


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, bool]]:
    """All of a value's columns count as a part of it, so they are gathered. -> calls, by name and whether a graph was
    captured"""
    calls: Counter[tuple[str, bool]] = Counter()

    def counted(name: str) -> Callable[..., torch.Tensor]:
        exchange = getattr(GroupExchange, name)

        def call(self: GroupExchange, *args: Any, **named: Any) -> torch.Tensor:
            calls[name, ON_GPU and torch.cuda.is_current_stream_capturing()] += 1
            result: torch.Tensor = exchange(self, *args, **named)
            return result

        return call

    for name in (COLUMNS, ROWS):
        monkeypatch.setattr(GroupExchange, name, counted(name))
    monkeypatch.setattr(Cut, "is_whole", property(lambda cut: False))
    return calls


def one_rank(path: Path, options: EngineOptions) -> RankExecutor:
    return RankExecutor(path, executor_options(options), RankGroup(new_shared_memory(), 0, 1))


def gloo_exchange(group: Any) -> GroupExchange:
    return GroupExchange(torch.distributed.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1), group)


@pytest.mark.skipif(ON_GPU, reason="kernels are interpreted here")
def test_a_norm_of_all_heads_is_gated_before_it_is_rounded(
    tmp_path: Path, exchanged: Counter[tuple[str, bool]]
) -> None:
    """Where every rank computes all heads of a recurrence, and its part of their gate."""
    sizes = test_gpu_rank_families.ONE_LAYER | test_gpu_rank_families.STATES
    random_model(Qwen3NextConfig(**sizes), seed=3).save_pretrained(tmp_path)
    rank = GpuRanks(tmp_path, 1, experts=True, new_exchange=gloo_exchange, dtype="float16")
    test_gpu_rank_families.check(OnOneDevice(tmp_path, dtype="float16"), rank)


@pytest.mark.skipif(ON_GPU, reason="kernels are interpreted here")
@pytest.mark.parametrize("experts", [False, True])
def test_gloo(tmp_path: Path, exchanged: Counter[tuple[str, bool]], experts: bool) -> None:
    sizes = TINY | {"num_hidden_layers": 1, "num_local_experts": 3, "num_experts_per_tok": 2}
    random_model(MixtralConfig(**sizes), seed=3).save_pretrained(tmp_path)

    rank = GpuRanks(tmp_path, 1, experts=experts, new_exchange=gloo_exchange)
    np.testing.assert_array_equal(rank.logits(PROMPT[:5]), OnOneDevice(tmp_path).logits(PROMPT[:5]))
    assert exchanged[COLUMNS, False] >= 5 and exchanged[ROWS, False] == experts


MODELS: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "llama": (lambda folder: save_llama(folder, 64), {}),
    "int4": (lambda folder: save_llama(folder, 64), {"quantization": "int4"}),
    "MoE": (save_mixtral, {}),
    "whole experts": (save_mixtral, {"enable_expert_parallel": True}),
    "MLA": (lambda folder: test_gpu_latent.save(folder, 1), {}),
    "states": (save_next, {}),
}


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", MODELS)
def test_graphs_with_collectives_replay(tmp_path: Path, exchanged: Counter[tuple[str, bool]], name: str) -> None:
    save, options = MODELS[name]
    path = save(tmp_path)
    with engine(path, batch_invariant=True, **options) as served:
        expected = run(served, requests())
    assert not exchanged
    with engine(path, one_rank, batch_invariant=True, **options) as served:
        check_graphs(served, exchanged, ROWS if name == "whole experts" else COLUMNS)
        launched = exchanged.copy()
        for _ in range(2):
            assert run(served, requests()) == expected
        assert exchanged == launched, "every step is replayed"


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_graphs_with_adapters_replay(tmp_path: Path, exchanged: Counter[tuple[str, bool]]) -> None:
    """Steps with prompts of adapters are launched op by op, on one device as well."""
    path = save_llama(tmp_path / "model", 64)
    model = LlamaForCausalLM.from_pretrained(path)
    adapters = {"a": write_adapter(model, tmp_path / "a", dict.fromkeys(EVERYWHERE, 16), 1)}
    wanted = [
        Request(id=f"{name}{request.id}", prompt_ids=request.prompt_ids, params=request.params, adapter=name)
        for name in ("", "a")
        for request in requests()
    ]
    found = []
    for new_executor in ({}, {"new_executor": one_rank}):
        options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16, **new_executor}
        with engine(path, batch_invariant=True, **options) as served:
            give(served, adapters)
            found.append(run(served, wanted))
            if new_executor:
                check_graphs(served, exchanged, COLUMNS)
                assert served.executor.runner.program._decode_graphs[True]  # type: ignore[attr-defined]
    assert found[0] == found[1] and found[0]["r0"] != found[0]["ar0"]


def check_graphs(served: Any, exchanged: Counter[tuple[str, bool]], name: str) -> None:
    backend = served.executor._ops.backend
    assert isinstance(backend, GpuRankOps) and isinstance(backend._exchange, GroupExchange) and backend.graphs
    program = served.executor.runner.program
    assert program._decode_graphs[False] and program._prefill_graphs
    assert exchanged[name, True] > 0
