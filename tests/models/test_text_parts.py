"""Language models of checkpoints that also take images, against transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import (
    Gemma4Config,
    Idefics3Config,
    InternVLConfig,
    Llama4Config,
    LlavaConfig,
    MiniMaxM3VLConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
)

from models.checking import BACKENDS, TINY, Cases, Theirs, check_against_transformers, checkpoints_of
from quire.core.errors import Unsupported
from quire.models.registry import family
from quire.weights.config import CheckpointConfig

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
TEXT = TINY | {"rope_parameters": MROPE}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 128}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGLIP = VISION | {"image_size": 16, "patch_size": 8}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA_4 = TINY | {
    "intermediate_size": 48, "intermediate_size_mlp": 80, "head_dim": 32, "attention_chunk_size": 8, "num_local_experts": 4,
    "rope_parameters": DEFAULT, "no_rope_layers": [1, 0],
}  # fmt: skip
GEMMA_4 = TINY | {
    "head_dim": 16, "global_head_dim": 24, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 96,
    "pad_token_id": 0, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
MINIMAX = TINY | {
    "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 48, "dense_intermediate_size": 80,
    "shared_intermediate_size": 40, "head_dim": 24, "rotary_dim": 12, "mlp_layer_types": ["dense", "sparse"],
    "layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 16,
    "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5},
}  # fmt: skip
UNTIED = {"tie_word_embeddings": False}
CASES: Cases = {
    "qwen2.5-vl": (Qwen2_5_VLConfig, {"text_config": TEXT, "vision_config": QWEN_VISION} | UNTIED),
    "qwen3-vl": (
        Qwen3VLConfig,
        {"text_config": TEXT | {"head_dim": 32}, "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]}},
    ),
    "qwen3-vl-moe": (
        Qwen3VLMoeConfig,
        {"text_config": TEXT | EXPERTS | {"head_dim": 32, "norm_topk_prob": True},
         "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]}} | UNTIED,
    ),
    "llava": (LlavaConfig, {"text_config": TINY | {"model_type": "llama"}, "vision_config": SIGLIP} | UNTIED),
    "llama-4-with-images": (
        Llama4Config,
        {"text_config": LLAMA_4,
         "vision_config": SIGLIP | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}},
    ),
    "gemma-4-with-images": (Gemma4Config, {"text_config": GEMMA_4, "vision_config": None, "audio_config": None}),
    "minimax-m3": (MiniMaxM3VLConfig, {"text_config": MINIMAX, "vision_config": VISION} | UNTIED),
    "idefics3": (Idefics3Config, {"text_config": TINY | {"model_type": "llama"}, "vision_config": SIGLIP} | UNTIED),
    "smolvlm": (SmolVLMConfig, {"text_config": TINY | {"model_type": "llama"}, "vision_config": SIGLIP} | UNTIED),
    "internvl": (
        InternVLConfig,
        {"text_config": TINY | {"model_type": "qwen2"}, "vision_config": SIGLIP | {"image_size": [16, 16], "patch_size": [8, 8]}}
        | UNTIED,
    ),
}  # fmt: skip
checkpoints = checkpoints_of(CASES, tiny={})


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))


def test_a_language_model_that_is_not_supported_is_named() -> None:
    values = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "mamba"}}
    with pytest.raises(Unsupported, match="the language model of `LlavaForConditionalGeneration` is of the type 'mamba'"):
        family("LlavaForConditionalGeneration").config(CheckpointConfig(Path("config.json"), values))
