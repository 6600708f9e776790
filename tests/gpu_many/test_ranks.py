"""Ranks that have a GPU each: the tokens of one GPU, gathered by NCCL inside CUDA graphs.

python -m pytest tests/gpu_many (on a machine with several GPUs)"""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.gpu_serving import NUM_NEW, VOCAB, Tokens, engine, run
from quire.core.errors import EngineFailed
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.ops.gpu.collectives import GpuRankOps, GroupExchange
from ranks.processes import followers
from ranks.test_gpu_rank_engines import CASES

NUM_GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(NUM_GPUS < 2, reason="needs several GPUs")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight KV heads: one for each of eight ranks."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 512}
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.1)).save_pretrained(folder)
    return folder


def requests() -> list[Request]:
    make = np.random.default_rng(3)
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.8, seed=1, ignore_eos=True)
    prompts = [make.integers(0, VOCAB, length).tolist() for length in (7, 130, 33, 1)]
    return [Request(id=f"r{number}", prompt_ids=ids, params=params) for number, ids in enumerate(prompts)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "op by op"])
def test_ranks_give_the_tokens_of_one_gpu(path: Path, dtype: str, eager: bool) -> None:
    found: list[Tokens] = []
    for size in (size for size in (1, 2, 4, 8) if size <= NUM_GPUS):
        options = {"dtype": dtype, "enforce_eager": eager, "batch_invariant": True, "tensor_parallel_size": size}
        with engine(path, **options) as served:
            if size > 1:
                backend = served.executor._ops.backend  # type: ignore[attr-defined]
                assert isinstance(backend, GpuRankOps) and isinstance(backend._exchange, GroupExchange)
                assert backend.graphs != eager
            found.append(run(served, requests()))
    assert all(tokens == found[0] for tokens in found)


@pytest.mark.parametrize("name", ["MoE", "MoE, whole experts", "MLA", "states", "int4", "three KV heads"])
def test_what_ranks_divide_gives_the_tokens_of_one_gpu(tmp_path: Path, name: str) -> None:
    save, options = CASES[name]
    path, found = save(tmp_path), []
    for size in (1, 2):
        with engine(path, batch_invariant=True, tensor_parallel_size=size, **options) as served:
            found.append(run(served, requests()))
    assert found[0] == found[1]


def test_room_is_that_of_the_gpu_with_the_least(path: Path) -> None:
    with engine(path, tensor_parallel_size=2, kv_cache_memory_bytes=None) as served:
        assert served.capacity.num_blocks > 100
        run(served, requests())


def test_a_killed_rank_is_noticed(path: Path) -> None:
    with engine(path, tensor_parallel_size=2) as served:
        run(served, requests())
        [rank] = followers(os.getpid())
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineFailed, match=r"rank 1 of 2 .* was killed by signal 9"):
            run(served, requests())
