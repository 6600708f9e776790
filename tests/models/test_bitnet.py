"""BitNet's ternary weights: as transformers packs them, and as trained floats."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import BitNetConfig

from models.checking import MAX_LEN, PROMPT, TINY, compute, make_ops, random_model
from quire.core.errors import BadCheckpoint, Unsupported
from quire.ops.dequantize import dequantize
from quire.weights.checkpoint import open_checkpoint

OFFLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}


def packed_rows(ternary: torch.Tensor) -> torch.Tensor:
    """As `pack_weights` of transformers: every fourth part of the rows in two bits of the same bytes."""
    parts = (ternary + 1).to(torch.uint8).chunk(4)
    return parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6


def write(path: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(
        json.dumps({"architectures": ["BitNetForCausalLM"], "quantization_config": settings})
    )
    return path


@pytest.mark.parametrize(("columns", "kind"), [(512, "TQ2_0"), (96, "Q4_0"), (20, "F32")])
@pytest.mark.parametrize("linear_class", ["autobitlinear", "bitlinear"])
def test_packed_values(tmp_path: Path, columns: int, kind: str, linear_class: str) -> None:
    torch.manual_seed(3)
    ternary = torch.randint(-1, 2, (24, columns))
    packed = {"x.weight": packed_rows(ternary), "x.weight_scale": torch.tensor([0.25], dtype=torch.bfloat16)}
    tensor = open_checkpoint(write(tmp_path, packed, OFFLINE | {"linear_class": linear_class})).tensor("x.weight")
    assert tensor.shape == (24, columns) and tensor.type.name == kind
    scale = 0.25 if linear_class == "autobitlinear" else 4.0
    np.testing.assert_array_equal(dequantize(tensor), scale * ternary.numpy())


def test_a_scale_that_fp16_does_not_hold(tmp_path: Path) -> None:
    ternary = torch.randint(-1, 2, (4, 256))
    packed = {"x.weight": packed_rows(ternary), "x.weight_scale": torch.tensor([0.1])}
    tensor = open_checkpoint(write(tmp_path, packed, OFFLINE)).tensor("x.weight")
    np.testing.assert_allclose(dequantize(tensor), 0.1 * ternary.numpy(), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_trained_floats_are_rounded_as_transformers_rounds_them(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    weight = (torch.randn(8, 256) * 0.07).to(dtype)
    scale = 1.0 / weight.float().abs().mean().clamp(min=1e-5)
    expected = ((weight.float() * scale).round().clamp(-1, 1) / scale).to(dtype)
    settings = OFFLINE | {"quantization_mode": "online"}
    checkpoint = open_checkpoint(write(tmp_path, {"x_proj.weight": weight, "norm.weight": weight[0].clone()}, settings))
    np.testing.assert_allclose(dequantize(checkpoint.tensor("x_proj.weight")), expected.float(), rtol=1e-6)
    np.testing.assert_array_equal(dequantize(checkpoint.tensor("norm.weight")).ravel(), weight[0].float())


def test_damage_and_other_settings_are_named(tmp_path: Path) -> None:
    packed = {"x.weight": torch.full((2, 8), 255, dtype=torch.uint8), "x.weight_scale": torch.ones(1)}
    with pytest.raises(BadCheckpoint, match=r"x\.weight.*has a 3"):
        open_checkpoint(write(tmp_path / "threes", packed, OFFLINE)).tensor("x.weight")
    with pytest.raises(BadCheckpoint, match=r"x.weight_scale.*\[2\]"):
        open_checkpoint(write(tmp_path / "scales", packed | {"x.weight_scale": torch.ones(2)}, OFFLINE))
    with pytest.raises(Unsupported, match="use_rms_norm is True"):
        open_checkpoint(write(tmp_path / "norms", packed, OFFLINE | {"use_rms_norm": True}))


@pytest.mark.verifies("quantized", backend="native", subject="bitnet")
@pytest.mark.parametrize("name", ["offline"])
def test_logits_are_those_of_the_values(tmp_path: Path, name: str) -> None:
    """Kernels of 2-bit weights round activations to 8 bits, which costs about 1.5 %."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": MAX_LEN}
    model = random_model(BitNetConfig(**TINY | sizes), seed=9)
    packed = {}
    for key, tensor in model.state_dict().items():
        if "_proj" in key:
            ternary = (tensor / tensor.abs().mean()).round().clamp(-1, 1)
            tensor.copy_(ternary * 0.0625)
            packed[f"{key}_scale"] = torch.tensor([0.0625])
            packed[key] = packed_rows(ternary)
        else:
            packed[key] = tensor.clone()
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    save_file(packed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": OFFLINE}))
    plain = compute(make_ops("torch"), tmp_path)(PROMPT, 0)
    np.testing.assert_allclose(plain, expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())
    native = compute(make_ops("native"), tmp_path)(PROMPT, 0)
    assert np.linalg.norm(native - expected) < 0.04 * np.linalg.norm(expected)
