"""Stages that share one GPU: with batch_invariant, the tokens of one process, with CUDA graphs and without.

    python -m pytest tests/pipeline/test_gpu_stages.py

A stage's process takes some seconds to start, so each case is one model, and one engine of two stages."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.gpu_serving import BLOCK, NUM_NEW, VOCAB, Tokens, engine, run
from engine.test_gpu_adapters import EVERYWHERE, give
from engine.test_gpu_states import MODELS as STATES
from engine.test_gpu_windows import MODELS as WINDOWS
from models.plain_adapters import write_adapter
from pipeline.test_processes import stages
from pipeline.test_tcp import Listener
from quire.core.errors import EngineFailed
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.executors.pipeline.leader import PipelineExecutor, QueuedProgram
from quire.ops.gpu.program import GpuProgram
from quire.ops.kv_spec import KVSpec
from ranks.processes import check_that_streams_go_on, exists, followers, wait_until
from ranks.test_gpu_rank_engines import CASES as DIVIDED_BY_RANKS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 4, 8, 2, 64
KINDS = ("MoE", "MoE in int4", "MLA", "states", "three KV heads")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    sizes = {"hidden_size": 512, "intermediate_size": 1344, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 512}
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.1)).save_pretrained(folder)
    return folder


def requests(copies: int = 1, **more: Any) -> list[Request]:
    make = np.random.default_rng(3)
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.8, seed=1, ignore_eos=True)
    prompts = [make.integers(0, VOCAB, length).tolist() for _ in range(copies) for length in (7, 130, 33, 1)]
    return [Request(id=f"r{number}", prompt_ids=ids, params=params, **more) for number, ids in enumerate(prompts)]


def tokens_of(path: Path, size: int, wanted: list[Request] | None = None, **options: Any) -> Tokens:
    with engine(path, batch_invariant=True, pipeline_parallel_size=size, **options) as served:
        return run(served, wanted or requests())


def program_of(served: Engine) -> GpuProgram:
    """Of the last stage."""
    assert isinstance(served.executor, PipelineExecutor)
    queued = served.executor.runner.program
    assert isinstance(queued, QueuedProgram) and isinstance(queued._own, GpuProgram)
    return queued._own


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "op by op"])
def test_stages_give_the_tokens_of_one_process(path: Path, dtype: str, eager: bool) -> None:
    """Eight sequences at a time, in two micro-batches, of whose prompts some are computed in chunks."""
    given = {"dtype": dtype, "enforce_eager": eager}
    expected = tokens_of(path, 1, requests(2), **given)
    whole = {**given, "batch_invariant": True, "pipeline_parallel_size": 2}
    with engine(path, **whole, max_num_batched_tokens=64) as served:
        assert bool(program_of(served)._decode_graphs) != eager
        assert served.capacity.micro_batches == 2
        assert run(served, requests(2)) == expected
    assert not stages(os.getpid())


def test_three_stages_without_batch_invariance(path: Path) -> None:
    """Each sequence alone, in fp32: rounding hardly ever decides. The stage in the middle receives and sends."""
    greedy = [replace(one, params=replace(one.params, temperature=0.0)) for one in requests()]
    found = []
    for size in (1, 3):
        with engine(path, dtype="float32", pipeline_parallel_size=size) as served:
            found.append({name: ids for one in greedy for name, ids in run(served, [one]).items()})
    same = sum(found[0][name] == found[1][name] for name in found[0])
    assert same >= 3, f"{same} of 4 sequences have the tokens of one process"


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_layers(tmp_path: Path, name: str) -> None:
    save, options = DIVIDED_BY_RANKS[name]
    path = save(tmp_path)
    assert tokens_of(path, 2, **options) == tokens_of(path, 1, **options)


@pytest.mark.parametrize(("name", "size"), [("lfm2", 2), ("mamba", 2), ("gemma-3", 3), ("gpt-oss", 2)])
def test_stages_that_lack_a_kind_of_memory(tmp_path: Path, name: str, size: int) -> None:
    """Layers with keys and values, states or window pages. With all sequences at once, and with few."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config((STATES | WINDOWS)[name]()).save_pretrained(tmp_path)
    expected = tokens_of(tmp_path, 1, requests(3), enforce_eager=True)
    for given in ({}, {"max_num_seqs": 3, "max_num_batched_tokens": 64, "swap_space": 0.1}):
        assert tokens_of(tmp_path, size, requests(3), **given) == expected


