"""The engine on a GPU: its own equalities to the last bit where that is asked for, and transformers' tokens.

    python -m pytest tests/engine/test_gpu_engine.py                              random Llamas
    QUIRE_TEST_MODEL=model.gguf python -m pytest tests/engine/test_gpu_engine.py  and a real one

Nothing here needs a tokenizer, a template or a socket; of a model's file the tokenizer is read."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.gpu_serving import (
    BLOCK,
    KV_HEADS,
    LAYERS,
    NUM_NEW,
    VOCAB,
    Tokens,
    check_tokens,
    engine,
    in_halves,
    run,
    save_llama,
)
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.ops.kv_spec import KVSpec
from quire.ops.reference.cache import TorchCache

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODEL = os.environ.get("QUIRE_TEST_MODEL")
LENGTHS = (1, 17, 64, 130, 300, 130)
GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=NUM_NEW, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=0.9, top_p=0.9, top_k=40, repetition_penalty=1.1, seed=11, max_tokens=NUM_NEW, ignore_eos=True
)


def prompts() -> list[list[int]]:
    """The last one begins like the one before the last but one."""
    make = torch.Generator().manual_seed(3)
    made = [torch.randint(0, VOCAB, (length,), generator=make).tolist() for length in LENGTHS]
    made[5][:100] = made[3][:100]
    return made


def requests(copies: int = 1) -> list[Request]:
    """Every prompt greedily and drawn."""
    return [
        Request(id=f"{copy}-{kind}-{number}", prompt_ids=ids, params=params)
        for copy in range(copies)
        for kind, params in (("greedy", GREEDY), ("drawn", DRAWN))
        for number, ids in enumerate(prompts())
    ]


def preemptions(served: Engine) -> int:
    assert served.record is not None
    return served.record.scheduler.preemptions


def blocks(count: int, head_dim: int, kept: str = "bfloat16") -> int:
    """Bytes."""
    return count * KVSpec(LAYERS, KV_HEADS, head_dim, BLOCK, kept).block_bytes


@pytest.fixture(scope="module", params=[64, 128])
def head_dim(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def path(head_dim: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), head_dim)


# -- the engine beside itself ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(path: Path) -> Tokens:
    """Each request by itself, nothing cached."""
    with engine(path, batch_invariant=True) as served:
        return {request.id: run(served, [request])[request.id] for request in requests()}


def renamed(tokens: Tokens, copies: int) -> Tokens:
    return {f"{copy}{name[1:]}": found for copy in range(copies) for name, found in tokens.items()}


def test_requests_differ(alone: Tokens) -> None:
    """Or else equal answers would show nothing."""
    assert len({tuple(found) for found in alone.values()}) == len(alone)
    assert all(len(set(found)) > 3 for name, found in alone.items() if "drawn" in name)


def test_company_changes_nothing(path: Path, alone: Tokens) -> None:
    with engine(path, batch_invariant=True) as served:
        assert run(served, requests(3)) == renamed(alone, 3)


def test_launching_op_by_op_changes_nothing(path: Path, alone: Tokens) -> None:
    with engine(path, batch_invariant=True, enforce_eager=True) as served:
        assert run(served, requests()) == alone


def test_chunks_change_nothing(path: Path, alone: Tokens) -> None:
    with engine(path, batch_invariant=True, max_num_batched_tokens=48) as served:
        assert run(served, requests()) == alone


def test_a_prefix_from_the_cache_changes_nothing(path: Path, alone: Tokens) -> None:
    with engine(path, batch_invariant=True, enable_prefix_caching=True) as served:
        assert run(served, requests()) == alone
        assert run(served, requests()) == alone
        assert served.record is not None and served.record.scheduler.prefix_hits > sum(LENGTHS) // 2


@pytest.mark.parametrize("swap_space", [0.0, 0.05], ids=["recomputed", "swapped"])
def test_preemption_changes_nothing(
    path: Path, head_dim: int, alone: Tokens, swap_space: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped: list[int] = []
    swap_in = TorchCache.swap_in
    monkeypatch.setattr(
        TorchCache, "swap_in", lambda self, pairs: (swapped.append(len(pairs)), swap_in(self, pairs))[1]
    )
    tight = blocks(40, head_dim)
    with engine(path, batch_invariant=True, kv_cache_memory_bytes=tight, swap_space=swap_space) as served:
        assert run(served, requests()) == alone
        assert preemptions(served) > 0
        assert bool(swapped) == (swap_space > 0)
        assert served.record is not None and served.record.scheduler.held_blocks == 0


@pytest.mark.parametrize("kept", ["fp8", "int8"])
def test_so_it_is_with_codes(path: Path, head_dim: int, kept: str) -> None:
    """Weights of fp8, keys and values of 8 bits; preempted, swapped and in company."""
    codes = {"batch_invariant": True, "quantization": "fp8", "kv_cache_dtype": kept}
    wanted = [request for request in requests() if len(request.prompt_ids) == 130]
    with engine(path, **codes) as served:
        undisturbed = {request.id: run(served, [request])[request.id] for request in wanted}
    with engine(path, **codes, kv_cache_memory_bytes=blocks(28, head_dim, kept), swap_space=0.05) as served:
        assert run(served, wanted) == undisturbed
        assert preemptions(served) > 0


# -- the engine beside transformers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["quick", "invariant"])
def test_greedy_tokens_are_those_of_transformers(path: Path, dtype: str, batch_invariant: bool) -> None:
    exact = LlamaForCausalLM.from_pretrained(path).eval().to("cuda")
    rounded = in_halves(LlamaForCausalLM.from_pretrained(path).eval(), dtype)
    wanted = [request for request in requests() if "greedy" in request.id]
    with engine(path, dtype=dtype, batch_invariant=batch_invariant) as served:
        check_tokens(run(served, wanted), wanted, exact, rounded)


PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived an old man who " * 4,
    "Q: What is a quire of paper?\nA:",
)


@pytest.mark.skipif(MODEL is None, reason="needs QUIRE_TEST_MODEL, the path of a checkpoint")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_default_model_says_what_transformers_says(dtype: str) -> None:
    """Of one file: its numbers through our reader, in fp32, are what transformers computes with."""
    from benchmarks.reference import reference_model

    from quire.text.tokenizers.tokenizer import Tokenizer

    assert MODEL is not None
    tokenizer = Tokenizer.load(Path(MODEL))
    exact = reference_model(Path(MODEL)).to("cuda")
    rounded = in_halves(reference_model(Path(MODEL)), dtype)
    wanted = [
        Request(id=str(number), prompt_ids=tokenizer.encode(text), params=GREEDY) for number, text in enumerate(PROMPTS)
    ]
    with engine(Path(MODEL), dtype=dtype) as served:
        tokens = run(served, wanted)
    for request in wanted:
        print(f"{dtype}: {tokenizer.decode([*request.prompt_ids[-8:], *tokens[request.id]])!r}")
    check_tokens(tokens, wanted, exact, rounded)


@pytest.mark.skipif(MODEL is None, reason="needs QUIRE_TEST_MODEL, the path of a checkpoint")
def test_the_default_model_says_the_same_whatever_happens() -> None:
    from quire.text.tokenizers.tokenizer import Tokenizer

    assert MODEL is not None
    tokenizer = Tokenizer.load(Path(MODEL))
    wanted = [
        Request(id=f"{number}-{params.seed}", prompt_ids=tokenizer.encode(text), params=params)
        for number, text in enumerate(PROMPTS)
        for params in (GREEDY, DRAWN, replace(DRAWN, seed=12))
    ]
    with engine(Path(MODEL), batch_invariant=True) as served:
        undisturbed = {request.id: run(served, [request])[request.id] for request in wanted}
        assert run(served, wanted) == undisturbed
    tight = 24 * KVSpec(30, 3, 64, BLOCK, "bfloat16").block_bytes  # of SmolLM2-135M
    ways: dict[str, dict[str, Any]] = {
        "chunked": {"max_num_batched_tokens": 32},
        "cached": {"enable_prefix_caching": True},
        "swapped": {"kv_cache_memory_bytes": tight, "swap_space": 0.1},
        "recomputed": {"kv_cache_memory_bytes": tight},
    }
    for name, given in ways.items():
        with engine(Path(MODEL), batch_invariant=True, **given) as served:
            assert run(served, wanted) == undisturbed, name
            assert preemptions(served) > 0 or name in ("chunked", "cached")
