"""The torch device, run on the CPU here, against numpy and the native kernels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from quantize.plain_models import FAMILIES, RECURRENT, UNEVEN, VOCAB, write_plain
from quire.core.errors import BadCheckpoint, QuireError
from quire.ops.tensors import stored_floats
from quire.quantize import smoothing
from quire.quantize.calibration import collect_importance
from quire.quantize.command import CalibrationOptions, quantize
from quire.quantize.device import CPU, Device, find_device
from quire.quantize.eager_ops import StoredWeights
from quire.quantize.gptq import GPTQOptions
from quire.quantize.gpu import device as gpu_device
from quire.quantize.gpu import host
from quire.quantize.gpu import integers as torch_integers
from quire.quantize.gpu.device import TorchDevice
from quire.quantize.integers import IntegerGrid, to_nearest
from quire.quantize.linear_formats import fp8
from quire.quantize.methods import FormatOptions, linear_format
from quire.quantize.plan import QuantizeOptions
from quire.quantize.quality import compare, last_states
from quire.quantize.run import QuantizeRun
from quire.quantize.smoothing import smoothed
from quire.weights.checkpoint import open_checkpoint

NAME = "cuda" if torch.cuda.is_available() else "cpu"
RNG = np.random.default_rng(5)
IDS = [RNG.integers(3, VOCAB - 5, length).tolist() for length in (40, 25, 17)]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that several forward passes meet at each matmul."""
    monkeypatch.setattr(gpu_device, "BATCH_TOKENS", 20)


def in_fp32() -> TorchDevice:
    return TorchDevice(NAME, torch.float32)


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT, *UNEVEN])
def test_sums_and_logits_are_those_of_numpy(family: str, tmp_path: Path) -> None:
    write_plain(tmp_path, family)
    checkpoint = open_checkpoint(tmp_path)
    ours, theirs = (collect_importance(checkpoint, IDS, "ids", d, lambda *_: None) for d in (in_fp32(), CPU()))
    assert ours.counts == theirs.counts and ours.sums.keys() == theirs.sums.keys()
    for name, sums in theirs.sums.items():
        np.testing.assert_allclose(ours.sums[name], sums, rtol=2e-3, atol=1e-5 * float(sums.max()))
        assert ours.largest[name] == pytest.approx(theirs.largest[name], rel=1e-3)
    assert ours.kv_largest.keys() == theirs.kv_largest.keys()
    first, second = (last_states(checkpoint, IDS, d).rows(0, 82) for d in (in_fp32(), CPU()))
    assert np.abs(first - second).max() < 2e-5 * np.abs(second).max()


def test_16_bits_between_ops_change_sums_little(plain_llama: Path) -> None:
    checkpoint = open_checkpoint(plain_llama)
    devices: list[Device] = [TorchDevice(NAME, torch.bfloat16), CPU()]
    ours, theirs = (collect_importance(checkpoint, IDS, "ids", d, lambda *_: None) for d in devices)
    for name, sums in theirs.sums.items():
        assert np.abs(ours.sums[name] - sums).sum() < 0.02 * sums.sum()


