"""Checkpoints of the families with layer norms that are older, incomplete, or say what nobody wrote code for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import FalconConfig, GPT2Config, GPTNeoXConfig, MptConfig, StableLmConfig

from models.checking import (
    MAX_LEN,
    TINY,
    Cases,
    Theirs,
    ask_transformers,
    check_against_transformers,
    checkpoints_of,
    compute,
    make_ops,
    random_model,
)
from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.alibi import alibi_slopes, to_bfloat16
from quire.models.registry import family
from quire.weights.config import CheckpointConfig

GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 2, "num_attention_heads": 4}
CASES: Cases = {
    "gpt2": (GPT2Config, {}),
    "gpt-neox": (GPTNeoXConfig, {}),
    "stablelm": (StableLmConfig, {"layer_norm_eps": 1e-3}),
    "falcon-40b": (FalconConfig, GROUPED),
}
checkpoints = checkpoints_of(CASES)


def rewrite(path: Path, rename: Callable[[str], str], more: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    """The tensors under other names and with others beside them; a config value of None takes the key away."""
    tensors = load_file(path / "model.safetensors")
    save_file({rename(name): data for name, data in tensors.items()} | more, path / "model.safetensors")
    values = json.loads((path / "config.json").read_text()) | config
    kept = {key: value for key, value in values.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))


def test_names_may_lack_what_they_begin_with(checkpoints: Callable[[str], Theirs]) -> None:
    """GPT-2 is published as the body of the model, with causal masks, and without a word on tied embeddings."""
    theirs = checkpoints("gpt2")
    masks = {f"h.{i}.attn.bias": np.ones((1, 1, MAX_LEN, MAX_LEN), np.float32) for i in range(2)}
    rewrite(theirs.path, lambda name: name.removeprefix("transformer."), masks, {"tie_word_embeddings": None})
    check_against_transformers("torch", theirs)


def test_gpt_neox_as_it_was_written_before_transformers_5(checkpoints: Callable[[str], Theirs]) -> None:
    theirs = checkpoints("gpt-neox")
    buffers = {"gpt_neox.layers.0.attention.rotary_emb.inv_freq": np.ones(2, np.float32)}
    older = {"rope_parameters": None, "rotary_pct": 0.25, "rotary_emb_base": 10000}
    rewrite(theirs.path, lambda name: name.replace("lm_head", "embed_out"), buffers, older)
    check_against_transformers("torch", theirs)


def test_stablelm_as_it_was_first_published(checkpoints: Callable[[str], Theirs]) -> None:
    theirs = checkpoints("stablelm")
    older = {"architectures": ["StableLMEpochForCausalLM"], "layer_norm_eps": None, "norm_eps": 1e-3}
    older |= {"rope_parameters": None, "rope_pct": 0.25, "rope_theta": 10000}
    rewrite(theirs.path, lambda name: name, {}, older)
    check_against_transformers("torch", theirs)


def test_falcon_40b_as_it_was_first_published(checkpoints: Callable[[str], Theirs]) -> None:
    theirs = checkpoints("falcon-40b")
    older: dict[str, Any] = {"architectures": ["RWForCausalLM"], "new_decoder_architecture": None, "n_head_kv": 2}
    older |= {"num_hidden_layers": None, "n_layer": 2, "num_attention_heads": None, "n_head": 4}
    older |= {"num_kv_heads": None, "multi_query": None, "num_ln_in_parallel_attn": None, "ffn_hidden_size": None}
    rewrite(theirs.path, lambda name: name, {}, older)
    check_against_transformers("torch", theirs)


def test_norms_of_q_and_k_in_mpt(tmp_path: Path) -> None:
    """transformers leaves them out, so they are put into its model by hand."""
    model = random_model(MptConfig(**{**TINY, "max_seq_len": MAX_LEN}), seed=7)
    norms = {}
    for i, block in enumerate(model.transformer.blocks):
        pair = [torch.nn.LayerNorm(TINY["hidden_size"], eps=1e-5, bias=False) for _ in "qk"]
        for x, norm in zip("qk", pair, strict=True):
            torch.nn.init.normal_(norm.weight, mean=0.5, std=0.5)
            norms[f"transformer.blocks.{i}.attn.{x}_ln.weight"] = norm.weight.detach().numpy()

        def normed(module: Any, inputs: Any, qkv: torch.Tensor, pair: Any = pair) -> torch.Tensor:
            q, k, v = qkv.chunk(3, dim=-1)
            return torch.cat([pair[0](q), pair[1](k), v], dim=-1)

        block.attn.Wqkv.register_forward_hook(normed)
    theirs = ask_transformers(model, tmp_path)
    rewrite(tmp_path, str, norms, {"attn_config": {"qk_ln": True}})
    check_against_transformers("torch", theirs)


def test_slopes_of_falcon_are_rounded_as_torch_rounds() -> None:
    for heads in (8, 12, 71):
        rounded = torch.tensor(alibi_slopes(heads)).bfloat16().tolist()
        assert [to_bfloat16(slope) for slope in alibi_slopes(heads)] == rounded


def test_missing_tensors_are_listed_at_once(checkpoints: Callable[[str], Theirs], tmp_path: Path) -> None:
    theirs = checkpoints("gpt-neox")
    (tmp_path / "config.json").write_bytes((theirs.path / "config.json").read_bytes())
    tensors = load_file(theirs.path / "model.safetensors")
    gone = ["gpt_neox.embed_in.weight", "gpt_neox.layers.1.mlp.dense_4h_to_h.bias"]
    save_file({name: data for name, data in tensors.items() if name not in gone}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=f"2 are missing: {', '.join(gone)}"):
        compute(make_ops("torch"), tmp_path)


# -- configurations ----------------------------------------------------------------------------------------------------

OF_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 96}
OF_MPT = {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "vocab_size": 96}
OF_BLOOM = {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96}
SIZES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": OF_GPT2,
    "GPTBigCodeForCausalLM": OF_GPT2,
    "GPTJForCausalLM": OF_GPT2 | {"rotary_dim": 8},
    "MPTForCausalLM": OF_MPT,
    "BloomForCausalLM": OF_BLOOM,
}
REFUSED = [
    ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}),
    ("GPT2LMHeadModel", {"scale_attn_weights": False}),
    ("GPT2LMHeadModel", {"activation_function": "mish"}),
    ("GPTBigCodeForCausalLM", {"add_cross_attention": True}),
    ("GPTJForCausalLM", {"tie_word_embeddings": True}),
    ("GPTNeoXForCausalLM", {"hidden_act": "mish"}),
    ("PhiForCausalLM", {"tie_word_embeddings": True}),
    ("OPTForCausalLM", {"activation_function": "mish"}),
    ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}),
    ("BloomForCausalLM", {"slow_but_exact": True}),
    ("MPTForCausalLM", {"no_bias": False}),
    ("MPTForCausalLM", {"expansion_ratio": 2}),
    ("MPTForCausalLM", {"logit_scale": "inv_sqrt_d_model"}),
    ("MPTForCausalLM", {"norm_type": "rmsnorm"}),
    ("MPTForCausalLM", {"attn_config": {"alibi": False}}),
    ("MPTForCausalLM", {"attn_config": {"attn_type": "multiquery_attention"}}),
    ("MPTForCausalLM", {"attn_config": {"prefix_lm": True}}),
    ("MPTForCausalLM", {"attn_config": {"kv_n_heads": 2}}),
    ("MPTForCausalLM", {"attn_config": {"alibi_bias_max": 0.0}}),
    ("FalconForCausalLM", {"new_decoder_architecture": True, "parallel_attn": False}),
    ("FalconForCausalLM", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3}),
    ("FalconForCausalLM", {"num_ln_in_parallel_attn": 2}),
    ("Starcoder2ForCausalLM", {"mlp_type": "gated"}),
    ("Starcoder2ForCausalLM", {"norm_type": "rms_norm"}),
    ("StableLmForCausalLM", {"rope_scaling": {"rope_type": "spiral"}}),
]


def read(architecture: str, values: dict[str, Any]) -> Any:
    sizes = SIZES.get(architecture, {key: value for key, value in TINY.items() if value is not None})
    hf = CheckpointConfig(Path("config.json"), {"architectures": [architecture], "ffn_dim": 80, **sizes, **values})
    return family(architecture).config(hf)


@pytest.mark.parametrize(("architecture", "values"), REFUSED)
def test_a_value_without_code_is_refused_by_name(architecture: str, values: dict[str, Any]) -> None:
    read(architecture, {})
    key, value = list(values.items())[-1]
    if isinstance(value, dict):
        inner, value = next(iter(value.items()))
        key = f"{key}.{inner}" if key == "attn_config" else "rope scaling"
    with pytest.raises(Unsupported) as error:
        read(architecture, values)
    assert key in error.value.message and (str(value) in error.value.message), error.value.message
    assert error.value.hint


def test_a_missing_number_is_named() -> None:
    with pytest.raises(BadCheckpoint, match="rotary_dim is missing"):
        read("GPTJForCausalLM", {"rotary_dim": None})
    with pytest.raises(BadCheckpoint, match="20 of 16 columns of a head are rotated"):
        read("GPTJForCausalLM", {"rotary_dim": 20})
    with pytest.raises(BadCheckpoint, match="num_attention_heads is missing"):
        read("BloomForCausalLM", {"n_head": None})


def test_numbers_that_published_configurations_name_otherwise_or_leave_out() -> None:
    named = {"n_embed": 48, "num_attention_heads": 6, "n_head": None, "hidden_size": None}
    bloom = read("BloomForCausalLM", named)
    assert (bloom.hidden, bloom.heads, bloom.intermediate, bloom.max_position) == (48, 6, 192, 2048)
    assert read("FalconForCausalLM", {"max_position_embeddings": None}).max_position == 2048
