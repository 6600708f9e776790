"""Hybrids in quantized formats, from files to logits: beside plain torch on the values that the files stand for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_tensors
from transformers import BailingHybridConfig, BambaConfig, Lfm2Config, Qwen3_5TextConfig

from models import test_bailing_hybrid, test_delta_nets
from models.checking import PROMPT, TINY, compute, make_ops, random_model
from weights.quantized_files import FORMATS

HYBRIDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3.5": (Qwen3_5TextConfig, test_delta_nets.HYBRID | test_delta_nets.DELTA | {"head_dim": 32}),
    "ling-3": (BailingHybridConfig, test_bailing_hybrid.LING | {"head_dim": 32, "v_head_dim": 32}),
    "bamba": (
        BambaConfig,
        {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_n_groups": 2}
        | {"mamba_d_state": 12, "mamba_expand": 2},
    ),
    "lfm2": (
        Lfm2Config,
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
    ),
}
SIZES = {"intermediate_size": 128, "initializer_range": 0.15}
CHOSEN = ["gptq-4", "packed-4", "fp8-blocks"]


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("hybrid", HYBRIDS)
def test_logits_are_those_of_the_values_in_the_file(tmp_path: Path, hybrid: str, name: str) -> None:
    config, options = HYBRIDS[hybrid]
    random_model(config(**TINY | options | SIZES), seed=7).save_pretrained(tmp_path)
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    num_packed = rewrite(tmp_path, quantized, plain, name)
    assert num_packed >= 8, "only some matrices of a layer can be packed"
    expected = compute(make_ops("torch"), plain)(PROMPT, 0)
    found = compute(make_ops("torch"), quantized)(PROMPT, 0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())
    native = compute(make_ops("native"), quantized)
    logits = native(PROMPT, 0)
    assert np.linalg.norm(logits - expected) < 0.1 * np.linalg.norm(expected)  # 8-bit activations
    native(PROMPT[:7], 0)
    np.testing.assert_array_equal(native(PROMPT, 7), logits[7:])


def rewrite(source: Path, quantized: Path, plain: Path, name: str) -> int:
    """The checkpoint with the matrices packed that a group of 64 divides, and one of their values in floats."""
    form, stored, values, count = FORMATS[name], {}, {}, 0
    for weight, data in load_file(source / "model.safetensors").items():
        module, w = weight.removesuffix(".weight"), data.astype(np.float32)
        if "proj" not in weight or w.ndim != 2 or w.shape[1] % 64 or w.shape[0] % 8:
            stored[weight], values[weight] = torch.from_numpy(data), data
            continue
        packed, values[weight] = form.pack(w)
        stored |= {f"{module}.{part}": tensor.clone().contiguous() for part, tensor in packed.items()}
        count += 1
    config = json.loads((source / "config.json").read_text())
    for path, given in ((quantized, {"quantization_config": form.config}), (plain, {})):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config | given))
    save_tensors(stored, quantized / "model.safetensors")
    save_file({key: np.ascontiguousarray(value) for key, value in values.items()}, plain / "model.safetensors")
    return count
