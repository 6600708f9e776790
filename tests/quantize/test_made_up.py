"""GPTQ makes up for what the layers before have lost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantize.plain_models import VOCAB, write_plain
from quire.ops.tensors import StoredTensor
from quire.quantize import command
from quire.quantize import device as devices
from quire.quantize.device import CPU
from quire.quantize.eager_model import EagerModel, layers_of_stream
from quire.quantize.eager_ops import StoredWeights
from quire.quantize.floats import Floats, read_floats
from quire.quantize.gptq import RIDGE, GPTQOptions, made_up
from quire.quantize.gptq_pass import GPTQPass
from quire.quantize.input_sources import InputSource
from quire.quantize.plan import QuantizeOptions
from quire.quantize.quality import compare, last_states
from quire.quantize.run import QuantizeRun
from quire.weights.checkpoint import open_checkpoint

RNG = np.random.default_rng(3)
IDS = RNG.integers(3, VOCAB - 5, (24, 64)).tolist()


def normal(*shape: int) -> Floats:
    return RNG.normal(size=shape).astype(np.float32)


def test_weights_that_make_up_are_those_of_ridge_regression() -> None:
    """Of what is wanted on x, with rows that pull each weight to what it was."""
    rows, inputs, outputs = 200, 24, 10
    original, w, lost_sum = normal(rows, inputs), normal(outputs, inputs), normal(rows, outputs)
    x = original + 0.3 * normal(rows, inputs)
    moments = x.T @ x / rows
    pull = np.sqrt(rows * RIDGE * np.diagonal(moments).mean()) * np.eye(inputs)
    wanted = np.concatenate((original @ w.T + lost_sum, pull @ w.T))
    best = np.linalg.lstsq(np.concatenate((x, pull)), wanted, rcond=None)[0].T
    chosen = made_up(w, (original - x).T @ x / rows, lost_sum.T @ x / rows, moments)
    np.testing.assert_allclose(chosen, best, atol=1e-5)


def test_halved_inputs_are_made_up_for_by_weights_as_far_as_the_ridge_allows() -> None:
    """Inputs of variance 1, halved: w becomes w + w (1/4) / (1/4 + ridge / 4)."""
    w, quarter = normal(3, 4), np.eye(4, dtype=np.float32) / 4
    np.testing.assert_allclose(made_up(w, quarter, None, quarter), w + w / (1 + RIDGE), rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("Llama", ("self_attn.o_proj", "mlp.down_proj")),
        ("Mixtral", ("self_attn.o_proj",)),  # experts are weighed before they are added
        ("Gemma3", ()),  # outputs are normed before they are added
    ],
)
def test_layers_of_the_stream_are_seen_in_a_forward_pass(family: str, names: tuple[str, ...], tmp_path: Path) -> None:
    write_plain(tmp_path, family)
    expected = {f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in names}
    assert layers_of_stream(open_checkpoint(tmp_path)) == expected


def test_some_of_a_long_text_is_compared_and_layers_with_many_inputs_have_more(
    plain_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(plain_llama)
    for tokens, expected in ((128, [0, 4, 8, 12, 16, 20, 24, 28]), (2048, [*range(0, 32, 2)]), (4096, [*range(32)])):
        monkeypatch.setattr(devices, "COMPARED_TOKENS", tokens)  # a layer has 512 inputs: 1,024 tokens are the least
        beside, others = devices.compared(checkpoint, [[index] * 128 for index in range(32)], 128)
        assert [batch[0][0] for batch in beside] == expected
        assert len(beside) + len(others) == 32


class Halves(StoredWeights):
    """Halves the matrices of a model, and keeps what it is shown of both passes."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[str, list[Floats]] = {}
        self.streams: dict[str, list[Floats]] = {}

    def weights(self, parts: Sequence[StoredTensor]) -> Sequence[Floats]:
        return [read_floats(part) / 2 for part in parts]

    def compare(self, parts: Sequence[StoredTensor], x: Any, stream: Any, original: Any, before: Any) -> None:
        if stream is not None:
            self.inputs.setdefault(parts[0].name, []).append(original)
            self.streams.setdefault(parts[0].name, []).append(before)


class Kept(StoredWeights):
    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[str, Floats] = {}
        self.streams: dict[str, Floats] = {}

    def observe(
        self, parts: Sequence[StoredTensor], x: Any, source: InputSource | None = None, stream: Any = None
    ) -> None:
        self.inputs[parts[0].name], self.streams[parts[0].name] = x, stream


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_the_pass_beside_is_that_of_the_original_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "BATCH_TOKENS", 128)
    write_plain(tmp_path, family)
    checkpoint, halves, kept = open_checkpoint(tmp_path), Halves(), Kept()
    CPU().compare(checkpoint, IDS[:6], halves)
    EagerModel(checkpoint, 64, kept)(IDS[:6])
    assert len(halves.inputs) >= 4
    for name, batches in halves.inputs.items():
        assert len(batches) == 3
        np.testing.assert_allclose(np.concatenate(batches), kept.inputs[name], atol=1e-4)
        np.testing.assert_allclose(np.concatenate(halves.streams[name]), kept.streams[name], atol=1e-4)


def test_a_model_is_nearer_to_the_original_on_the_text_it_was_calibrated_with(
    plain_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "sequences", lambda *_, **__: (IDS, []))
    original = last_states(open_checkpoint(plain_llama), IDS)

    def divergence(out: Path) -> float:
        run = QuantizeRun(plain_llama, out, QuantizeOptions("W3A16"))
        command.quantize(run, command.CalibrationOptions(measured_tokens=0), "gptq", GPTQOptions(), lambda *_: None)
        return compare(original, last_states(open_checkpoint(out), IDS), IDS).kl.value

    with_it = divergence(tmp_path / "with")
    monkeypatch.setattr(GPTQPass, "compare", lambda *_: None)
    assert with_it < 0.9 * divergence(tmp_path / "without")
