"""Which layers have a window where config.json does not list them: what the classes of transformers derive."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from quire.models.registry import family
from quire.weights.config import CheckpointConfig

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 9, "num_attention_heads": 4, "vocab_size": 64}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "moe_intermediate_size": 16, "n_routed_experts": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
NO_WINDOW: dict[str, Any] = {"sliding_window": None}
GEMMA: dict[str, Any] = {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "hidden_act": None}

CASES = [
    ("CwmForCausalLM", "CwmConfig", {}),
    ("CwmForCausalLM", "CwmConfig", {"sliding_window": 7}),
    ("GptOssForCausalLM", "GptOssConfig", EXPERTS),
    ("GptOssForCausalLM", "GptOssConfig", EXPERTS | {"sliding_window": 7}),
    ("Exaone4ForCausalLM", "Exaone4Config", {}),
    ("Exaone4ForCausalLM", "Exaone4Config", {"sliding_window": 7, "sliding_window_pattern": 3}),
    ("Olmo3ForCausalLM", "Olmo3Config", {}),
    ("Cohere2ForCausalLM", "Cohere2Config", {}),
    ("Cohere2ForCausalLM", "Cohere2Config", {"sliding_window_pattern": 2, "sliding_window": 7}),
    ("Gemma2ForCausalLM", "Gemma2Config", GEMMA),
    ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA),
    ("MinistralForCausalLM", "MinistralConfig", {}),
    ("MinistralForCausalLM", "MinistralConfig", NO_WINDOW),
    ("MistralForCausalLM", "MistralConfig", {}),
    ("MistralForCausalLM", "MistralConfig", NO_WINDOW),
    ("Phi3ForCausalLM", "Phi3Config", {}),
    ("Qwen2ForCausalLM", "Qwen2Config", {}),
    ("Qwen2ForCausalLM", "Qwen2Config", {"use_sliding_window": True, "max_window_layers": 4}),
    ("Qwen3ForCausalLM", "Qwen3Config", {"use_sliding_window": True, "max_window_layers": 4, "sliding_window": 7}),
    ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS | {"use_sliding_window": True}),
    ("Dots1ForCausalLM", "Dots1Config", EXPERTS | {"max_window_layers": 4}),
    ("Dots1ForCausalLM", "Dots1Config", EXPERTS | {"max_window_layers": 4} | NO_WINDOW),
    ("SmolLM3ForCausalLM", "SmolLM3Config", {}),
]


@pytest.mark.parametrize(("architecture", "class_name", "values"), CASES)
def test_windows_are_derived_where_layer_types_are_missing(
    architecture: str, class_name: str, values: dict[str, Any]
) -> None:
    given = SIZES | {"hidden_act": "silu"} | values
    theirs = getattr(transformers, class_name)(**given)
    ours = family(architecture).config(CheckpointConfig(Path("config.json"), given | {"architectures": [architecture]}))
    window = theirs.sliding_window or 0
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * SIZES["num_hidden_layers"]
    assert ours.windows == tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def test_a_pattern_of_letters_repeats_and_spares_the_last_layer() -> None:
    values = SIZES | {"hidden_act": "silu", "sliding_window": 7, "sliding_window_pattern": "LLLG"}
    config = CheckpointConfig(Path("config.json"), values | {"architectures": ["Exaone4ForCausalLM"]})
    assert family("Exaone4ForCausalLM").config(config).windows == (7, 7, 7, 0, 7, 7, 7, 0, 0)
