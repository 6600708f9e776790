"""Checkpoints in every quantized format, from files to logits: each backend beside plain torch on the plain values."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_tensors
from transformers import AutoModelForImageTextToText, FineGrainedFP8Config, Mistral3Config

from models.checking import PROMPT, TINY, assert_close, compute, make_ops, random_model
from ops.stored_blocks import stored_rows
from quire.ops.dequantize import dequantize
from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.quantized_weights import ActOrderWeight
from quire.ops.gpu.linear.scaled import ScaledWeight
from quire.ops.gpu.opset import GpuOps
from quire.ops.tensors import GGUF_TYPES, STORAGE_TYPES, StoredTensor
from quire.weights.checkpoint import open_checkpoint
from weights.quantized_files import CONFIG, FORMATS, write_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MATRIX = "model.layers.0.mlp.down_proj.weight"


@cache
def truth(name: str, path: Path) -> np.ndarray:
    """Logits of a plain fp32 checkpoint with the values that the quantized one stands for."""
    save_file(write_model(path, name), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return compute(make_ops("torch"), path)(PROMPT, 0)


@pytest.mark.verifies("quantized", backend="native")
@pytest.mark.parametrize("name", FORMATS)
def test_logits_on_every_backend(tmp_path: Path, name: str) -> None:
    expected = truth(name, tmp_path / "plain")
    write_model(tmp_path / "quantized", name)
    plain = compute(make_ops("torch"), tmp_path / "quantized")(PROMPT, 0)
    np.testing.assert_allclose(plain, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    native = compute(make_ops("native"), tmp_path / "quantized")
    logits = native(PROMPT, 0)
    # 8-bit activations cost about 1.5 %; tables of whole numbers as much again; floats of 16 bits less than either.
    assert np.linalg.norm(logits - expected) < 0.04 * np.linalg.norm(expected)
    np.testing.assert_array_equal(native(PROMPT, len(PROMPT) - 1)[0], logits[-1])


def test_outliers_of_llm_int8_are_not_rounded(tmp_path: Path) -> None:
    """Norms whose weights enlarge six inputs, as large models have them."""
    values = dict(write_model(tmp_path, "bitsandbytes-int8"))
    tensors = load_file(tmp_path / "model.safetensors")
    for norm in [name for name in tensors if "layernorm" in name]:
        tensors[norm][::21] *= 40
        values[norm] = tensors[norm]
    (tmp_path / "plain").mkdir()
    save_file(values, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "plain" / "config.json").write_text(json.dumps(CONFIG))
    expected = compute(make_ops("torch"), tmp_path / "plain")(PROMPT, 0)
    errors = {}
    for threshold in (6.0, 0.0):
        path = tmp_path / str(threshold)
        write_model(path, "bitsandbytes-int8", {"llm_int8_threshold": threshold})
        save_file(tensors, path / "model.safetensors")
        native = compute(make_ops("native"), path)
        logits = native(PROMPT, 0)
        np.testing.assert_array_equal(native(PROMPT, len(PROMPT) - 1)[0], logits[-1])
        errors[threshold] = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert errors[6.0] < 0.5 * errors[0.0], errors


def test_what_is_not_kept_exactly_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, note in (("bitsandbytes-nf4", "112ths"), ("fp8-outputs", "bfloat16"), ("gptq-4", "")):
        write_model(tmp_path, name)
        caplog.clear()
        compute(make_ops("native"), tmp_path)
        assert [note in record.message for record in caplog.records] == ([True] if note else [])


def test_ministral_3_in_fp8_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """One scale a matrix, and one for its activations, which are scaled as they come here."""
    text = TINY | {"model_type": "ministral3", "sliding_window": None, "head_dim": 24}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    random_model(Mistral3Config(text_config=text, vision_config=vision), seed=1).save_pretrained(tmp_path)
    tensors = {}
    for name, data in load_file(tmp_path / "model.safetensors").items():
        module = name.removesuffix(".weight")
        tensors[name] = torch.from_numpy(data)
        if module.endswith("_proj") and "language_model" in module:
            scale = (tensors[name].abs().max() / 448).bfloat16()
            tensors[name] = (tensors[name] / scale.float()).to(torch.float8_e4m3fn)
            tensors |= {f"{module}.weight_scale_inv": scale, f"{module}.activation_scale": torch.tensor(0.02)}
    save_tensors(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    kept = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    settings = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = settings | {"modules_to_not_convert": kept}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = FineGrainedFP8Config(dequantize=True, modules_to_not_convert=kept)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, quantization_config=plain, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    assert_close(compute(make_ops("torch"), tmp_path)(PROMPT, 0), expected)
    native = compute(make_ops("native"), tmp_path)(PROMPT, 0)  # products rounded to bf16
    assert np.linalg.norm(native - expected) < 0.04 * np.linalg.norm(expected)


GPU = {  # what two matrices become together, and how far a product may be off: 16-bit activations, or those of fp8
    "gptq-4": ("int4, 64", 0.003),
    "gptq-4-rows": ("int4, 128", 0.003),
    "gptq-4-act-order": ("int4, 64, reordered", 0.003),
    "gptq-3": ("int4, 32, reordered", 0.003),
    "gptq-8-asymmetric": ("int8, 64", 0.003),
    "awq-gemm": ("int4, 128", 0.003),
    "bitsandbytes-nf4-nested": ("codes, 64", 0.003),
    "bitsandbytes-fp4": ("codes, 64", 0.003),
    "bitsandbytes-int8": ("int8, 128", 0.003),
    "eetq": ("int8, 128", 0.003),
    "fp8-outputs": ("fp8 by outputs", 0.08),  # of three bits, which the interpreter does not round to nearest
    "fp8-blocks": ("fp8 by blocks", 0.08),
}


@pytest.mark.verifies("quantized", backend="gpu")
@pytest.mark.parametrize("name", GPU)
def test_codes_stay_codes_on_a_gpu(tmp_path: Path, name: str) -> None:
    kind, bound = GPU[name]
    expected = write_model(tmp_path, name)[MATRIX]
    tensor = open_checkpoint(tmp_path).tensor(MATRIX)
    ops = GpuOps(DEVICE, dtype="float16")
    two = ops.pack([tensor, tensor])
    (segment,) = two.packed
    assert described(segment) == kind
    assert two.nbytes < 0.8 * 2 * expected.size * 2
    x = np.random.default_rng(2).normal(0, 1, (3, expected.shape[1])).astype(np.float16)
    found = ops.linear(torch.from_numpy(x).to(DEVICE), two).float().cpu().numpy()
    truth = x.astype(np.float32) @ np.concatenate([expected, expected]).T
    assert np.linalg.norm(found - truth) < bound * np.linalg.norm(truth)


@pytest.mark.parametrize("name", [name for name in GGUF_TYPES if STORAGE_TYPES[name].block > 1])
def test_codes_of_gguf_stay_codes_on_a_gpu(name: str) -> None:
    data = stored_rows(STORAGE_TYPES[name], 32, 512)
    tensor = StoredTensor("w", (32, 512), STORAGE_TYPES[name], data)
    expected = dequantize(tensor)
    ops = GpuOps(DEVICE, dtype="float16")
    packed = ops.pack([tensor])
    assert isinstance(packed.packed[0], GroupedWeight)
    x = np.random.default_rng(2).normal(0, 1, (2, 512)).astype(np.float16)
    found = ops.linear(torch.from_numpy(x).to(DEVICE), packed).float().cpu().numpy()
    truth = x.astype(np.float32) @ expected.T
    assert np.linalg.norm(found - truth) < 0.003 * np.linalg.norm(truth)


def described(segment: Any) -> str:
    if isinstance(segment, ActOrderWeight):
        return f"{described(segment.weight)}, reordered"
    if isinstance(segment, ScaledWeight):
        return "fp8 by blocks" if segment.by_blocks else "fp8 by outputs"
    assert isinstance(segment, GroupedWeight)
    return f"{'codes' if segment.codebook else f'int{segment.bits}'}, {segment.group}"
