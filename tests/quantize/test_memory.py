"""What a calibration holds of its tokens, which go through a model in batches."""

import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantize.plain_models import COMMON, VOCAB, write_plain
from quire.ops.tensors import StoredTensor
from quire.quantize import device, lockstep, threads
from quire.quantize.command import CalibrationOptions, quantize
from quire.quantize.device import CPU
from quire.quantize.eager_ops import StoredWeights
from quire.quantize.floats import Floats
from quire.quantize.gptq import GPTQOptions
from quire.quantize.input_sources import InputSource
from quire.quantize.plan import QuantizeOptions
from quire.quantize.run import QuantizeRun
from quire.weights.checkpoint import open_checkpoint

HIDDEN, INNER = COMMON["hidden_size"], COMMON["intermediate_size"]
KV = HIDDEN // COMMON["num_attention_heads"] * COMMON["num_key_value_heads"]
RESIDUAL = 3 * HIDDEN  # the sum, what is added next, and its norm
HELD = (
    2 * 4 * (RESIDUAL + max(INNER, 2 * HIDDEN + 2 * KV))
)  # a token between two matmuls, in two models: activated, or q, k, v and output
LISTED = 64  # bytes of a token's id, in lists


def run(source: Path, out: Path, algorithm: str, num_tokens: int) -> None:
    options = CalibrationOptions(wanted=True, measured_tokens=0, num_tokens=num_tokens, length=64)
    job = QuantizeRun(source, out, QuantizeOptions("W4A16"))
    quantize(job, options, algorithm, GPTQOptions(), lambda *_: None)


@pytest.mark.parametrize(("algorithm", "held"), [("gptq", HELD), ("awq", 0), ("nearest", 0)])
def test_memory_grows_by_what_each_token_must_keep(
    algorithm: str, held: int, plain_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "BATCH_TOKENS", 512)
    for module in (threads, device, lockstep):  # with more, what is alive at once depends on which is faster
        monkeypatch.setattr(module, "cores", lambda: 1)
    counts, peaks = (2048, 6144), []
    for count in counts:
        tracemalloc.start()
        run(plain_llama, tmp_path / f"{count}", algorithm, count)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    grown = (peaks[1] - peaks[0]) / (counts[1] - counts[0])
    assert grown < 1.1 * held + LISTED, f"{grown:.0f} bytes a token, and {held} are needed"


class Moments(StoredWeights):
    """Second moments of the inputs of every matmul, and how often its weights were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: dict[str, Floats] = {}
        self.asked: Counter[str] = Counter()

    def observe(
        self, parts: Sequence[StoredTensor], x: Floats, source: InputSource | None = None, stream: Any = None
    ) -> None:
        if len(x):
            name = parts[0].name
            self.moments[name] = CPU().add_moments(self.moments.get(name), x)

    def compare(self, parts: Sequence[StoredTensor], x: Any, stream: Any, original: Any, before: Any) -> None:
        assert np.array_equal(x, original) and np.array_equal(stream, before)  # nothing was quantized
        self.observe(parts, x)

    def weights(self, parts: Sequence[StoredTensor]) -> Sequence[Floats]:
        self.asked[parts[0].name] += 1
        return super().weights(parts)


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_batches_meet_at_every_matmul_and_their_moments_add_up(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plain(tmp_path, family)
    ids = np.random.default_rng(5).integers(3, VOCAB - 5, (16, 64)).tolist()
    hooks = []
    for size in (4096, 128):
        monkeypatch.setattr(device, "BATCH_TOKENS", size)
        hooks.append(Moments())
        CPU().compare(open_checkpoint(tmp_path), ids, hooks[-1])
    whole, cut = hooks
    assert whole.asked == cut.asked and set(cut.asked.values()) == {1}
    for name, moments in whole.moments.items():
        np.testing.assert_allclose(cut.moments[name], moments, rtol=1e-4, atol=1e-5 * float(moments.max()))
