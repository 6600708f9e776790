"""Configurations with any values changed give an error that is ours, in bounded time and memory."""

import random
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import transformers

from quire.core.errors import QuireError
from quire.models.registry import PURPOSES, family, read_model_config
from quire.models.rope import RopeSpec, frequencies
from quire.weights.config import CheckpointConfig
from quire.weights.huggingface import _older_rope_keys
from trials import LENGTH

WRONG: list[Any] = [
    0,
    -1,
    1,
    7,
    10**6,
    10**9,
    1 << 40,
    1 << 63,
    10**40,
    0.0,
    -1.0,
    1e308,
    float("nan"),
    "x",
    "",
    [],
    {},
]
WRONG += [[1] * 1000, {"a": 1}, None, True, False, [None], {"factor": 0}]


def saved_by_default(architecture: str) -> dict[str, Any]:
    """Of the class of transformers for the family, if there is one."""
    name = re.sub(r"For[A-Z]\w*$|LMHeadModel|(MT)?Model$", "Config", architecture)
    make = getattr(transformers, name, None)
    return make().to_dict() | {"architectures": [architecture]} if make else {}


def configurations() -> dict[str, dict[str, Any]]:
    """By architecture: what transformers saves by default, with few layers."""
    named = {}
    for architecture in [name for table in PURPOSES.values() for name in table]:
        if values := saved_by_default(architecture):
            few = {key: 2 for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if key in values}
            named[architecture] = _older_rope_keys(values | few)
    return named


def read(architecture: str, values: dict[str, Any]) -> bool:
    """Whether it could be read."""
    hf = CheckpointConfig(Path("config.json"), values)
    try:
        config = read_model_config(family(architecture, "generate", "embed", "score"), hf)
        if isinstance(rope := getattr(config, "rope", None), RopeSpec):
            frequencies(rope, min(config.max_position, 4096))
    except QuireError:
        return False
    return True


def mutated(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    values = dict(values)
    for key in rng.choices(sorted(values.keys() - {"architectures"}), k=rng.randint(1, 3)):
        inner = values[key]
        if isinstance(inner, dict) and inner and rng.random() < 0.8:
            values[key] = inner | {rng.choice(sorted(inner)): rng.choice(WRONG)}
        else:
            values[key] = rng.choice(WRONG)
    return values


@pytest.mark.trial
def test_no_value_of_config_json_hangs_or_crashes_a_reader() -> None:
    bases = configurations()
    assert len(bases) > 60
    tracemalloc.start()
    readable = 0
    for architecture, values in bases.items():
        for seed in range(5 * LENGTH):
            readable += read(architecture, mutated(random.Random(f"{architecture} {seed}"), values))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert readable > 25 and peak < 400 << 20


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("LlamaForCausalLM", "num_hidden_layers"),
        ("LlamaForCausalLM", "num_attention_heads"),
        ("GPT2LMHeadModel", "n_layer"),
        ("Qwen3MoeForCausalLM", "num_local_experts"),
        ("T5ForConditionalGeneration", "num_decoder_layers"),
        ("BertModel", "num_hidden_layers"),
        ("BartForConditionalGeneration", "decoder_layers"),
    ],
)
def test_a_count_of_a_billion_is_refused_by_name(architecture: str, key: str) -> None:
    hf = CheckpointConfig(Path("config.json"), _older_rope_keys(saved_by_default(architecture) | {key: 10**9}))
    with pytest.raises(QuireError, match=f"{key} is 1000000000, and at most"):
        read_model_config(family(architecture, "generate", "embed", "score"), hf)
