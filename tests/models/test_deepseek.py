"""Tiny random DeepSeek models, made by transformers, against transformers; from safetensors and from GGUF."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig, YoutuConfig

from models.checking import (
    BACKENDS,
    MAX_LEN,
    PROMPT,
    TINY,
    Cases,
    Theirs,
    ask_transformers,
    assert_close,
    check_against_transformers,
    compute,
    make_ops,
    random_model,
)
from quire.core.errors import BadCheckpoint, Unsupported
from quire.models import deepseek
from quire.models.loading import HeadLinear
from quire.ops.dequantize import dequantize
from quire.ops.reference import TorchOps
from quire.ops.tensors import F16, Q8_0, StoredTensor
from quire.weights.config import CheckpointConfig

SIZES = TINY | {
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "initializer_range": 0.3,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
DENSE = {"first_k_dense_replace": 3}
CASES: Cases = {
    "v2": (DeepseekV2Config, {"topk_method": "group_limited_greedy"}),
    "v2-lite": (
        DeepseekV2Config,
        {"q_lora_rank": None, "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "rope_parameters": YARN},
    ),
    "v2-biases": (DeepseekV2Config, DENSE | {"attention_bias": True, "tie_word_embeddings": True}),
    "v2-biases-lite": (DeepseekV2Config, DENSE | {"attention_bias": True, "q_lora_rank": None}),
    "v3": (DeepseekV3Config, {}),
    "v3-yarn": (DeepseekV3Config, {"rope_parameters": YARN | {"mscale": 1.2}, "norm_topk_prob": False}),
    "v3-dense": (DeepseekV3Config, DENSE | {"rope_interleave": False}),
    "v3-odd": (DeepseekV3Config, DENSE | {"num_attention_heads": 5, "num_key_value_heads": 5, "kv_lora_rank": 20}),
    "v3-many-heads": (DeepseekV3Config, DENSE | {"num_attention_heads": 40, "num_key_value_heads": 40}),
    "glm4-moe-lite": (
        Glm4MoeLiteConfig,
        {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "dense", "sparse"]},
    ),
    "glm4-moe-lite-dense": (
        Glm4MoeLiteConfig,
        {"mlp_layer_types": ["dense"] * 3, "attention_bias": True, "q_lora_rank": None, "tie_word_embeddings": True},
    ),
    "youtu-untied": (YoutuConfig, {"tie_word_embeddings": False, "initializer_range": 0.4, "q_lora_rank": None}),
    "youtu": (YoutuConfig, {"tie_word_embeddings": True, "initializer_range": 0.4}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Theirs]:
    @cache
    def make(name: str) -> Theirs:
        kind, options = CASES[name]
        model = random_model(kind(**{**SIZES, **options}), seed=sum(map(ord, name)))
        return ask_transformers(model, tmp_path_factory.mktemp(name))

    return make


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    if backend == "gpu" and name == "v3-odd":
        pytest.skip("needs a kernel for a latent of 20 columns, and the GPU has none")
    check_against_transformers(backend, checkpoints(name))


def test_layers_that_guess_further_tokens_are_passed_over(checkpoints: Callable[[str], Theirs], tmp_path: Path) -> None:
    theirs = checkpoints("v3")
    tensors = load_file(theirs.path / "model.safetensors")
    extra = {"model.layers.3.eh_proj.weight": np.ones((64, 128), np.float32)}
    extra |= {name.replace("layers.2.", "layers.3."): data for name, data in tensors.items() if "layers.2." in name}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    config = json.loads((theirs.path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert_close(compute(make_ops("torch"), tmp_path)(PROMPT, 0), theirs.prefill)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(BadCheckpoint, match=r"unknown: model\.layers\.3\."):
        compute(make_ops("torch"), tmp_path)


# -- GGUF --------------------------------------------------------------------------------------------------------------


@pytest.mark.verifies("gguf", backend="torch")
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", ["v2", "v2-lite", "v3", "glm4-moe-lite", "youtu"])
def test_a_gguf_file_computes_what_its_checkpoint_does(
    checkpoints: Callable[[str], Theirs], name: str, apart: bool, tmp_path: Path
) -> None:
    theirs = checkpoints(name)
    writing = pytest.importorskip("models.gguf_deepseek_writing", reason="needs the package gguf")
    path = writing.write_deepseek_gguf(theirs.path, tmp_path / "model.gguf", apart)
    check_against_transformers("native" if apart else "torch", replace(theirs, path=path))


# -- what is read, and refused -----------------------------------------------------------------------------------------


def test_heads_of_quantized_weights_become_halves() -> None:
    """Two heads of 3 + 2 rows: the first three, turned, and the other two."""
    rng = np.random.default_rng(0)
    blocks = np.concatenate([rng.random((10, 1)).astype(np.float16).view(np.uint8),
                             rng.integers(0, 256, (10, 32), dtype=np.uint8)], axis=1)  # fmt: skip
    tensor = StoredTensor("kv_b.weight", (10, 32), Q8_0, blocks)
    weights = dequantize(tensor).reshape(2, 5, 32)
    ops = TorchOps()
    keys = HeadLinear("kv_b", 2, 5, 32, first=0, count=3, transposed=True).load(ops, [tensor])
    values = HeadLinear("kv_b", 2, 5, 32, first=3, count=2).load(ops, [tensor])
    assert (keys.num_heads, keys.num_outputs, keys.num_inputs) == (2, 32, 3)
    assert (values.num_heads, values.num_outputs, values.num_inputs) == (2, 2, 32)
    np.testing.assert_allclose(keys.packed.numpy(), weights[:, :3].swapaxes(1, 2), rtol=2**-11)
    np.testing.assert_allclose(values.packed.numpy(), weights[:, 3:], rtol=2**-11)
    halves = StoredTensor("kv_b.weight", (10, 32), F16, weights.reshape(10, 32).astype(np.float16).view(np.uint8))
    exact = HeadLinear("kv_b", 2, 5, 32, first=3, count=2).load(ops, [halves])
    np.testing.assert_array_equal(exact.packed.numpy(), weights[:, 3:].astype(np.float16).astype(np.float32))


def read(**changes: Any) -> deepseek.DeepseekConfig:
    values = SIZES | {"architectures": ["DeepseekV3ForCausalLM"], "hidden_act": "silu"} | changes
    return deepseek.config(CheckpointConfig(Path("config.json"), values))


def test_what_is_not_supported_is_refused_by_name() -> None:
    assert read().routing.group_score == "best two" and read().max_position == MAX_LEN
    for key, value in {
        "moe_layer_freq": 2,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "mlp_bias": True,
    }.items():
        with pytest.raises(Unsupported, match=key):
            read(**{key: value})
    with pytest.raises(Unsupported, match="norm_topk_prob"):
        read(architectures=["DeepseekV2ForCausalLM"], norm_topk_prob=True)
    with pytest.raises(BadCheckpoint, match="from 5 of 4 groups"):
        read(topk_group=5)
