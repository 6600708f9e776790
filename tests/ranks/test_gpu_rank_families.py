"""Kinds of models that ranks with the GPU's op set divide: the bits of one device. Kernels are interpreted here."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig, LlamaForCausalLM, MixtralConfig, Qwen3Config, Qwen3NextConfig

from models.checking import PROMPT, TINY, Cases, random_model
from models.plain_adapters import write_adapter
from ranks.gpu_threads import GpuRanks, OnOneDevice

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted here")

ONE_LAYER = TINY | {"num_hidden_layers": 1}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 1,
}  # fmt: skip
STATES = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
MODELS: Cases = {
    "norms of heads": (Qwen3Config, {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "MoE": (MixtralConfig, EXPERTS),
    "MLA": (DeepseekV3Config, LATENT),
    "states": (Qwen3NextConfig, STATES),
}


CASES = [("norms of heads", False), ("MoE", False), ("MoE", True), ("MLA", False), ("states", True)]


def check(alone: Any, ranks: Any, *adapter: int) -> None:
    """A prompt in two steps."""
    prompt = PROMPT[:9]
    for start, ids in ((0, prompt[:8]), (8, prompt)):
        np.testing.assert_array_equal(ranks.logits(ids, start, *adapter), alone.logits(ids, start, *adapter))


@pytest.mark.parametrize(("name", "experts"), CASES)
def test_ranks_give_the_bits_of_one_device(tmp_path: Path, name: str, experts: bool) -> None:
    config, options = MODELS[name]
    random_model(config(**{**ONE_LAYER, **options}), seed=3).save_pretrained(tmp_path)
    check(OnOneDevice(tmp_path), GpuRanks(tmp_path, 2, experts=experts))


@pytest.mark.parametrize("name", ["norms of heads", "states"])
def test_16_bits_are_rounded_where_one_device_rounds_them(tmp_path: Path, name: str) -> None:
    """A value that ranks gather may be one that kernels of one device do not store."""
    config, options = MODELS[name]
    random_model(config(**{**ONE_LAYER, **options}), seed=3).save_pretrained(tmp_path)
    check(OnOneDevice(tmp_path, dtype="float16"), GpuRanks(tmp_path, 2, experts=True, dtype="float16"))


def test_adapters_and_4_bit_weights(tmp_path: Path) -> None:
    model = random_model(LlamaConfig(**ONE_LAYER), seed=3)
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained(tmp_path / "model")
    ranks = {"q_proj": 4, "v_proj": 4, "gate_proj": 8, "down_proj": 8}
    adapters = {"a": write_adapter(model, tmp_path / "a", ranks, 1)}
    given: dict[str, Any] = {"adapters": adapters, "dtype": "float16", "quantization": "int4"}
    check(OnOneDevice(tmp_path / "model", **given), GpuRanks(tmp_path / "model", 2, **given), 0)