def test_keys_and_values_in_fp8(path: Path) -> None:
    assert tokens_of(path, 2, kv_cache_dtype="fp8") == tokens_of(path, 1, kv_cache_dtype="fp8")


def test_preempted_sequences_go_on(path: Path) -> None:
    """Each stage swaps its own layers of a block; blocks that are swapped out have new owners at once."""
    block_bytes = KVSpec(LAYERS, KV_HEADS, HEAD_DIM, BLOCK, "bfloat16").block_bytes
    expected = tokens_of(path, 1, requests(3), enforce_eager=True)
    for swap_space in (0.5, 0.0):
        tight = {"kv_cache_memory_bytes": 28 * block_bytes, "swap_space": swap_space, "pipeline_parallel_size": 2}
        with engine(path, batch_invariant=True, enforce_eager=True, **tight) as served:
            assert run(served, requests(3)) == expected
            assert served.stats().preemptions > 0


def test_each_request_has_its_adapter(path: Path, tmp_path: Path) -> None:
    """Three adapters in two slots, with all layers adapted, and some; op by op, and with the room measured."""
    model = LlamaForCausalLM.from_pretrained(path)
    layers = {"all": dict.fromkeys(EVERYWHERE, 64), "some": {"k_proj": 5, "down_proj": 2}, "last": {"down_proj": 8}}
    adapters = {
        name: write_adapter(model, tmp_path / name, of_layers, seed)
        for seed, (name, of_layers) in enumerate(layers.items())
    }
    wanted = [replace(one, id=f"{name}-{one.id}", adapter=name) for name in ("", *adapters) for one in requests()]
    found = []
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64, "batch_invariant": True}
    for given in ({"pipeline_parallel_size": 1}, {"enforce_eager": True}, {"kv_cache_memory_bytes": None}):
        with engine(path, **{"pipeline_parallel_size": 2, **lora, **given}) as served:
            give(served, adapters)
            found.append(run(served, wanted))
    assert found[0] == found[1] == found[2]
    assert len({tuple(tokens) for tokens in found[0].values()}) == len(wanted)


def test_what_repeats_is_drafted(path: Path) -> None:
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=NUM_NEW, ignore_eos=True, allowed_token_ids=[5, 6])
    wanted = [Request(id="a", prompt_ids=[5, 6] * 8, params=params)]
    expected = tokens_of(path, 1, wanted, enforce_eager=True)
    drafts = {"spec_method": "ngram", "spec_tokens": 4, "pipeline_parallel_size": 2}
    with engine(path, batch_invariant=True, **drafts) as served:
        assert run(served, wanted) == expected
        assert served.stats().drafts > 0


def test_room_is_that_of_the_stage_with_the_least(path: Path) -> None:
    with engine(path, pipeline_parallel_size=2, kv_cache_memory_bytes=None) as served:
        assert served.capacity.num_blocks > 100
        run(served, requests())


def test_a_killed_stage_ends_the_step_with_a_reason(path: Path) -> None:
    with engine(path, pipeline_parallel_size=2, enforce_eager=True) as served:
        run(served, requests())
        [stage] = stages(os.getpid())
        os.kill(stage, signal.SIGKILL)
        with pytest.raises(EngineFailed, match=rf"stage 1 of 2 \(process {stage}\) was killed by signal 9"):
            run(served, requests())
        wait_until(lambda: not exists(stage))


def test_streams_go_on_when_a_stage_is_killed(tiny_model: Path) -> None:
    given = {"device": "cuda", "batch_invariant": True, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    check_that_streams_go_on(
        tiny_model, lambda engine: stages(engine)[0], alone=given, timeout=400, pipeline_parallel_size=2, **given
    )


def test_a_stage_that_is_reached_over_tcp(path: Path) -> None:
    expected = tokens_of(path, 1, enforce_eager=True)
    listener = Listener(path)
    try:
        with engine(path, batch_invariant=True, pipeline_stages=listener.address) as served:
            assert run(served, requests()) == expected and len(listener.children) == 1
    finally:
        listener.stop()


def test_stages_of_two_ranks_give_the_tokens_of_one_process(path: Path) -> None:
    """Four processes on one GPU."""
    expected = tokens_of(path, 1, enforce_eager=True)
    with engine(path, batch_invariant=True, tensor_parallel_size=2, pipeline_parallel_size=2) as served:
        assert run(served, requests()) == expected
        processes = [*stages(os.getpid()), *followers(os.getpid(), b"quire.executors.pipeline.rank_follower")]
    assert len(processes) == 2, "the other stage, and the other rank of this one"
    wait_until(lambda: not any(map(exists, processes)))
