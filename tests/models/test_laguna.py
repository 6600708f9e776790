"""Laguna against transformers, and from GGUF files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LagunaConfig

from models.checking import BACKENDS, TINY, Cases, Theirs, check_against_transformers, checkpoints_of
from quire.core.errors import BadCheckpoint, QuireError, Unsupported
from quire.models.registry import family
from quire.weights.config import CheckpointConfig
from quire.weights.huggingface import read_config

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
EXPERTS = {
    "num_hidden_layers": 4, "head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48, "moe_routed_scaling_factor": 2.0,
}  # fmt: skip
HYBRID = {  # as XS.2: layers with a window have more query heads
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_attention_heads_per_layer": [4, 6, 6, 4], "sliding_window": 5,
    "rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT | {"partial_rotary_factor": 1.0}},
}  # fmt: skip
CASES: Cases = {
    "laguna": (LagunaConfig, EXPERTS | HYBRID),
    "laguna-gated-elements": (  # as M.1, which has no windows
        LagunaConfig,
        EXPERTS | {"gating": "per-element", "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]},
    ),
    "laguna-capped": (LagunaConfig, EXPERTS | {"moe_router_logit_softcapping": 1.5, "tie_word_embeddings": True}),
}

checkpoints = checkpoints_of(CASES)


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))


@pytest.mark.verifies("gguf")
@pytest.mark.parametrize("name", ["laguna", "laguna-gated-elements"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gguf_file_says_the_gate_by_its_shape(
    checkpoints: Callable[[str], Theirs], backend: str, name: str, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason="needs the package gguf")
    from models.gguf_latest_writing import write_laguna

    theirs = checkpoints(name)
    check_against_transformers(backend, replace(theirs, path=write_laguna(theirs.path, tmp_path / "model.gguf")))


def test_one_rope_that_is_named_full_attention_is_that_of_all_layers(tmp_path: Path) -> None:
    """As M.1 says it."""
    values = TINY | EXPERTS | {"architectures": ["LagunaForCausalLM"], "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(values | {"rope_parameters": {"full_attention": YARN}}))
    config: Any = family("LagunaForCausalLM").config(read_config(tmp_path))
    assert (config.rope.type, config.rope.theta, config.rope.rotary_dim) == ("yarn", 5000.0, 12)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"num_attention_heads_per_layer": [4, 6]}, BadCheckpoint, "lists 2 layers, and there are 4"),
        ({"num_attention_heads_per_layer": [4, 5, 4, 4]}, BadCheckpoint, "5 query heads cannot share 2 key heads"),
        ({"gating": "per-token"}, Unsupported, "gating is 'per-token'"),
        ({"gating": False}, Unsupported, "gating is False"),
        ({"gating_types": ["per-head", "per-element"]}, Unsupported, "gates per head and per element"),
        ({"moe_apply_router_weight_on_input": True}, Unsupported, "moe_apply_router_weight_on_input is True"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    values: dict[str, Any], error: type[QuireError], message: str
) -> None:
    given = TINY | EXPERTS | {"architectures": ["LagunaForCausalLM"], "hidden_act": "silu"} | values
    with pytest.raises(error, match=message):
        family("LagunaForCausalLM").config(CheckpointConfig(Path("config.json"), given))
