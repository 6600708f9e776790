"""Language models of checkpoints that also take images, against transformers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import (
    Cohere2Config,
    DeepseekV3Config,
    Gemma4Config,
    GraniteConfig,
    Idefics3Config,
    InternVLConfig,
    Lfm2Config,
    Lfm3Config,
    LlamaConfig,
    LlavaConfig,
    MiniMaxM3VLConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
)

from models.checking import BACKENDS, TINY, Cases, Theirs, check_against_transformers, checkpoints_of
from models.test_newer_families import CASES as NEWER
from models.test_newer_families import FACTORS, MLA
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
    "gemma-4-with-images": (Gemma4Config, {"text_config": GEMMA_4, "vision_config": None, "audio_config": None}),
    "minimax-m3": (MiniMaxM3VLConfig, {"text_config": MINIMAX, "vision_config": VISION} | UNTIED),
    "idefics3": (Idefics3Config, {"text_config": TINY | {"model_type": "llama"}, "vision_config": SIGLIP} | UNTIED),
    "smolvlm": (SmolVLMConfig, {"text_config": TINY | {"model_type": "llama"}, "vision_config": SIGLIP} | UNTIED),
    "internvl": (
        InternVLConfig,
        {"text_config": TINY | {"model_type": "qwen2"},
         "vision_config": SIGLIP | {"image_size": [16, 16], "patch_size": [8, 8]}} | UNTIED,
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


# -- those whose language model is that of another checkpoint ----------------------------------------------------------

TEXTS: Cases = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3-moe": (Qwen3MoeConfig, EXPERTS | {"head_dim": 32}),
    "granite": (GraniteConfig, FACTORS),
    "cohere2": (Cohere2Config, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}),
    "lfm2": (Lfm2Config, {"layer_types": ["conv", "full_attention"]}),
    "lfm3": (Lfm3Config, {"layer_types": ["conv", "full_attention", "sliding_attention"], "num_hidden_layers": 3}),
    "deepseek-v3": (DeepseekV3Config, MLA | {"first_k_dense_replace": 1}),
    **{name: NEWER[name] for name in ("llama-4", "gemma-3n")},
}
texts = checkpoints_of(TEXTS)


def of(name: str, architecture: str, prefix: str) -> Any:
    """The language model of `architecture` is that of the case `name`, with `prefix` before its tensors' names."""
    mark = pytest.mark.verifies("safetensors", backend="torch", architecture=architecture)
    return pytest.param(name, architecture, prefix, marks=mark, id=architecture)


@pytest.mark.parametrize(
    ("name", "architecture", "prefix"),
    [
        of("llama", "LlavaNextForConditionalGeneration", "language_model."),
        of("qwen2", "LlavaOnevisionForConditionalGeneration", "language_model."),
        of("qwen2", "Qwen2VLForConditionalGeneration", ""),
        of("cohere2", "AyaVisionForConditionalGeneration", "language_model."),
        of("cohere2", "Cohere2VisionForConditionalGeneration", "model.language_"),
        of("lfm2", "Lfm2VlForConditionalGeneration", "model.language_"),
        of("lfm3", "Lfm3VlForConditionalGeneration", "model.language_"),
        of("deepseek-v3", "KimiK25ForConditionalGeneration", "language_model."),
        of("llama-4", "Llama4ForConditionalGeneration", "language_model."),
        of("gemma-3n", "Gemma3nForConditionalGeneration", "model.language_"),
        of("llama", "PerceptionLMForConditionalGeneration", "model.language_"),
        of("llama", "DeepseekVLHybridForConditionalGeneration", "model.language_"),
        of("llama", "JanusForConditionalGeneration", "model.language_"),
        of("qwen2", "FastVlmForConditionalGeneration", "model.language_"),
        of("qwen2", "VideoLlama3ForConditionalGeneration", "model.language_"),
        of("qwen2", "Qwen2_5OmniForConditionalGeneration", "thinker."),
        of("qwen3-moe", "Qwen3OmniMoeForConditionalGeneration", "thinker."),
        of("granite", "Granite4VisionForConditionalGeneration", "model.language_"),
        of("granite", "GraniteSpeechForConditionalGeneration", "language_model."),
        of("granite", "GraniteDoclingForConditionalGeneration", "model.text_"),
    ],
)
def test_a_language_model_is_found_among_other_parts(
    texts: Callable[[str], Theirs], name: str, architecture: str, prefix: str, tmp_path: Path
) -> None:
    theirs = texts(name)
    tensors = {prefixed(stored, prefix): data for stored, data in load_file(theirs.path / "model.safetensors").items()}
    tensors["visual.proj.weight" if not prefix else "vision_tower.proj.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((theirs.path / "config.json").read_text())
    values = {"architectures": [architecture], "tie_word_embeddings": text["tie_word_embeddings"]}
    whole = {"text_config": text} if prefix else text | {"model_type": "qwen2_vl"}
    (tmp_path / "config.json").write_text(json.dumps(whole | values))
    check_against_transformers("torch", replace(theirs, path=tmp_path))


def prefixed(name: str, prefix: str) -> str:
    if prefix in ("model.language_", "model.text_"):
        return name.replace("model.", f"{prefix}model.", 1) if name.startswith("model.") else name
    return prefix + name


@pytest.mark.parametrize("name", ["minimax-m3"])
@pytest.mark.verifies("safetensors", backend="torch", architecture="MiniMaxM3VLForCausalLM")
def test_a_language_model_alone(checkpoints: Callable[[str], Theirs], name: str, tmp_path: Path) -> None:
    theirs = checkpoints(name)
    stored = load_file(theirs.path / "model.safetensors")
    text = {n.removeprefix("language_model."): data for n, data in stored.items() if n.startswith("language_model.")}
    save_file(text, tmp_path / "model.safetensors")
    config = json.loads((theirs.path / "config.json").read_text())["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["MiniMaxM3VLForCausalLM"]}))
    check_against_transformers("torch", replace(theirs, path=tmp_path))


def test_a_language_model_that_is_not_supported_is_named() -> None:
    values = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "mamba"}}
    with pytest.raises(
        Unsupported, match="the language model of `LlavaForConditionalGeneration` is of the type 'mamba'"
    ):
        family("LlavaForConditionalGeneration").config(CheckpointConfig(Path("config.json"), values))
