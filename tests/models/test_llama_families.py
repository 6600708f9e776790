"""Rows of llama_families.py, and other families close to Llama, against transformers; families that it does not have,
against an equivalent one."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import (
    ApertusConfig,
    ArceeConfig,
    CwmConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
)

from models.checking import (
    BACKENDS,
    PROMPT,
    TINY,
    Cases,
    Theirs,
    assert_close,
    check_against_transformers,
    checkpoints_of,
    compute,
    make_ops,
    random_model,
    rewritten,
)
from quire.models import baichuan
from quire.models.alibi import alibi_slopes
from quire.models.llama_families import FAMILIES

FACTORS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 4.0}
GRANITE_4 = FACTORS | {"layer_types": ["full_attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 80}
ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
SOME_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
CWM = {"rope_parameters": DEFAULT, "bos_token_id": 0, "eos_token_id": 96}
ODD_TIED = {"head_dim": 20, "tie_word_embeddings": True}
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 12,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.7,
}
CASES: Cases = {
    "apertus": (ApertusConfig, {"rope_parameters": DEFAULT}),
    "apertus-mha": (ApertusConfig, {"rope_parameters": DEFAULT, "num_key_value_heads": 4, "attention_bias": True}),
    "ministral-3": (Ministral3Config, {"rope_parameters": GROWING}),
    "ministral-3-window": (Ministral3Config, {"rope_parameters": GROWING, "head_dim": 24, "sliding_window": 9}),
    "ministral": (MinistralConfig, SOME_WINDOWS | {"head_dim": 24}),
    "ministral-tied": (MinistralConfig, {"num_attention_heads": 3, "num_key_value_heads": 1} | ODD_TIED),
    "cwm-tied": (
        CwmConfig,
        SOME_WINDOWS | CWM | ODD_TIED | {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 5},
    ),
    "cwm": (CwmConfig, SOME_WINDOWS | CWM),
    "hunyuan": (HunYuanDenseV1Config, {"head_dim": 24, "rope_parameters": ALPHA, "tie_word_embeddings": True}),
    "hunyuan-plain": (HunYuanDenseV1Config, {"head_dim": 32, "attention_bias": True}),
    "helium": (HeliumConfig, {"head_dim": 32, "num_key_value_heads": 4}),
    "helium-biases": (HeliumConfig, {"head_dim": 32, "num_key_value_heads": 1, "attention_bias": True}),
    "arcee": (ArceeConfig, {}),
    "arcee-biases": (ArceeConfig, {"mlp_bias": True, "attention_bias": True, "num_key_value_heads": 1}),
    "granite-4": (GraniteMoeHybridConfig, GRANITE_4 | {"position_embedding_type": "rope"}),
    "granite-4-nope": (GraniteMoeHybridConfig, GRANITE_4 | {"position_embedding_type": None}),
    "llama": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 32**-0.5,
            "residual_multiplier": 1.4 / 2**0.5,
            "logits_scaling": 128 / 16,
        },
    ),
}

checkpoints = checkpoints_of(CASES)


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))


# -- families whose code transformers does not have --------------------------------------------------------------------


def packed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As Baichuan has q, k and v."""
    kept = {name: data for name, data in tensors.items() if ".self_attn." not in name or "o_proj" in name}
    for layer in range(2):
        parts = [tensors[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
        kept[f"model.layers.{layer}.self_attn.W_pack.weight"] = np.concatenate(parts)
    return kept


@pytest.mark.parametrize("name", ["llama"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="BaiChuanForCausalLM")
def test_baichuan_7b_is_llama_with_q_k_and_v_packed(
    checkpoints: Callable[[str], Theirs], backend: str, name: str, tmp_path: Path
) -> None:
    theirs = checkpoints(name)
    tensors = packed(load_file(theirs.path / "model.safetensors"))
    values = {"architectures": ["BaiChuanForCausalLM"]}
    check_against_transformers(
        backend, rewritten(theirs, tmp_path, values, tensors, ("head_dim", "num_key_value_heads"))
    )


@pytest.mark.parametrize("name", ["llama"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="BaichuanForCausalLM")
def test_baichuan_2_norms_the_rows_of_its_head(
    checkpoints: Callable[[str], Theirs], backend: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = checkpoints(name)
    tensors = packed(load_file(theirs.path / "model.safetensors"))
    lengths = np.linalg.norm(tensors["lm_head.weight"], axis=1)
    monkeypatch.setattr(baichuan, "BAICHUAN_2_VOCAB", len(lengths))
    values = {"architectures": ["BaichuanForCausalLM"]}
    ours = rewritten(theirs, tmp_path, values, tensors, ("head_dim", "num_key_value_heads"))
    assert_close(compute(make_ops(backend), ours.path)(PROMPT, 0), theirs.prefill / lengths)


@pytest.mark.parametrize("heads", [4, 5])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="BaichuanForCausalLM")
def test_baichuan_13b_has_slopes_instead_of_rotation(backend: str, heads: int, tmp_path: Path) -> None:
    """Llama whose rotation is stopped, with the slopes in its mask."""
    sizes = {"hidden_size": 16 * heads, "num_attention_heads": heads, "num_key_value_heads": heads}
    model = random_model(LlamaConfig(**{**TINY, **sizes, "attn_implementation": "eager"}), seed=5)
    model.model.rotary_emb.inv_freq.zero_()
    (tmp_path / "llama").mkdir()
    model.save_pretrained(tmp_path / "llama")
    places = torch.arange(len(PROMPT))
    falling = torch.tensor(alibi_slopes(heads))[:, None, None] * (places[None, :] - places[:, None])
    mask = falling.masked_fill(places[None, :] > places[:, None], float("-inf"))
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT]), attention_mask=mask[None], use_cache=False).logits[0].numpy()
    values = {"architectures": ["BaichuanForCausalLM"], "model_max_length": 64}
    without = ("head_dim", "num_key_value_heads", "max_position_embeddings")
    tensors = packed(load_file(tmp_path / "llama" / "model.safetensors"))
    ours = rewritten(Theirs(tmp_path / "llama", logits, []), tmp_path, values, tensors, without)
    run = compute(make_ops(backend), ours.path)
    assert_close(np.concatenate([run(PROMPT[:9], 0), run(PROMPT, 9)]), logits)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="ExaoneForCausalLM")
