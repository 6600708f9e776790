"""gpt-oss against transformers: its experts as floats, in MXFP4, and in GGUF."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from models.checking import (
    BACKENDS,
    PROMPT,
    TINY,
    Cases,
    Theirs,
    ask_transformers,
    assert_close,
    check_against_transformers,
    checkpoints_of,
    compute,
    make_ops,
    random_model,
)
from quire.core.errors import BadCheckpoint, Unsupported

SMALL = {"head_dim": 32, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6, "intermediate_size": 48}
CASES: Cases = {
    "gpt-oss": (GptOssConfig, SMALL),
    "gpt-oss-untruncated": (
        GptOssConfig,
        SMALL
        | {
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "intermediate_size": 64,
            "num_experts_per_tok": 4,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
                "truncate": False,
                "original_max_position_embeddings": 16,
                "rope_theta": 1000.0,
            },
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


@pytest.fixture
def write_gguf() -> Callable[..., Path]:
    """Without the `gguf` package it cannot be had."""
    write: Callable[..., Path] = pytest.importorskip("models.gguf_writing", reason="needs the package gguf").write_gguf
    return write


@pytest.mark.verifies("gguf", backend="torch")
@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_computes_what_its_checkpoint_does(
    checkpoints: Callable[[str], Theirs], name: str, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    theirs = checkpoints(name)
    path = write_gguf(theirs.path, tmp_path / "model.gguf")
    assert_close(compute(make_ops("torch"), path)(PROMPT, 0), theirs.prefill)


def in_mxfp4(path: Path) -> Theirs:
    """Random codes as experts: transformers' own numbers for them in its model, and a checkpoint of the codes."""
    model = random_model(GptOssConfig(**TINY | SMALL | {"intermediate_size": 64}), seed=1)
    random, stored = np.random.default_rng(0), {}
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = parameter.shape
            blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
            scales = random.integers(122, 126, (experts, outputs, inputs // 32), np.uint8)
            stored |= {f"{name}_blocks": torch.tensor(blocks), f"{name}_scales": torch.tensor(scales)}
            values = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
            parameter.data = values.reshape(parameter.shape).contiguous()
    theirs = ask_transformers(model, path)
    tensors = load_file(path / "model.safetensors")
    for name in stored:
        tensors.pop(name.removesuffix("_blocks").removesuffix("_scales"), None)
    save_file(tensors | stored, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return theirs


@pytest.mark.verifies("quantized", backend="native", subject="mxfp4")
@pytest.mark.parametrize("name", ["experts"])
def test_in_mxfp4_they_are_the_numbers_that_transformers_makes_of_them(name: str, tmp_path: Path) -> None:
    theirs = in_mxfp4(tmp_path)
    assert_close(compute(make_ops("torch"), tmp_path)(PROMPT, 0), theirs.prefill)
    rounded = compute(make_ops("native"), tmp_path)(PROMPT, 0)  # which multiplies with 8-bit activations
    assert np.linalg.norm(rounded - theirs.prefill) < 0.04 * np.linalg.norm(theirs.prefill)

    tensors = load_file(tmp_path / "model.safetensors")
    scales = "model.layers.1.mlp.experts.down_proj_scales"
    save_file(tensors | {scales: tensors[scales][:, :-1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=rf"{scales}' is \[5, 127, 2\], and .* ask for \[5, 128, 2\]"):
        compute(make_ops("torch"), tmp_path)


def test_what_nobody_wrote_code_for_is_refused(checkpoints: Callable[[str], Theirs], tmp_path: Path) -> None:
    config = json.loads((checkpoints("gpt-oss").path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"swiglu_limit": 9.0}))
    (tmp_path / "model.safetensors").write_bytes((checkpoints("gpt-oss").path / "model.safetensors").read_bytes())
    with pytest.raises(Unsupported, match=r"swiglu_limit is 9\.0"):
        compute(make_ops("torch"), tmp_path)
