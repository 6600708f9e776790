"""Families with attention, mixers or connections of their own kind, against transformers."""

from collections.abc import Callable

import pytest
from transformers import (
    AriaTextConfig,
    DiffLlamaConfig,
    DogeConfig,
    JetMoeConfig,
    ModernBertDecoderConfig,
    NanoChatConfig,
    ZambaConfig,
)

from models.checking import BACKENDS, Cases, Theirs, check_against_transformers, checkpoints_of

ZAMBA = {
    "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "num_key_value_heads": 4, "mamba_d_state": 8, "mamba_dt_rank": 6,
}  # fmt: skip
JETMOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "kv_channels": 32}
JETMOE |= {"activation_function": "silu", "num_attention_heads": None}
ETTIN = {"local_attention": 10, "pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 2}
CASES: Cases = {
    "zamba": (ZambaConfig, ZAMBA),
    "zamba-heads-4": (ZambaConfig, ZAMBA | {"n_mamba_heads": 4, "mamba_conv_bias": False, "mamba_proj_bias": True}),
    "nanochat": (NanoChatConfig, {}),
    "nanochat-uncapped": (NanoChatConfig, {"final_logit_softcapping": None, "num_key_value_heads": 4}),
    "diffllama": (DiffLlamaConfig, {}),
    "diffllama-mha": (DiffLlamaConfig, {"num_key_value_heads": 4, "attention_bias": True, "num_hidden_layers": 3}),
    "doge": (DogeConfig, {}),
    "doge-with-biases": (DogeConfig, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "aria-text": (AriaTextConfig, {"moe_num_experts": 6, "moe_topk": 3, "moe_num_shared_experts": 2}),
    "jetmoe": (JetMoeConfig, JETMOE),
    "jetmoe-three-of-six": (
        JetMoeConfig,
        JETMOE | {"num_local_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 3, "kv_channels": 20},
    ),
    "modernbert-decoder": (ModernBertDecoderConfig, ETTIN),
    "modernbert-decoder-biases": (
        ModernBertDecoderConfig,
        ETTIN
        | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True, "decoder_bias": False}
        | {"tie_word_embeddings": False, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
checkpoints = checkpoints_of(CASES)


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))
