"""The engine on a GPU with a latent cache: its own equalities to the last bit where that is asked for, and tokens of
transformers. DeepSeek's widths of heads and latents, and few of everything else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from engine.test_gpu_engine import (
    BLOCK,
    VOCAB,
    Tokens,
    check_tokens,
    engine,
    in_halves,
    preemptions,
    renamed,
    requests,
    run,
)
from quire.ops.kv_spec import KVSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYERS, LATENT, TURNING = 2, 512, 64
PAGE = KVSpec(LAYERS, 1, LATENT + TURNING, BLOCK, "bfloat16", LATENT)


def save(folder: Path, num_dense: int) -> Path:
    torch.manual_seed(num_dense)
    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=768,
        moe_intermediate_size=256,
        num_hidden_layers=LAYERS,
        first_k_dense_replace=num_dense,
        num_attention_heads=16,
        num_key_value_heads=16,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=TURNING,
        q_lora_rank=256,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("dense"), LAYERS)


@pytest.fixture(scope="module")
def alone(dense: Path) -> Tokens:
    """Each request by itself, nothing cached."""
    with engine(dense, batch_invariant=True) as served:
        return {request.id: run(served, [request])[request.id] for request in requests()}


WAYS: dict[str, dict[str, Any]] = {
    "in company": {},
    "op by op": {"enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 48},
    "cached": {"enable_prefix_caching": True},
    "recomputed": {"kv_cache_memory_bytes": 40 * PAGE.block_bytes},
    "swapped": {"kv_cache_memory_bytes": 40 * PAGE.block_bytes, "swap_space": 0.05},
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_changes_an_answer(dense: Path, alone: Tokens, way: str) -> None:
    assert len({tuple(found) for found in alone.values()}) == len(alone), "equal answers would show nothing"
    with engine(dense, batch_invariant=True, **WAYS[way]) as served:
        assert run(served, requests(3)) == renamed(alone, 3)
        assert (preemptions(served) > 0) == ("kv_cache_memory_bytes" in WAYS[way])


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["quick", "invariant"])
@pytest.mark.parametrize(("num_dense", "dtype"), [(LAYERS, "float32"), (LAYERS, "bfloat16"), (1, "float32")])
def test_greedy_tokens_are_those_of_transformers(
    num_dense: int, dtype: str, batch_invariant: bool, tmp_path: Path
) -> None:
    path = save(tmp_path, num_dense)
    exact = DeepseekV3ForCausalLM.from_pretrained(path).eval().to("cuda")
    rounded: Any = in_halves(DeepseekV3ForCausalLM.from_pretrained(path).eval(), dtype)  # type: ignore[arg-type]
    wanted = [request for request in requests() if "greedy" in request.id]
    with engine(path, dtype=dtype, batch_invariant=batch_invariant) as served:
        check_tokens(run(served, wanted), wanted, exact, rounded)
