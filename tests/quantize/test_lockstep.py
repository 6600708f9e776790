"""Forward passes side by side."""

import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from quantize.plain_models import VOCAB
from quire.ops.tensors import StoredTensor, stored_floats
from quire.quantize import device, lockstep, threads
from quire.quantize.calibration import ImportanceSums
from quire.quantize.device import CPU
from quire.quantize.eager_ops import MatmulHook, StoredWeights
from quire.quantize.input_sources import InputSource
from quire.quantize.lockstep import run_in_lockstep
from quire.weights.checkpoint import open_checkpoint

MATRIX = [stored_floats("matrix.weight", np.ones((2, 2), np.float32))]
SECONDS = 20


class Order(StoredWeights):
    """Which batches were observed, in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.observed: list[int] = []

    def observe(self, parts: list[StoredTensor], x: int, source: InputSource | None = None) -> None:  # type: ignore[override]
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


def test_sums_have_the_same_bits_on_any_number_of_cores(plain_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(5).integers(3, VOCAB - 5, (14, 64)).tolist()
    monkeypatch.setattr(device, "BATCH_TOKENS", 256)
    hooks = []
    for count in (1, 2, 3, 9):
        for module in (threads, device, lockstep):
            monkeypatch.setattr(module, "cores", lambda count=count: count)
        hooks.append(ImportanceSums(CPU()))
        CPU().observe(open_checkpoint(plain_llama), ids, hooks[-1], None)
    for other in hooks[1:]:
        assert other.largest == hooks[0].largest and other.counts == hooks[0].counts
        for name, sums in hooks[0].sums.items():
            np.testing.assert_array_equal(other.sums[name], sums)
