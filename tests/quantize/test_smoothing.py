"""Scales that are folded into weights: what a model computes stays, and rounding loses less of it."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from quantize.plain_models import FAMILIES, VOCAB, write_plain
from quire.quantize import smoothing
from quire.quantize.command import CalibrationOptions, quantize
from quire.quantize.device import CPU
from quire.quantize.eager_model import EagerModel
from quire.quantize.floats import read_floats
from quire.quantize.gptq import GPTQOptions
from quire.quantize.integers import IntegerGrid
from quire.quantize.plan import QuantizeOptions
from quire.quantize.quality import compare, last_states
from quire.quantize.run import QuantizeRun
from quire.quantize.smoothing import InputStatistics, smoothed, smoothquant_scales
from quire.weights.checkpoint import open_checkpoint

GRID = IntegerGrid(4, 128, symmetric=False)
RNG = np.random.default_rng(4)
IDS = [RNG.integers(3, VOCAB - 5, length).tolist() for length in (40, 25)]


@pytest.fixture(autouse=True)
def few_exponents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoothing, "EXPONENTS", smoothing.EXPONENTS[::5])


@pytest.mark.parametrize(("family", "algorithm"), [("Llama", "awq"), ("Qwen2", "smoothquant"), ("Gemma3", "awq")])
def test_a_scaled_model_computes_the_same(family: str, algorithm: str, tmp_path: Path) -> None:
    assert family in FAMILIES
    write_plain(tmp_path, family)
    checkpoint = open_checkpoint(tmp_path)
    scaled, _ = smoothed(checkpoint, algorithm, GRID, IDS, "ids", CPU(), lambda *_: None)
    before, after = (last_states(each, IDS).rows(0, 65) for each in (checkpoint, scaled))
    assert np.abs(before - after).max() < 1e-4 * np.abs(before).max()
    for part in ("mlp.down_proj", "self_attn.k_proj"):
        name = f"model.layers.1.{part}.weight"
        assert not np.array_equal(scaled.tensor(name).data, checkpoint.tensor(name).data)


def test_inputs_that_experts_share_are_not_scaled(tmp_path: Path) -> None:
    write_plain(tmp_path, "Mixtral")
    checkpoint = open_checkpoint(tmp_path)
    scaled, _ = smoothed(checkpoint, "smoothquant", GRID, IDS, "ids", CPU(), lambda *_: None)
    tensors = ((name, checkpoint.tensor(name), scaled.tensor(name)) for name in checkpoint.names())
    changed = {name for name, before, after in tensors if not np.array_equal(before.data, after.data)}
    assert {name.split(".")[3] for name in changed} == {"self_attn", "input_layernorm"}


def with_outliers(folder: Path) -> Path:
    """A Llama some of whose inputs are much larger than others, as in real models."""
    write_plain(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "layernorm" in name:
            tensors[name][::37] *= 12
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("method", ["AWQ", "W4A16"])
def test_outliers_cost_less_with_awq(method: str, tmp_path: Path) -> None:
    source = with_outliers(tmp_path / "model")
    losses = []
    original = last_states(open_checkpoint(source), IDS)
    for algorithm in ("nearest", "awq"):
        out = tmp_path / algorithm
        options = CalibrationOptions(measured_tokens=0, num_tokens=256, length=64)
        run = QuantizeRun(source, out, QuantizeOptions(method))
        quantize(run, options, algorithm, GPTQOptions(), lambda *_: None)
        losses.append(compare(original, last_states(open_checkpoint(out), IDS), IDS).kl.value)
    assert losses[1] < 0.9 * losses[0]


def test_smoothquant_evens_out_the_inputs(tmp_path: Path) -> None:
    """The largest input of a layer is what a token's 8 bits have to span."""
    hook = InputStatistics(CPU())
    EagerModel(open_checkpoint(with_outliers(tmp_path)), 64, hook)(IDS)
    group = next(group for group in hook.scalable() if group.source.vectors)
    scales = smoothquant_scales(group, CPU())

    def spread(largest: np.ndarray) -> float:
        return float(largest.max() / np.median(largest))

    assert spread(group.largest / scales) < 0.5 * spread(group.largest)


def test_the_strength_says_how_much_goes_from_inputs_to_weights(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(with_outliers(tmp_path))
    hook = InputStatistics(CPU())
    CPU().observe(checkpoint, IDS, hook, lambda *_: None)
    group = hook.scalable()[0]
    largest = np.asarray(group.largest)
    columns = np.max([np.abs(read_floats(part)).max(0) for part in group.parts], axis=0)
    spreads = []
    for strength in (0.0, 0.5, 1.0):
        s = smoothquant_scales(group, CPU(), strength)
        spreads.append((np.ptp(np.log(largest / s)), np.ptp(np.log(columns * s))))
    assert spreads[0][1] < 1e-4 and spreads[2][0] < 1e-4  # weights are even, then inputs
    assert spreads[0][0] > spreads[1][0] > spreads[2][0] and spreads[0][1] < spreads[1][1] < spreads[2][1]
