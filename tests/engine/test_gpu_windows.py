"""Models of which some layers have a sliding window, or chunks, on a GPU: with window pages they give the tokens that
they give where every block has all layers, and more sequences fit.

python -m pytest tests/engine/test_gpu_windows.py"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig, Llama4TextConfig, PreTrainedConfig

from engine.gpu_serving import BLOCK, VOCAB, Tokens, check_tokens, engine, run
from engine.test_gpu_engine import preemptions, renamed, requests
from fakes import make_drafts_free
from quire.core import kv_tiers
from quire.executors.local import LocalExecutor
from quire.ops.kv_spec import KVSpec
from quire.runtime import disk_tier
from quire.runtime.disk_tier import DiskTier

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WINDOW = 20
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": WINDOW}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma-3": lambda: Gemma3TextConfig(**SIZES, **LAYERS, tie_word_embeddings=False),
    "gpt-oss": lambda: GptOssConfig(**SIZES, **LAYERS, **ROPE, num_local_experts=4, num_experts_per_tok=2),
    "llama-4": lambda: Llama4TextConfig(
        **SIZES,
        **ROPE,
        attention_chunk_size=WINDOW,
        no_rope_layers=[1, 0, 0],
        num_local_experts=4,
        intermediate_size_mlp=384,
    ),
}
BLOCK_BYTES = KVSpec(3, 2, 64, BLOCK, "bfloat16").block_bytes
FEW: dict[str, Any] = {"batch_invariant": True, "max_num_seqs": 4, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model."""
    folder = tmp_path_factory.mktemp("models") / request.param
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(MODELS[request.param]()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(path: Path) -> Tokens:
    """Each request by itself, nothing cached, every block with all layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalExecutor, "_has_window_pages", False)
        with engine(path, batch_invariant=True) as served:
            assert served.capacity.num_pages == 0
            return {request.id: run(served, [request])[request.id] for request in requests()}


def test_requests_differ(alone: Tokens) -> None:
    """Or else equal answers would show nothing."""
    assert len({tuple(found) for found in alone.values()}) > len(alone) // 2


def test_company_changes_nothing(path: Path, alone: Tokens) -> None:
    with engine(path, batch_invariant=True) as served:
        assert served.capacity.num_pages > 0
        assert run(served, requests(3)) == renamed(alone, 3)


def test_launching_op_by_op_changes_nothing(path: Path, alone: Tokens) -> None:
    with engine(path, batch_invariant=True, enforce_eager=True) as served:
        assert served.capacity.num_pages > 0
        assert run(served, requests()) == alone


def test_chunks_change_nothing(path: Path, alone: Tokens) -> None:
    with engine(path, **FEW) as served:
        assert served.capacity.num_pages > 0
        assert run(served, requests()) == alone


def test_a_prefix_from_the_cache_changes_nothing(path: Path, alone: Tokens) -> None:
    with engine(path, batch_invariant=True, enable_prefix_caching=True) as served:
        for _ in range(2):
            assert run(served, requests()) == alone
        assert served.capacity.num_pages > 0
        assert served.record is not None and served.record.scheduler.prefix_hits > 0


@pytest.mark.parametrize("swap_space", [0.0, 0.05], ids=["recomputed", "swapped"])
def test_preemption_changes_nothing(path: Path, alone: Tokens, swap_space: float) -> None:
    for caching in (False, True):
        options = {"kv_cache_memory_bytes": 28 * BLOCK_BYTES, "enable_prefix_caching": caching}
        with engine(path, **FEW, **options, swap_space=swap_space) as served:
            assert served.capacity.num_pages == 20 and served.capacity.num_blocks == 32
            assert run(served, requests()) == alone
            assert preemptions(served) > 0


def test_a_restarted_engine_continues_from_the_disk(
    path: Path, alone: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskTier, "read_seconds", lambda self, num_blocks: 0.0)
    monkeypatch.setattr(disk_tier, "FIND_SECONDS", 60.0)
    monkeypatch.setattr(kv_tiers, "MIN_FETCH_SECONDS", 60.0)
    options = {"enable_prefix_caching": True, "kv_disk_path": str(tmp_path), "kv_disk_size": 1}
    for is_restarted in (False, True):
        with engine(path, batch_invariant=True, **options) as served:
            assert served.capacity.num_pages > 0
            assert run(served, requests()) == alone
            assert bool(served.stats().tiers["disk"].hits) == is_restarted


def test_more_sequences_fit(path: Path) -> None:
    found = []
    for in_pages in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalExecutor, "_has_window_pages", in_pages)
            with engine(path, **FEW, kv_cache_memory_bytes=256 * BLOCK_BYTES) as served:
                found.append(served.capacity.num_blocks)
    assert found[1] == 256 and found[0] > 1.3 * found[1]


def test_drafts_change_nothing(path: Path, alone: Tokens) -> None:
    for method in ("ngram", "suffix"):  # chains, and trees
        with engine(path, batch_invariant=True, spec_method=method) as served:
            make_drafts_free(served._scheduler.speculation)
            assert served.capacity.num_pages > 0
            assert run(served, requests()) == alone


@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_pages_of_8_bits(path: Path, kept: str) -> None:
    found = []
    for in_pages in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalExecutor, "_has_window_pages", in_pages)
            with engine(path, batch_invariant=True, kv_cache_dtype=kept) as served:
                assert bool(served.capacity.num_pages) == in_pages
                found.append(run(served, requests()))
    assert found[0] == found[1]


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["quick", "invariant"])
def test_greedy_tokens_are_those_of_transformers(path: Path, batch_invariant: bool) -> None:
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to("cuda")
    wanted = [request for request in requests() if "greedy" in request.id]
    with engine(path, dtype="float32", batch_invariant=batch_invariant) as served:
        assert served.capacity.num_pages > 0
        check_tokens(run(served, wanted), wanted, exact, None)
