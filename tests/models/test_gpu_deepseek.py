"""DeepSeek on the GPU's op set beside the plain one, on a GPU or in Triton's interpreter: prefilled and decoded."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

from models.gpu_steps import logits_of
from quire.core.errors import Unsupported
from quire.ops.gpu.opset import GpuOps
from quire.ops.kv_spec import KVSpec
from quire.ops.reference import TorchOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [("float32", "float32", 1e-5)]
if DEVICE == "cuda":  # the interpreter takes its time
    # Twice what plain torch is off when it rounds what every op makes.
    CASES += [("bfloat16", "bfloat16", 2.4e-2), ("float16", "float16", 3e-3), ("bfloat16", "fp8", 9e-2)]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    return cache(lambda settled: checkpoint(tmp_path_factory.mktemp("deepseek"), settled))


def checkpoint(folder: Path, settled: bool) -> Path:
    """Two layers, one of them with experts. `settled`: which experts a token goes to is never a near thing. Where it
    is, a step of rounding sends it to another one, and its logits are off by as much as they are large."""
    torch.manual_seed(1)
    shape = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 4}
    latents = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    config = DeepseekV3Config(
        **shape,
        **latents,
        **experts,
        num_key_value_heads=4,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        vocab_size=128,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    model = DeepseekV3ForCausalLM(config)
    if settled:
        model.model.layers[1].mlp.gate.e_score_correction_bias[:] = 2 * torch.randperm(8)  # scores are less than 1
    model.save_pretrained(folder)
    return folder


SPARSE: dict[str, Any] = {
    "deepseek-v3.2": (DeepseekV32Config, DeepseekV32ForCausalLM, {}),
    "glm-5": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM, {"indexer_types": ["full", "shared"]}),
}


def sparse_checkpoint(folder: Path, name: str) -> Path:
    """Two layers whose tokens attend to four others each."""
    torch.manual_seed(2)
    config, kind, options = SPARSE[name]
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
    latents = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    index = {"index_head_dim": 24, "index_n_heads": 3, "index_topk": 4, **options}
    kind(
        config(
            **shape,
            **latents,
            **index,
            moe_intermediate_size=32,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            num_hidden_layers=2,
            first_k_dense_replace=2,
            vocab_size=128,
            max_position_embeddings=128,
            initializer_range=0.1,
        )
    ).save_pretrained(folder)
    return folder


def some_steps():
    ids = np.random.default_rng(3).integers(0, 128, 32)
    return [
        [(ids[:5], 0), (ids[5:6], 0), (ids[6:15], 0)],  # prompts, one of a single token
        [(ids[15:16], 5), (ids[16:19], 1), (ids[19:20], 9)],  # a chunk between decoding sequences
        [(ids[20:21], 6), (ids[21:22], 4), (ids[22:23], 10)],  # only decoding
    ]


@pytest.mark.verifies("safetensors", backend="gpu", architecture="DeepseekV3ForCausalLM")
@pytest.mark.parametrize(("dtype", "kept", "bound"), CASES)
@pytest.mark.parametrize("batch_invariant", [False, True] if DEVICE == "cuda" else [False])
def test_logits_are_those_of_plain_torch(make, dtype, kept, bound, batch_invariant):
    path = make(dtype != "float32")
    plain = logits_of(TorchOps(), path, kept, some_steps())
    ops = GpuOps(DEVICE, dtype=dtype, batch_invariant=batch_invariant)
    found = logits_of(ops, path, kept, some_steps())
    assert np.sqrt(np.mean((found - plain) ** 2) / np.mean(plain**2)) < bound


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_sparse_attention_is_that_of_plain_torch(tmp_path, name, batch_invariant):
    path = sparse_checkpoint(tmp_path, name)
    plain = logits_of(TorchOps(), path, "float32", some_steps())
    found = logits_of(GpuOps(DEVICE, "float32", batch_invariant=batch_invariant), path, "float32", some_steps())
    np.testing.assert_allclose(found, plain, rtol=1e-3, atol=1e-4 * np.abs(plain).max())


def test_a_latent_that_is_no_power_of_two_is_refused():
    with pytest.raises(Unsupported, match="latent vectors of 24 columns"):
        GpuOps(DEVICE).new_cache(KVSpec(1, 1, 32, 16, "bfloat16", 24), 1)
