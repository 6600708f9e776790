"""Gemma 1, 2 and 3 against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma2Config, Gemma3Config, Gemma3TextConfig, GemmaConfig

from models.checking import BACKENDS, TINY, Cases, Theirs, check_against_transformers, checkpoints_of
from quire.core.errors import BadCheckpoint, Unsupported
from quire.models import llama, text_part
from quire.ops.opset import Activation
from quire.weights.config import CheckpointConfig

EAGER = {"attn_implementation": "eager"}  # what caps scores
SECOND = EAGER | {"head_dim": 32, "sliding_window": 6, "query_pre_attn_scalar": 24, "num_hidden_layers": 3}
THIRD = {"head_dim": 32, "sliding_window": 6, "query_pre_attn_scalar": 24, "num_hidden_layers": 4}
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28}
CASES: Cases = {
    "gemma": (GemmaConfig, {"head_dim": 32}),
    "gemma-mqa": (GemmaConfig, {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    "gemma2": (Gemma2Config, SECOND | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2-uncapped": (Gemma2Config, SECOND | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": (Gemma3TextConfig, THIRD | {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gemma3-pattern": (Gemma3TextConfig, THIRD | {"sliding_window_pattern": 3}),
    "gemma3-linear": (
        Gemma3TextConfig,
        THIRD
        | {
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "gemma3-with-images": (Gemma3Config, {"text_config": TINY | THIRD, "vision_config": VISION}),
}

checkpoints = checkpoints_of(CASES)


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))


def read(**values: Any) -> llama.LlamaConfig:
    """The configuration of a checkpoint with the larger keys of Gemma 2."""
    common = {"hidden_size": 2304, "intermediate_size": 9216, "vocab_size": 256_000, "num_attention_heads": 8}
    common |= {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6}
    return llama.config(CheckpointConfig(Path("config.json"), common | values))


def test_the_first_gemmas_did_not_say_what_they_compute() -> None:
    first = read(architectures=["GemmaForCausalLM"], hidden_act="gelu", hidden_activation=None, num_hidden_layers=18)
    assert (first.activation, first.score_scale, first.embed_scale) == (Activation.GELU_TANH, None, 48.0)
    assert (first.windows, first.score_cap, first.tied) == ((0,) * 18, 0.0, True)
    second = read(
        architectures=["Gemma2ForCausalLM"],
        num_hidden_layers=4,
        sliding_window=4096,
        query_pre_attn_scalar=144,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    assert (second.windows, second.score_scale) == ((4096, 0) * 2, 1 / 12)
    assert (second.score_cap, second.logit_cap, second.rope.theta) == (50.0, 30.0, 10_000.0)


def test_a_gemma3_with_images_leaves_most_of_its_text_unsaid() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "sliding_window": 1024}
    text["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    third = text_part.config(CheckpointConfig(Path("config.json"), values))
    assert (third.heads, third.kv_heads, third.head_dim, third.vocab) == (8, 4, 256, 262_208)
    assert third.windows == ((1024,) * 5 + (0,)) * 5 + (1024,) * 4
    assert (third.rope.type, third.rope.theta, third.local_rope.theta) == ("linear", 1_000_000.0, 10_000.0)
    assert third.max_position == 131_072


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ({"layer_types": 6}, "layer_types is 6, not a list"),
        ({"layer_types": ["full_attention"]}, "layer_types lists 1 layers, and there are 2"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"use_bidirectional_attention": True, "attn_logit_softcapping": 5.0}, "scores of an encoder have a softcap"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types lists linear_attention"),
        ({"rope_local_scaling": {"rope_type": "linear"}}, "rope_local_scaling is"),
    ],
)
def test_what_nobody_wrote_code_for_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises((Unsupported, BadCheckpoint), match=message):
        read(architectures=["Gemma3ForCausalLM"], num_hidden_layers=2, **values)
