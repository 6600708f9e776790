"""Positions scaled by options: as if the checkpoint said so."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import BadRequest, Unsupported
from quire.engine.options import EngineOptions
from quire.models.rope_override import with_rope
from quire.weights.config import CheckpointConfig

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
PROMPT = [5 + number % 200 for number in range(400)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def said(model: Path, folder: Path, **values: Any) -> Path:
    """The model, with these values in its config.json."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    for old in ("rope_scaling", "rope_parameters"):
        config.pop(old, None)
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


def answer(model: Path, **options: Any) -> tuple[list[int], int]:
    llm = LLM(model, **options)
    return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids, llm.engine.capacity.max_model_len


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ({"rope_scaling": YARN}, {"rope_scaling": "yarn", "rope_scale": 4, "yarn_orig_ctx": 256}),
        ({"rope_scaling": YARN}, {"rope_scaling": json.dumps(YARN)}),
        ({"rope_scaling": YARN}, {"rope_scaling": YARN}),
        ({"rope_scaling": YARN}, {"hf_overrides": {"rope_parameters": YARN}}),
        (
            {"rope_scaling": YARN | {"beta_fast": 16}},
            {"json_model_override_args": {"rope_scaling": YARN | {"beta_fast": 16}}},
        ),
        ({"rope_theta": 500.0}, {"rope_theta": 500}),
        ({"rope_theta": 500.0}, {"hf_overrides": {"rope_theta": 500.0}}),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 1024},
            {"rope_scaling": "linear", "rope_factor": 2},
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 1024},
            {"rope_scale": 2},
        ),
    ],
)
def test_options_mean_what_config_json_would(
    tiny_model: Path, tmp_path: Path, values: dict[str, Any], options: dict[str, Any]
) -> None:
    wanted = answer(said(tiny_model, tmp_path / "said", **values))
    assert answer(tiny_model, **options) == wanted != answer(tiny_model)


def test_a_longer_context_can_be_used(tiny_model: Path) -> None:
    llm = LLM(tiny_model, rope_scaling="yarn", rope_scale=4)
    assert llm.engine.capacity.max_model_len == 2048
    assert llm.generate([7] * 1500, GREEDY)[0].outputs[0].token_ids
    with pytest.raises(BadRequest, match="max_model_len is 4096"):
        LLM(tiny_model, rope_scaling="yarn", rope_scale=4, max_model_len=4096)


def test_a_gguf_file_is_scaled_too(default_model: Path) -> None:
    plain = LLM(default_model).engine.capacity.max_model_len
    assert LLM(default_model, rope_scaling="yarn", rope_scale=2).engine.capacity.max_model_len == 2 * plain


def test_the_language_model_of_a_checkpoint_with_images_is_scaled() -> None:
    text = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
    config = CheckpointConfig(Path("c"), {"architectures": ["LlavaForConditionalGeneration"], "text_config": text})
    changed = with_rope(config, {"rope_type": "yarn", "factor": 2.0})
    assert changed.dict("text_config")["rope_parameters"] == {"rope_type": "yarn", "factor": 2.0}


def test_what_changes_nothing_is_refused() -> None:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": 100}
    gpt2 = {
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        **sizes,
    }
    with pytest.raises(Unsupported, match="change nothing for this `GPT2LMHeadModel`"):
        with_rope(CheckpointConfig(Path("c"), gpt2), {"rope_type": "yarn", "factor": 2.0})
    layers = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    config = CheckpointConfig(Path("c"), {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": layers})
    with pytest.raises(Unsupported, match="for each kind of its layers"):
        with_rope(config, {"rope_theta": 5.0})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rope_scaling": "ntk"}, "rope_scaling is `ntk`.*\n.*linear, dynamic, yarn"),
        ({"rope_scaling": "yarn"}, "the RoPE scaling `yarn` has no factor.*\n.*rope_scale"),
        ({"rope_scaling": "{"}, "rope_scaling is not JSON"),
        ({"rope_scaling": YARN, "rope_scale": 2}, "rope_scaling has its factor"),
        ({"yarn_orig_ctx": 512}, "yarn_orig_ctx is given, and no scaling"),
        ({"hf_overrides": {"num_hidden_layers": 1}}, "hf_overrides has `num_hidden_layers`"),
        ({"hf_overrides": {"rope_scaling": 4}}, "rope_scaling of hf_overrides is 4"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"yarn_beta_fast": 16}, "yarn_beta_fast is 16.*\n.*rope_scaling"),
    ],
)
def test_what_cannot_work_says_what_would(given: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequest, match=told):
        EngineOptions.of(given)
