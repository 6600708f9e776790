"""Typed reads that fail by name."""

import json
from pathlib import Path

import pytest

from quire.core.errors import BadCheckpoint, Unsupported
from quire.weights.config import CheckpointConfig
from quire.weights.huggingface import read_config

CONFIG = CheckpointConfig(
    Path("config.json"),
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "rope_theta": 10000,
        "eps": 1e-5,
        "hidden_act": "silu",
        "tied": True,
        "sliding_window": None,
        "rope_scaling": {"rope_type": "yarn", "factor": "four"},
        "eos_token_id": 2,
    },
    {"eos_token_id": [7, 2]},
)


def test_values_come_with_their_types() -> None:
    assert CONFIG.architecture == "LlamaForCausalLM"
    assert CONFIG.int("hidden_size") == 64
    assert isinstance(CONFIG.float("rope_theta"), float)
    assert CONFIG.float("eps") == 1e-5
    assert CONFIG.str("hidden_act") == "silu"
    assert CONFIG.bool("tied") is True
    assert CONFIG.expect("hidden_act", "silu", "gelu") == "silu"
    assert CONFIG.dict("rope_scaling")["rope_type"] == "yarn"
    assert CONFIG.get("sliding_window", 5) == 5


def test_null_counts_as_missing() -> None:
    assert "sliding_window" not in CONFIG
    assert CONFIG.int("sliding_window", default=3) == 3
    assert CONFIG.expect("sliding_window", None) is None
    with pytest.raises(BadCheckpoint, match=r"config\.json: sliding_window is missing"):
        CONFIG.int("sliding_window")


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: CONFIG.int("layers"), "layers is missing"),
        (lambda: CONFIG.int("hidden_act"), "hidden_act is 'silu', not an integer"),
        (lambda: CONFIG.int("tied"), "tied is True, not an integer"),
        (lambda: CONFIG.bool("hidden_size"), "hidden_size is 64, not true or false"),
        (lambda: CONFIG.float("hidden_act"), "hidden_act is 'silu', not a number"),
        (lambda: CONFIG.expect("act", "silu"), "act is missing"),
        (lambda: CONFIG.section("rope_scaling").float("factor"), "rope_scaling.factor is 'four', not a number"),
        (lambda: CheckpointConfig(Path("config.json"), {}).architecture, "architectures is missing"),
        (lambda: CheckpointConfig(Path("config.json"), {"eps": float("nan")}).float("eps"), "eps is nan"),
        (lambda: CheckpointConfig(Path("config.json"), {"eos_token_id": "x"}).eos_ids, "eos_token_id is 'x'"),
    ],
)
def test_a_wrong_value_names_file_and_key(read, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadCheckpoint) as raised:
        read()
    assert raised.value.message.startswith(f"config.json: {message}")


def test_a_value_nobody_wrote_code_for_is_unsupported() -> None:
    with pytest.raises(Unsupported, match=r"config\.json: hidden_act is 'silu'") as raised:
        CONFIG.expect("hidden_act", "gelu")
    assert raised.value.hint == "supported: 'gelu'"


def test_end_tokens_are_those_of_both_files_generation_first() -> None:
    assert CONFIG.eos_ids == [7, 2]


def test_rope_parameters_of_newer_configs_read_like_older_ones(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "partial_rotary_factor": 0.5}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "rope_parameters": rope}))
    config = read_config(tmp_path)
    assert config.float("rope_theta") == 5e5
    assert config.float("partial_rotary_factor") == 0.5
    assert config.dict("rope_scaling") == {"rope_type": "llama3", "factor": 8.0}
    (tmp_path / "config.json").write_text(json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}))
    assert "rope_scaling" not in read_config(tmp_path)


def test_a_config_that_is_not_json_is_named(tmp_path: Path) -> None:
    for content in ("{", "[1]", "\x00", "[" * 100_000):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(BadCheckpoint, match=r"config\.json"):
            read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"has no config\.json"):
        read_config(tmp_path)
