"""Gemma 1, 2 and 3 against transformers."""

from collections.abc import Callable

import pytest
from transformers import Gemma2Config, Gemma3Config, Gemma3TextConfig, GemmaConfig

from models.checking import BACKENDS, TINY, Cases, Theirs, check_against_transformers, checkpoints_of

EAGER = {"attn_implementation": "eager"}  # what caps scores
SECOND = EAGER | {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24, "num_hidden_layers": 3}
THIRD = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24, "num_hidden_layers": 4}
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28}
CASES: Cases = {
    "gemma": (GemmaConfig, {"head_dim": 16}),
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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))
