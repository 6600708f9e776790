"""Sparse attention (DSA) through the engine on a GPU: DeepSeek V3.2 and GLM-5 with contexts of ten times what their
indexers choose. The engine's own equalities to the last bit, and transformers' tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV32Config, GlmMoeDsaConfig

from engine.gpu_serving import BLOCK, VOCAB, Tokens, check_tokens, engine, run
from engine.test_gpu_engine import preemptions, renamed, requests
from quire.core import kv_tiers
from quire.ops.kv_spec import IndexSpec, KVSpec
from quire.runtime import disk_tier
from quire.runtime.disk_tier import DiskTier

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYERS, LATENT, ROPE, CHOSEN = 2, 512, 64, 32
BLOCK_BYTES = KVSpec(LAYERS, 1, LATENT + ROPE, BLOCK, "bfloat16", LATENT, index=IndexSpec(128, CHOSEN)).block_bytes
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 768,
    "moe_intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": LATENT,
    "qk_rope_head_dim": ROPE,
    "q_lora_rank": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "index_topk": CHOSEN,
    "index_head_dim": 128,
}
MODELS: dict[str, Any] = {
    "deepseek-v3.2": lambda: DeepseekV32Config(**SIZES, index_n_heads=64),
    "glm-5": lambda: GlmMoeDsaConfig(**SIZES, index_n_heads=32, indexer_types=["full", "shared"]),
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


WAYS: dict[str, dict[str, Any]] = {
    "in company": {},
    "op by op": {"enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 48},
    "cached": {"enable_prefix_caching": True},
    "recomputed": {"kv_cache_memory_bytes": 40 * BLOCK_BYTES},
    "swapped": {"kv_cache_memory_bytes": 40 * BLOCK_BYTES, "swap_space": 0.05},
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_changes_an_answer(path: Path, alone: Tokens, way: str) -> None:
    assert len({tuple(found) for found in alone.values()}) == len(alone), "equal answers would show nothing"
    with engine(path, batch_invariant=True, **WAYS[way]) as served:
        assert run(served, requests(3)) == renamed(alone, 3)
        assert (preemptions(served) > 0) == ("kv_cache_memory_bytes" in WAYS[way])


def test_a_restarted_engine_continues_from_the_disk(
    path: Path, alone: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskTier, "read_seconds", lambda self, num_blocks: 0.0)
    monkeypatch.setattr(disk_tier, "FIND_SECONDS", 60.0)
    monkeypatch.setattr(kv_tiers, "MIN_FETCH_SECONDS", 60.0)
    options = {"enable_prefix_caching": True, "kv_disk_path": str(tmp_path), "kv_disk_size": 1}
    for is_restarted in (False, True):
        with engine(path, batch_invariant=True, **options) as served:
            assert run(served, requests()) == alone
            assert bool(served.stats().tiers["disk"].hits) == is_restarted


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["quick", "invariant"])
def test_greedy_tokens_are_those_of_transformers(path: Path, batch_invariant: bool) -> None:
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to("cuda")
    wanted = [request for request in requests() if "greedy" in request.id]
    with engine(path, dtype="float32", batch_invariant=batch_invariant) as served:
        check_tokens(run(served, wanted), wanted, exact, None)


def test_a_cache_of_fp8_serves(path: Path) -> None:
    with engine(path, kv_cache_dtype="fp8") as served:
        assert len(run(served, requests())) == len(requests())
