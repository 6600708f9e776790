"""Models with recurrent and convolution states on a GPU: the engine's equalities, and transformers' tokens.

python -m pytest tests/engine/test_gpu_states.py"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Lfm2Config,
    MambaConfig,
    MiniMaxConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
)

from engine.gpu_serving import NUM_NEW, VOCAB, Tokens, check_tokens, engine, run
from engine.test_gpu_engine import preemptions, renamed, requests
from fakes import make_drafts_free
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.ops.kv_spec import ConvSpec, KVSpec, StateSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_experts_per_tok": 2,
    "head_dim": 64,
}
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-next": lambda: Qwen3NextConfig(
        **SIZES,
        **LINEAR,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=96,
        num_experts=4,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    ),
    "minimax": lambda: MiniMaxConfig(**SIZES, **LINEAR, num_local_experts=4),
    "bamba": lambda: BambaConfig(
        **SIZES, attn_layer_indices=[1], mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=64, mamba_chunk_size=64
    ),
    "mamba": lambda: MambaConfig(vocab_size=VOCAB, hidden_size=256, num_hidden_layers=2, initializer_range=0.3),
    "lfm2": lambda: Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"], block_multiple_of=16),
}
KV = KVSpec(1, 2, 64, 16, "bfloat16")  # of one layer with attention
STATES = {
    "qwen3-next": StateSpec(2, (4, 64, 96), 640, 4),
    "minimax": StateSpec(2, (4, 64, 64)),
    "bamba": StateSpec(2, (8, 64, 64), 768, 4),
}


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model."""
    folder = tmp_path_factory.mktemp("models") / request.param
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(MODELS[request.param]()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(path: Path) -> Tokens:
    """Each request by itself, nothing cached."""
    with engine(path, batch_invariant=True) as served:
        return {request.id: run(served, [request])[request.id] for request in requests()}


def test_requests_differ(alone: Tokens) -> None:
    """Or else equal answers would show nothing."""
    assert len({tuple(found) for found in alone.values()}) > len(alone) // 2


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
        for _ in range(3):
            assert run(served, requests()) == alone
        assert served.record is not None and served.record.scheduler.prefix_hits > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_smaller_checkpoints_are_continued_from(path: Path, alone: Tokens, dtype: str) -> None:
    """Tokens may differ from those of cold prompts; most of the greedy ones do not."""
    if path.name == "lfm2":
        pytest.skip("its states are in the blocks")
    with engine(path, batch_invariant=True, enable_prefix_caching=True, state_checkpoint_dtype=dtype) as served:
        run(served, requests())
        again = run(served, requests())
        assert served.record is not None and served.record.scheduler.prefix_hits > 0
        assert served.capacity.num_checkpoint_slots > 0
    assert {name: len(tokens) for name, tokens in again.items()} == {name: len(one) for name, one in alone.items()}
    greedy = [name for name in alone if "greedy" in name]
    assert sum(again[name][0] == alone[name][0] for name in greedy) >= len(greedy) / 2


def test_preemption_changes_nothing(path: Path, alone: Tokens) -> None:
    name, preempted = path.name, 0
    if name == "mamba":
        pytest.skip("a model without keys and values is never short of blocks")
    block_bytes = KV.block_bytes + (ConvSpec(2, 256, 3).state_bytes if name == "lfm2" else 0)
    slots = 6 * STATES[name].slot_bytes if name in STATES else 0
    for caching in (False, True):
        options = {"kv_cache_memory_bytes": 28 * block_bytes + slots, "enable_prefix_caching": caching}
        with engine(path, batch_invariant=True, **options) as served:
            assert run(served, requests()) == alone
            preempted += preemptions(served)
    assert preempted > 0


def test_several_completions_are_those_of_prompts_alone(path: Path) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=NUM_NEW, ignore_eos=True)
    found = []
    for options in ({}, {"enable_prefix_caching": True, "max_num_seqs": 3}):
        with engine(path, batch_invariant=True, **options) as served:
            served.submit(Request(id="x", prompt_ids=list(range(40)), params=params))
            tokens: dict[int, list[int]] = {}
            while served.has_work:
                for event in served.step():
                    tokens.setdefault(event.index, []).extend(event.tokens)
            found.append(tokens)
    assert found[0] == found[1] and len({tuple(one) for one in found[0].values()}) == 3


def test_drafts_change_nothing(path: Path, alone: Tokens) -> None:
    with engine(path, batch_invariant=True, spec_method="ngram") as served:
        make_drafts_free(served._scheduler.speculation)
        assert run(served, requests()) == alone


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["quick", "invariant"])
def test_greedy_tokens_are_those_of_transformers(path: Path, batch_invariant: bool) -> None:
    """In fp32; `quick` takes tiles of prompts through tensor cores where it computes in 16 bits."""
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to("cuda")
    wanted = [request for request in requests() if "greedy" in request.id]
    with engine(path, dtype="float32", batch_invariant=batch_invariant) as served:
        check_tokens(run(served, wanted), wanted, exact, None)


def test_16_bits_are_as_near_as_those_of_transformers(path: Path) -> None:
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to("cuda")
    rounded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval().to("cuda")
    wanted = [request for request in requests() if "greedy" in request.id]
    times = 3 if path.name == "qwen3-next" else 2  # transformers takes the delta rule through in fp32, tiles in 16 bits
    with engine(path) as served:
        check_tokens(run(served, wanted), wanted, exact, rounded, times)
