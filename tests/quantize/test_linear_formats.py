"""Folders in Hugging Face's layout: every method is read back by the reader of its format."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from quantize.plain_models import write_plain
from quire.core.errors import QuireError
from quire.executors.local import LocalExecutor
from quire.executors.options import ExecutorOptions
from quire.ops.dequantize import dequantize
from quire.quantize.calibration import collect_importance, default_text, sequences
from quire.quantize.command import CalibrationOptions, quantize
from quire.quantize.device import CPU
from quire.quantize.float8 import to_e4m3
from quire.quantize.floats import read_floats
from quire.quantize.gptq import GPTQOptions, gptq, rounding_order
from quire.quantize.integers import IntegerGrid, to_nearest
from quire.quantize.methods import LINEAR_METHODS, FormatOptions, linear_format, method_name
from quire.quantize.plan import QuantizeOptions
from quire.quantize.run import QuantizeRun
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.weights.checkpoint import open_checkpoint
from quire.weights.huggingface_checkpoint import HuggingFaceCheckpoint

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
# Root mean square of the error over that of the weights, normally distributed.
ERRORS = {
    "W4A16": 0.12, "W4A16_ASYM": 0.11, "W3A16": 0.26, "W2A16": 0.75, "W8A16": 0.007, "W8A8": 0.008, "FP8": 0.03,
    "FP8_DYNAMIC": 0.03, "FP8_BLOCK": 0.03, "GPTQ": 0.12, "GPTQ_V2": 0.12, "AWQ": 0.11, "NF4": 0.1, "FP4": 0.13,
    "LLM_INT8": 0.008, "FP8_STATIC": 0.03, "MXFP4A16": 0.13, "MXFP4": 0.13, "MXFP8": 0.03, "MXFP8A16": 0.03,
    "NVFP4": 0.1, "NVFP4A16": 0.1, "W4A8": 0.12, "W4AFP8": 0.12, "W5A16": 0.055, "W6A16": 0.028, "W7A16": 0.014,
}  # fmt: skip


def written(
    source: Path, out: Path, method: str, algorithm: str = "nearest", ignore: str = "^$", **formats: object
) -> Path:
    run = QuantizeRun(source, out, QuantizeOptions(method, (ignore,)), FormatOptions(**formats))  # type: ignore[arg-type]
    options = CalibrationOptions(measured_tokens=0, num_tokens=512, length=128)
    quantize(
        run,
        options,
        algorithm,
        GPTQOptions(order="activation" if formats.get("act_order") else None),
        lambda *_: None,
    )
    return out


def error(source: Path, out: Path, name: str = Q_PROJ) -> float:
    before, after = (read_floats(open_checkpoint(path).tensor(name)) for path in (source, out))
    return float(np.sqrt(((before - after) ** 2).mean() / (before**2).mean()))


@pytest.mark.parametrize("method", LINEAR_METHODS)
def test_every_method_is_read_back_with_little_loss(method: str, plain_llama: Path, tmp_path: Path) -> None:
    out = written(plain_llama, tmp_path / "out", method)
    assert 0 < error(plain_llama, out) < ERRORS[method]
    before, after = open_checkpoint(plain_llama), open_checkpoint(out)
    assert set(after.names()) == set(before.names())
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert np.array_equal(after.tensor(name).data, before.tensor(name).data), name
    assert Tokenizer.load(out).encode("as before") == Tokenizer.load(plain_llama).encode("as before")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("method", ["W4A16", "W4A16_ASYM", "W3A16", "GPTQ", "GPTQ_V2", "AWQ", "W8A8"])
def test_values_are_those_of_the_integers(method: str, plain_llama: Path, tmp_path: Path) -> None:
    out = written(plain_llama, tmp_path / "out", method)
    grid = QuantizeRun(plain_llama, out, QuantizeOptions(method)).forms.usual.grid  # type: ignore[union-attr]
    assert grid is not None
    integers = to_nearest(read_floats(open_checkpoint(plain_llama).tensor(Q_PROJ)), grid, None)
    assert np.array_equal(dequantize(open_checkpoint(out).tensor(Q_PROJ)), integers.values())


@pytest.mark.parametrize(
    ("method", "formats"),
    [
        ("GPTQ", {"bits": 2, "group_size": 32}),
        ("GPTQ", {"bits": 3, "symmetric": False, "act_order": True}),
        ("GPTQ_V2", {"bits": 8, "group_size": -1}),
        ("W4A16", {"act_order": True}),
        ("W4A16_ASYM", {"group_size": 64}),
        ("AWQ", {}),
    ],
)
def test_gptq_is_read_back(method: str, formats: dict[str, object], plain_llama: Path, tmp_path: Path) -> None:
    out = written(plain_llama, tmp_path / "out", method, "gptq", ignore="layers.1|mlp", **formats)
    assert 0 < error(plain_llama, out) < 1.2


def test_blocks_of_fp8_are_whole_along_inputs() -> None:
    form = linear_format("FP8_BLOCK", FormatOptions())
    assert form.fits(576, 1536) and not form.fits(1536, 576)
    assert linear_format("FP8_DYNAMIC", FormatOptions()).fits(1536, 576)


def test_act_order_in_compressed_tensors_is_noted(plain_llama: Path, tmp_path: Path) -> None:
    calibration = CalibrationOptions(measured_tokens=0, num_tokens=128, length=64)
    for method, noted in (("W4A16", 1), ("GPTQ", 0)):
        options = QuantizeOptions(method, ("layers.1|mlp",))
        run = QuantizeRun(plain_llama, tmp_path / method, options, FormatOptions(act_order=True))
        outcome = quantize(run, calibration, "gptq", GPTQOptions(order="activation"), lambda *_: None)
        assert sum("up to version 0.19 only" in note for note in outcome.notes) == noted


def test_gptq_loses_less_of_what_layers_compute(plain_llama: Path) -> None:
    w = read_floats(open_checkpoint(plain_llama).tensor(Q_PROJ))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, w.shape[1])).astype(np.float32) @ rng.normal(size=(w.shape[1],) * 2).astype(np.float32)
    moments = CPU().add_moments(None, x) / len(x)
    grid = IntegerGrid(3, 64, symmetric=True)
    nearest = to_nearest(w, grid, np.diagonal(moments).copy()).values()
    chosen = gptq(w, rounding_order(moments, 64, GPTQOptions()), grid, GPTQOptions()).values()
    lost = [float((((v - w) @ moments) * (v - w)).sum()) for v in (nearest, chosen)]
    assert lost[1] < 0.8 * lost[0]


def test_e4m3_is_rounded_as_torch_does() -> None:
    import torch

    x = np.concatenate([np.random.default_rng(0).normal(0, s, 500) for s in (1e-3, 0.02, 1, 100)]).astype(np.float32)
    x = np.concatenate((x, np.float32([0, -0.0, 448, 500, 2**-6, 2**-9, 2**-10, 17, 19])))
    theirs = torch.from_numpy(np.clip(x, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(to_e4m3(x), theirs)


def test_layers_that_are_ignored_or_do_not_fit_stay_and_are_listed(plain_llama: Path, tmp_path: Path) -> None:
    run = QuantizeRun(plain_llama, tmp_path / "out", QuantizeOptions("W4A16", ignore=("layers.0.mlp",)))
    outcome = quantize(run, CalibrationOptions(measured_tokens=0), None, GPTQOptions(), lambda *_: None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "lm_head" in config["ignore"] and "model.layers.0.mlp.up_proj" in config["ignore"]
    assert error(plain_llama, tmp_path / "out", "model.layers.0.mlp.up_proj.weight") == 0
    assert "3 of" in outcome.written.plan.notes[0] and "--group-size" not in outcome.written.plan.notes[0]


def test_layers_whose_inputs_are_no_multiple_of_the_group_size_say_which_size_fits(
    plain_llama: Path, tmp_path: Path
) -> None:
    formats = FormatOptions(group_size=512)  # layers have 256 and 512 inputs
    run = QuantizeRun(plain_llama, tmp_path / "out", QuantizeOptions("W4A16"), formats)
    notes = run.plan(run.open()).notes
    assert notes[0].endswith(": 256 inputs are no multiple of 512; `--group-size 256` fits")


@pytest.mark.parametrize(("intermediate", "size"), [(512, 64), (416, 32)])
def test_groups_are_as_large_as_almost_all_layers_allow(intermediate: int, size: int, tmp_path: Path) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    write_plain(source, hidden_size=192, intermediate_size=intermediate, num_attention_heads=6)
    outcome = quantize(
        QuantizeRun(source, out, QuantizeOptions("W4A16")), CalibrationOptions(measured_tokens=0), None, GPTQOptions(),
        lambda *_: None,
    )  # fmt: skip
    assert outcome.written.plan.types()["W4A16"][0] == 14
    assert outcome.notes[0].startswith(f"groups of {size}: ")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == size


def test_static_scales_of_inputs_and_of_the_kv_cache(plain_llama: Path, tmp_path: Path) -> None:
    run = QuantizeRun(plain_llama, tmp_path / "out", QuantizeOptions("FP8_STATIC", kv_scales=True))
    calibration = CalibrationOptions(measured_tokens=0, num_tokens=256, length=64)
    quantize(run, calibration, None, GPTQOptions(), lambda *_: None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["num_bits"] == 8 and config["kv_cache_scheme"]["dynamic"] is False
    group = config["config_groups"]["group_0"]
    assert group["input_activations"]["strategy"] == "tensor" and group["input_activations"]["dynamic"] is False
    stored = load_file(tmp_path / "out" / "model.safetensors")
    used, _ = sequences(plain_llama, default_text(), 64, 256)
    importance = collect_importance(open_checkpoint(plain_llama), used, "", CPU(), lambda *_: None)
    largest = importance.largest[Q_PROJ]
    scale = stored[Q_PROJ.replace(".weight", ".input_scale")]
    assert scale.shape == (1,) and np.isclose(float(scale[0]), largest / 448, rtol=1e-6)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert isinstance(checkpoint, HuggingFaceCheckpoint)
    assert set(checkpoint.names()) == set(open_checkpoint(plain_llama).names())
    scales = checkpoint.kv_scales()
    assert scales.keys() == {0, 1}
    for layer, pair in scales.items():
        assert np.allclose(pair, np.array(importance.kv_largest[layer]) / 448, rtol=1e-6)
    for dtype, expected in (("fp8", scales[1]), ("float16", (1.0, 1.0))):
        options = ExecutorOptions(backend="torch", kv_cache_dtype=dtype, max_model_len=64)
        assert LocalExecutor(tmp_path / "out", options).load().spec.fp8_scales_of(1) == expected


def test_an_fp8_cache_divides_by_the_scales_of_its_layer() -> None:
    import torch

    from quire.ops.kv_spec import KVSpec
    from quire.ops.reference.cache import TorchCache

    k, v = torch.randn(5, 1, 8) * 4000, torch.randn(5, 1, 8) * 1e-3
    plain, scaled = (TorchCache(KVSpec(1, 1, 8, 16, "fp8", 0, scales), 1, 0, "cpu") for scales in ((), ((40.0, 1e-5),)))
    errors = []
    for cache in (plain, scaled):
        cache.write(0, torch.arange(5), k, v)
        read = cache.read(0, torch.tensor([0]), 5)
        errors.append([float((a - b).norm() / b.norm()) for a, b in zip(read, (k, v), strict=True)])
    assert max(errors[1]) < 0.04 < 0.3 < min(errors[0])


def test_kv_scales_belong_to_compressed_tensors(plain_llama: Path, tmp_path: Path) -> None:
    run = QuantizeRun(plain_llama, tmp_path / "out", QuantizeOptions("GPTQ", kv_scales=True))
    with pytest.raises(QuireError, match="--kv-cache-scales are part of compressed-tensors, and GPTQ is not"):
        quantize(run, CalibrationOptions(measured_tokens=0), None, GPTQOptions(), lambda *_: None)


@pytest.mark.parametrize("bits", [3, 4])
def test_gptq_in_the_order_of_groups_keeps_them_and_loses_less(bits: int) -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(64, 256)).astype(np.float32)
    x = rng.normal(size=(512, 256)) @ rng.normal(size=(256, 256)) * rng.lognormal(0, 1, 256)
    moments, grid = CPU().add_moments(None, x.astype(np.float32)) / 512, IntegerGrid(bits, 64, symmetric=True)
    lost = {}
    for order in ("inputs", "group", "activation"):
        options = GPTQOptions(order=order)
        integers = gptq(w, rounding_order(moments, 64, options), grid, options)
        error = integers.values() - w
        lost[order] = float(((error @ moments) * error).sum())
        assert (integers.groups is None) == (order != "activation")
    assert lost["group"] < 0.97 * lost["inputs"], lost


def test_gptq_counts_an_error_as_far_as_later_inputs_cannot_make_up_for_it() -> None:
    x = np.random.default_rng(0).normal(size=(256, 64)) @ np.random.default_rng(1).normal(size=(64, 64))
    moments = CPU().add_moments(None, x.astype(np.float32)) / 256
    shared = rounding_order(moments, 32, GPTQOptions(order="inputs"))
    damped = moments + GPTQOptions().damping * np.diagonal(moments).mean() * np.eye(64)
    for index in (0, 31, 63):  # the least of e^T H e where e is 1 there and 0 before
        least = 1 / np.linalg.inv(damped[index:, index:])[0, 0]
        assert shared.importance[index] == pytest.approx(least, rel=1e-3)


def test_methods_are_found_by_the_names_people_know() -> None:
    assert [method_name(name) for name in ("q4_k_m", "int8", "fp8-dynamic", "q4_k", "mxfp4")] == [
        "Q4_K_M", "W8A8", "FP8_DYNAMIC", "Q4_K_M", "MXFP4_MOE",
    ]  # fmt: skip
    with pytest.raises(QuireError, match="no method `Q4_K_X`") as caught:
        method_name("Q4_K_X")
    assert "Q4_K_M" in caught.value.hint


def test_a_lora_adapter_is_merged(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    source, adapter = tmp_path / "model", tmp_path / "adapter"
    model = write_plain(source, dtype=torch.bfloat16)
    adapter.mkdir()
    a, b = torch.randn(4, 256), torch.randn(256, 4)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file({f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    run = QuantizeRun(source, tmp_path / "out", QuantizeOptions("F32", lora=str(adapter)))
    quantize(run, CalibrationOptions(measured_tokens=0), None, GPTQOptions(), lambda *_: None)
    base = model.model.layers[0].self_attn.q_proj.weight.detach().bfloat16().float()
    expected = (base + 2 * b @ a).numpy()
    assert np.allclose(read_floats(open_checkpoint(tmp_path / "out").tensor(Q_PROJ)), expected, atol=1e-5)