def test_exaone_3_is_llama_under_other_names(
    checkpoints: Callable[[str], Theirs], backend: str, name: str, tmp_path: Path
) -> None:
    theirs, tensors = checkpoints(name), {}
    for tensor_name, data in load_file(theirs.path / "model.safetensors").items():
        for theirs_name, ours in reversed(FAMILIES["ExaoneForCausalLM"].renamed.items()):
            tensor_name = tensor_name.replace(ours, theirs_name)
        tensors[tensor_name.replace(".attn.attention.o_proj.", ".attn.attention.out_proj.")] = data
    config = json.loads((theirs.path / "config.json").read_text())
    values = {
        "architectures": ["ExaoneForCausalLM"],
        "num_layers": config["num_hidden_layers"],
        "activation_function": "silu",
        "layer_norm_epsilon": config["rms_norm_eps"],
    }
    without = ("num_hidden_layers", "hidden_act", "rms_norm_eps")
    check_against_transformers(backend, rewritten(theirs, tmp_path, values, tensors, without))


@pytest.mark.parametrize("name", ["granite"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="MiniCPMForCausalLM")
def test_minicpm_is_granite_with_other_keys_for_its_scales(
    checkpoints: Callable[[str], Theirs], backend: str, name: str, tmp_path: Path
) -> None:
    theirs = checkpoints(name)
    values = {"architectures": ["MiniCPMForCausalLM"], "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
    tensors = load_file(theirs.path / "model.safetensors")
    without = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    check_against_transformers(backend, rewritten(theirs, tmp_path, values, tensors, without))