@pytest.mark.parametrize(
    "method", ["W4A16", "W4A16_ASYM", "W3A16", "W8A8", "GPTQ", "AWQ", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NF4"]
)
def test_weights_are_encoded_as_on_the_cpu(method: str) -> None:
    w = RNG.normal(size=(160, 384)).astype(np.float32)
    w[3, 128:256] = 0
    form, device = linear_format(method, FormatOptions()), in_fp32()
    ours, theirs = device.encode(form, device.array(w), None), CPU().encode(form, w, None)
    assert ours.keys() == theirs.keys()
    for part, array in theirs.items():
        assert ours[part].dtype == array.dtype and np.array_equal(ours[part], array), part


@pytest.mark.parametrize("symmetric", [True, False])
def test_searched_ranges_lose_what_those_of_the_cpu_do(symmetric: bool) -> None:
    w, importance = RNG.normal(size=(64, 256)).astype(np.float32), RNG.lognormal(0, 1, 256).astype(np.float32)
    grid, device = IntegerGrid(4, 64, symmetric), in_fp32()
    ours = device.numpy(torch_integers.to_nearest(device.array(w), grid, device.array(importance)).values())
    theirs = to_nearest(w, grid, importance).values()
    lost = [float((np.square(values - w) * importance).sum()) for values in (ours, theirs)]
    assert lost[0] == pytest.approx(lost[1], rel=1e-3)
    assert (ours != theirs).mean() < 0.05


@pytest.mark.parametrize("order", ["inputs", "activation", "group"])
@pytest.mark.parametrize("group", [0, 64, 128])
def test_gptq_chooses_as_on_the_cpu(order: str, group: int) -> None:
    w = RNG.normal(size=(48, 256)).astype(np.float32)
    x = (RNG.normal(size=(512, 256)) @ RNG.normal(size=(256, 256)) * RNG.lognormal(0, 1, 256)).astype(np.float32)
    x[:, 7] = 0  # an input that is never used
    grid, options, lost = IntegerGrid(4, group, symmetric=True), GPTQOptions(order=order), []
    for device in (in_fp32(), CPU()):
        moments = device.add_moments(device.add_moments(None, device.array(x[:200])), device.array(x[200:])) / len(x)
        shared = device.rounding_order(moments, grid.group_of(256), options)
        integers = device.gptq(device.array(w), shared, grid, options)
        error, h = device.numpy(integers.values()) - w, x.T @ x
        error[:, 7] = 0
        lost.append(float(((error @ h) * error).sum()))
        assert (integers.groups is None) == (order != "activation")
    assert lost[0] == pytest.approx(lost[1], rel=0.03)


@pytest.mark.parametrize("added", [False, True])
def test_weights_make_up_for_earlier_losses_as_on_the_cpu(added: bool) -> None:
    w, x, lost, lost_sum = (RNG.normal(size=(rows, 64)).astype(np.float32) for rows in (48, 300, 300, 300))
    outputs = (lost_sum[:, :48].T @ x / 300).astype(np.float32) if added else None
    inputs, moments = (left.T @ x / 300 for left in (lost, x))
    device = in_fp32()
    given = (device.array(w), device.array(inputs), None if outputs is None else device.array(outputs))
    ours = device.numpy(device.made_up(*given, device.array(moments)))
    np.testing.assert_allclose(ours, CPU().made_up(w, inputs, outputs, moments), atol=1e-4)


def run_with(device: Device, source: Path, out: Path, method: str, algorithm: str | None) -> dict[str, object]:
    options = CalibrationOptions(measured_tokens=32, num_tokens=256, length=64)
    job = QuantizeRun(source, out, QuantizeOptions(method), device=device)
    return quantize(job, options, algorithm, GPTQOptions(), lambda *_: None).as_json()


@pytest.mark.parametrize(("method", "algorithm"), [("W4A16", "gptq"), ("AWQ", None), ("W8A8", "smoothquant")])
def test_a_run_loses_what_one_on_the_cpu_does(
    method: str, algorithm: str | None, plain_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoothing, "EXPONENTS", smoothing.EXPONENTS[::7])
    monkeypatch.setattr(gpu_device, "BATCH_TOKENS", 128)
    outs = [tmp_path / "torch", tmp_path / "numpy"]
    results = [
        run_with(device, plain_llama, out, method, algorithm)
        for device, out in zip((in_fp32(), CPU()), outs, strict=True)
    ]
    original = last_states(open_checkpoint(plain_llama), IDS)
    lost = [compare(original, last_states(open_checkpoint(out), IDS), IDS).kl.value for out in outs]
    assert lost[0] == pytest.approx(lost[1], rel=0.1)
    assert results[0]["bytes"] == results[1]["bytes"]
    configs = [json.loads((out / "config.json").read_text()) for out in outs]
    assert configs[0] == configs[1]


def test_experts_without_tokens_are_rounded_to_nearest(tmp_path: Path) -> None:
    """Experts 1 to 3 have the same router logits, and of two that are chosen none is the last."""
    write_plain(tmp_path / "model", "Mixtral")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for name, router in tensors.items():
        if name.endswith("gate.weight"):
            router[2] = router[3] = router[1]
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    job = QuantizeRun(tmp_path / "model", tmp_path / "out", QuantizeOptions("W4A16"), device=in_fp32())
    options = CalibrationOptions(measured_tokens=0, num_tokens=64, length=64)
    outcome = quantize(job, options, "gptq", GPTQOptions(), lambda *_: None)
    assert outcome.notes[0].startswith("6 layers had no inputs and are rounded to nearest: ")
    assert outcome.notes[0].count(".experts.3.") == 6
    assert not any(".experts.3." in name for name in outcome.losses)


def test_scaled_models_compute_the_same_on_the_device(tmp_path: Path) -> None:
    write_plain(tmp_path, "Qwen2")
    checkpoint, device = open_checkpoint(tmp_path), in_fp32()
    scaled, _ = smoothed(checkpoint, "smoothquant", IntegerGrid(4, 128, False), IDS, "ids", device, lambda *_: None)
    before, after = (last_states(each, IDS).rows(0, 82) for each in (checkpoint, scaled))
    assert np.abs(before - after).max() < 1e-4 * np.abs(before).max()


@pytest.mark.parametrize(
    "values",
    [
        RNG.integers(0, 256, (3, 1000), np.uint8),
        RNG.normal(size=(7, 45)).astype(np.float16).T,
        RNG.normal(size=(20, 33)).astype(np.float32),
        RNG.integers(-9, 9, (2, 3, 100)).astype(np.int64)[:, ::2],
        np.zeros((0, 4), np.float32),
        np.float32(3.5).reshape(()),
    ],
)
def test_arrays_come_back_as_they_went(values: NDArray[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "STAGING_BYTES", 128)
    before = np.array(values)
    there = host.to_device(values, NAME)
    assert there.shape == values.shape and there.device.type == NAME
    back = host.to_host(there)
    host.to_device(np.full(200, 9, np.uint8), NAME)  # through the same buffer
    assert back.dtype == values.dtype and np.array_equal(back, before) and np.array_equal(there.cpu(), before)
    assert np.array_equal(host.to_host(there.T if there.ndim == 2 else there), before.T if before.ndim == 2 else before)


def test_weights_that_are_no_numbers_are_refused_by_name() -> None:
    with pytest.raises(BadCheckpoint, match=r"'a\.weight' has 1 weights that are not numbers"):
        in_fp32().read(stored_floats("a.weight", np.array([[1, np.nan]], np.float32)))


def test_what_one_forward_pass_raises_ends_all(plain_llama: Path) -> None:
    class Refuses(StoredWeights):
        count = 0

        def observe(self, parts, x, source=None, stream=None):  # type: ignore[no-untyped-def]
            self.count += 1
            if self.count == 5:
                raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        in_fp32().observe(open_checkpoint(plain_llama), IDS, Refuses(in_fp32().read), lambda *_: None)


@pytest.mark.skipif(NAME == "cuda", reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(QuireError, match="--device is cuda, and there is no NVIDIA driver"):
        find_device("cuda")
    assert find_device("auto").kind == "cpu" and fp8("tensor").fp8_by == "tensor"
