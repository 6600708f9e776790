"""Forward passes side by side."""

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantize.plain_models import VOCAB
from quire.ops.tensors import StoredTensor, stored_floats
from quire.quantize import device, lockstep, threads
from quire.quantize.calibration import ImportanceSums
from quire.quantize.command import CalibrationOptions, quantize
from quire.quantize.device import CPU
from quire.quantize.eager_ops import MatmulHook, StoredWeights
from quire.quantize.gptq import GPTQOptions
from quire.quantize.input_sources import InputSource
from quire.quantize.lockstep import run_beside_originals, run_in_lockstep
from quire.quantize.plan import QuantizeOptions
from quire.quantize.run import QuantizeRun
from quire.weights.checkpoint import open_checkpoint

MATRIX = [stored_floats("matrix.weight", np.ones((2, 2), np.float32))]
SECONDS = 20


class Order(StoredWeights):
    """Which batches were observed, in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.observed: list[int] = []

    def observe(
        self, parts: Sequence[StoredTensor], x: Any, source: InputSource | None = None, stream: Any = None
    ) -> None:
        self.observed.append(x)

    def compare(self, parts: Sequence[StoredTensor], x: Any, stream: Any, original: Any, before: Any) -> None:
        assert original == x
        self.observed.append(x)


def test_batches_are_observed_in_their_order_whichever_is_faster() -> None:
    hook, there = Order(), [threading.Event() for _ in range(4)]
    there[3].set()

    def forward(index: int, own: MatmulHook) -> None:
        for _ in range(3):
            assert there[index + 1].wait(SECONDS), "the passes do not run at once"
            there[index].set()  # the last pass gets there first
            own.observe(MATRIX, index)
            own.weights(MATRIX)

    run_in_lockstep([partial(forward, index) for index in range(3)], hook, at_once=3)
    assert hook.observed == [0, 1, 2] * 3


@pytest.mark.parametrize("failing", range(3))
def test_a_pass_that_fails_ends_the_others(failing: int) -> None:
    before = threading.active_count()

    def forward(index: int, own: MatmulHook) -> None:
        own.observe(MATRIX, index)
        own.weights(MATRIX)
        if index == failing:
            raise ValueError(f"pass {index}")
        own.observe(MATRIX, index)
        own.weights(MATRIX)

    with pytest.raises(ValueError, match=f"pass {failing}"):
        run_in_lockstep([partial(forward, index) for index in range(3)], Order(), at_once=2)
    assert threading.active_count() == before


@pytest.mark.parametrize("failing", ["original", "quantized"])
def test_a_pass_that_fails_ends_those_of_both_models(failing: str) -> None:
    before, hook, original = threading.active_count(), Order(), np.eye(2, dtype=np.float32)

    def forward(index: int, own: MatmulHook) -> None:
        own.observe(MATRIX, index)
        weights = "original" if own.weights(MATRIX)[0] is original else "quantized"
        if index == 1 and weights == failing:
            raise ValueError(f"pass {index}")
        own.observe(MATRIX, index)
        own.weights(MATRIX)

    forwards = [partial(forward, index) for index in range(3)]
    with pytest.raises(ValueError, match="pass 1"):
        run_beside_originals(forwards[:2], forwards[2:], hook, lambda _: original, at_once=2)
    assert hook.observed[:3] == [0, 1, 2] and threading.active_count() == before


def test_gptq_writes_the_same_bytes_whether_passes_run_at_once(
    plain_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of both models, and those that are not compared."""
    monkeypatch.setattr(device, "BATCH_TOKENS", 256)
    monkeypatch.setattr(device, "COMPARED_TOKENS", 256)
    for module in (threads, device, lockstep):
        monkeypatch.setattr(module, "cores", lambda: 3)
    written = []
    for count in (1, 3):
        monkeypatch.setattr(device, "SIDE_BY_SIDE", count)
        job = QuantizeRun(plain_llama, tmp_path / f"{count}", QuantizeOptions("W4A16"))
        options = CalibrationOptions(wanted=True, measured_tokens=0, num_tokens=2048, length=64)
        quantize(job, options, "gptq", GPTQOptions(), lambda *_: None)
        written.append([path.read_bytes() for path in sorted((tmp_path / f"{count}").glob("*.safetensors"))])
    assert written[0] and written[0] == written[1]


def test_sums_have_the_same_bits_on_any_number_of_cores(plain_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(5).integers(3, VOCAB - 5, (14, 64)).tolist()
    monkeypatch.setattr(device, "BATCH_TOKENS", 256)
    hooks = []
    for count in (1, 2, 3, 9):
        for module in (threads, device, lockstep):
            monkeypatch.setattr(module, "cores", lambda count=count: count)
        hooks.append(ImportanceSums(CPU()))
        CPU().observe(open_checkpoint(plain_llama), ids, hooks[-1], lambda *_: None)
    for other in hooks[1:]:
        assert other.largest == hooks[0].largest and other.counts == hooks[0].counts
        for name, sums in hooks[0].sums.items():
            np.testing.assert_array_equal(other.sums[name], sums)
