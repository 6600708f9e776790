"""Families with attention, mixers or connections of their own kind, against transformers."""

from collections.abc import Callable

import pytest
from transformers import DiffLlamaConfig, DogeConfig, NanoChatConfig, ZambaConfig

from models.checking import BACKENDS, Cases, Theirs, check_against_transformers, checkpoints_of

ZAMBA = {
    "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "num_key_value_heads": 4, "mamba_d_state": 8, "mamba_dt_rank": 6,
}  # fmt: skip
CASES: Cases = {
    "zamba": (ZambaConfig, ZAMBA),
    "zamba-heads-4": (ZambaConfig, ZAMBA | {"n_mamba_heads": 4, "mamba_conv_bias": False, "mamba_proj_bias": True}),
    "nanochat": (NanoChatConfig, {}),
    "nanochat-uncapped": (NanoChatConfig, {"final_logit_softcapping": None, "num_key_value_heads": 4}),
    "diffllama": (DiffLlamaConfig, {}),
    "diffllama-mha": (DiffLlamaConfig, {"num_key_value_heads": 4, "attention_bias": True, "num_hidden_layers": 3}),
    "doge": (DogeConfig, {}),
    "doge-biases": (DogeConfig, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
}
checkpoints = checkpoints_of(CASES)


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))
