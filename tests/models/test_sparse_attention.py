"""Sparse attention beyond the tokens that its indexer keeps: DeepSeek V3.2 and GLM-5, against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV32Config, GlmMoeDsaConfig

from models.checking import BACKENDS, MAX_LEN, TINY, Cases, Theirs, check_against_transformers, checkpoints_of
from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.registry import family
from quire.weights.config import CheckpointConfig

SIZES = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "first_k_dense_replace": 1, "index_head_dim": 16, "index_n_heads": 8, "index_topk": 6,
}  # fmt: skip
CASES: Cases = {
    "v32": (DeepseekV32Config, {}),
    "v32-odd": (DeepseekV32Config, {"index_head_dim": 20, "index_n_heads": 6, "index_topk": 1, "num_hidden_layers": 3}),
    "v32-many-heads": (
        DeepseekV32Config,
        {"num_attention_heads": 40, "num_key_value_heads": 40, "index_topk": 13, "hidden_size": 160},
    ),
    "glm-5": (GlmMoeDsaConfig, {}),
    "glm-5-shared": (
        GlmMoeDsaConfig,
        {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"], "index_topk": 9},
    ),
}

checkpoints = checkpoints_of({name: (kind, SIZES | options) for name, (kind, options) in CASES.items()})


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))


def read(architecture: str = "GlmMoeDsaForCausalLM", **values: Any) -> Any:
    common = {key: value for key, value in (TINY | SIZES).items() if value is not None} | {"hidden_act": "silu"}
    config = CheckpointConfig(Path("config.json"), common | {"architectures": [architecture]} | values)
    return family(architecture).config(config)


def test_the_layers_that_use_the_choice_of_another_are_read_in_three_ways() -> None:
    layers = {"num_hidden_layers": 6}
    every_second = (True, True, True, False, True, False)
    assert read(**layers).indexer.own == (True,) * 6
    assert read(**layers, index_topk_freq=2, index_skip_topk_offset=3).indexer.own == every_second
    assert read(**layers, index_topk_pattern="FFFSFS").indexer.own == every_second
    modes = ["full", "full", "full", "shared", "full", "shared"]
    assert read(**layers, indexer_types=modes, index_topk_pattern="FFFFFF").indexer.own == every_second
    with pytest.raises(BadCheckpoint, match="indexer_types has 6 layers of shared, full; it needs 6, each full or"):
        read(**layers, indexer_types=[*reversed(modes)])
    with pytest.raises(BadCheckpoint, match="index_topk 0"):
        read(index_topk=0)
    with pytest.raises(Unsupported, match="an indexer without q_lora_rank"):
        read(q_lora_rank=None)


def test_an_indexer_that_would_choose_all_positions_is_left_out() -> None:
    config = read(index_topk=MAX_LEN)
    assert config.index is not None and config.max_length == MAX_LEN
    assert config.at_length(MAX_LEN).index is None
    assert config.at_length(MAX_LEN + 1).index == config.index
