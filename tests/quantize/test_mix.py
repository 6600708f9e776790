"""Mixes of formats for a given size: chosen by what each tensor loses, within the size."""

import json
from itertools import product
from pathlib import Path

import gguf
import numpy as np
import pytest

from quantize.plain_models import VOCAB
from quire.cli.main import main
from quire.core.errors import QuireError
from quire.quantize import mix_plan
from quire.quantize.command import CalibrationOptions, quantize
from quire.quantize.eager_model import EagerModel
from quire.quantize.eager_ops import StoredWeights
from quire.quantize.floats import read_floats
from quire.quantize.gptq import GPTQOptions
from quire.quantize.mix import MixTarget, chosen_mix, predicted_loss
from quire.quantize.plan import QuantizeOptions
from quire.quantize.quality import compare, last_states
from quire.quantize.run import QuantizeRun
from quire.quantize.sensitivity import MixTensor, TensorLosses, measured_losses
from quire.weights.checkpoint import open_checkpoint

RNG = np.random.default_rng(7)
IDS = [RNG.integers(3, VOCAB - 5, length).tolist() for length in (40, 24)]
CALIBRATION = CalibrationOptions(measured_tokens=0, num_tokens=512, length=128)


@pytest.fixture(autouse=True)
def short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix_plan, "PROBED_LENGTH", 32)


def random_losses(count: int) -> list[TensorLosses]:
    kinds = ("a", "b", "c")
    tensors = []
    for index in range(count):
        sizes = dict(zip(kinds, (int(n) for n in np.cumsum(RNG.integers(1, 9, 3))), strict=True))
        losses = dict(zip(kinds, (float(x) for x in np.sort(RNG.exponential(size=3))[::-1]), strict=True))
        tensors.append(TensorLosses(str(index), sizes, losses))
    return tensors


def test_a_mix_fits_and_loses_little_more_than_the_best() -> None:
    for _ in range(20):
        tensors = random_losses(6)
        smallest, largest = (sum(choose(t.sizes.values()) for t in tensors) for choose in (min, max))
        budget = (smallest + largest) // 2
        mix = chosen_mix(tensors, budget)
        assert sum(tensor.sizes[mix[tensor.name]] for tensor in tensors) <= budget
        every = (dict(zip(mix, kinds, strict=True)) for kinds in product("abc", repeat=6))
        fitting = [m for m in every if sum(t.sizes[m[t.name]] for t in tensors) <= budget]
        best = min(predicted_loss(tensors, m) for m in fitting)
        worst = predicted_loss(tensors, dict.fromkeys(mix, "a"))
        assert predicted_loss(tensors, mix) - best < 0.2 * (worst - best)


def test_a_size_that_nothing_fits_is_refused() -> None:
    with pytest.raises(QuireError, match="the smallest mix takes"):
        chosen_mix(random_losses(3), 1)


def test_tensors_are_measured_as_if_alone(plain_llama: Path) -> None:
    """Many in one forward pass, each with copies of the sequences."""
    checkpoint = open_checkpoint(plain_llama)
    names = ["model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.v_proj.weight"]
    names += ["lm_head.weight", "model.embed_tokens.weight"]

    def rounding(kind: str, w: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        return np.round(w * int(kind)) / np.float32(kind)

    tensors = [MixTensor(name, (name,), {"20": 1, "40": 2}, "20") for name in names]
    found = measured_losses(checkpoint, tensors, IDS, rounding, lambda name: None, lambda *_: None)

    def rounded(name: str) -> StoredWeights:
        return StoredWeights(lambda p: rounding("20", read_floats(p), None) if p.name == name else read_floats(p))

    original = last_states(checkpoint, IDS)
    for name, tensor in zip(names[:3], found[:3], strict=True):
        alone = compare(original, EagerModel(checkpoint, 64, rounded(name))(IDS), IDS).kl.value
        assert np.isclose(tensor.losses["20"], alone, rtol=1e-3), name
        assert 0.1 < tensor.losses["40"] / tensor.losses["20"] < 0.5  # half the step: about a quarter of the error
    assert found[3].losses["20"] > 1e-6  # rows of the table


def mixed(source: Path, out: Path, target: MixTarget, method: str) -> Path:
    run = QuantizeRun(source, out, QuantizeOptions(method))
    outcome = quantize(run, CALIBRATION, None, GPTQOptions(), lambda *_: None, target)
    assert "predicted KL divergence" in outcome.notes[0]
    return outcome.written.plan.out


def test_a_gguf_file_of_a_size_loses_less_than_one_type_of_that_size(plain_llama: Path, tmp_path: Path) -> None:
    uniform = tmp_path / "uniform.gguf"
    options = QuantizeOptions("Q4_K_S", pure=True)
    calibrated = CalibrationOptions(wanted=True, measured_tokens=0, num_tokens=512, length=128)
    quantize(QuantizeRun(plain_llama, uniform, options), calibrated, None, GPTQOptions(), lambda *_: None)
    size = uniform.stat().st_size
    target = MixTarget(nbytes=size, candidates=("Q3_K", "Q4_K", "Q5_K", "Q6_K"))
    out = mixed(plain_llama, tmp_path / "mix.gguf", target, "Q4_K_M")
    assert 0.97 * size < out.stat().st_size <= size
    types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert len(types - {"F32"}) > 1
    original = last_states(open_checkpoint(plain_llama), IDS)
    losses = [compare(original, last_states(open_checkpoint(path), IDS), IDS).kl.value for path in (uniform, out)]
    assert losses[1] < 0.95 * losses[0], losses


def test_a_folder_has_a_group_for_each_format(plain_llama: Path, tmp_path: Path) -> None:
    target = MixTarget(bits=7.0, candidates=("W3A16", "W4A16", "W8A16"))
    out = mixed(plain_llama, tmp_path / "mix", target, "W4A16")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    groups = config["config_groups"].values()
    assert len({group["weights"]["num_bits"] for group in groups}) > 1
    layers = [name for group in groups for name in group["targets"]]
    assert len(layers) == len(set(layers)) == 14 and "model.layers.1.mlp.up_proj" in layers
    checkpoint, original = open_checkpoint(out), open_checkpoint(plain_llama)
    bits = 8 * checkpoint.nbytes / sum(int(np.prod(original.shape(name))) for name in original.names())
    assert 6.5 < bits <= 7.0
    for name in layers:
        before, after = (read_floats(each.tensor(f"{name}.weight")) for each in (original, checkpoint))
        assert np.sqrt(((before - after) ** 2).mean() / (before**2).mean()) < 0.26


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target-bits", "4", "--target-size", "1MB"], "exclude each other"),
        (["--target-bits", "4", "--method", "Q4_0"], "exclude each other"),
        (["--target-bits", "40"], "--target-bits is 40"),
        (["--target-size", "much"], "--target-size is much"),
        (["--target-bits", "4.5", "--methods", "Q4_K,W4A16"], "W4A16 cannot be part of a mix in out.gguf"),
        (["--target-bits", "2", "--methods", "Q4_K,Q8_0", "--calibration-tokens", "64"], "the smallest mix takes"),
    ],
)
def test_targets_that_cannot_be_met(
    flags: list[str], message: str, plain_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(plain_llama), str(tmp_path / "out.gguf"), *flags, "-q"]) == 2
    assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
