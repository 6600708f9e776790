"""Where a run computes: with numpy and native kernels on the CPU, or with torch on a GPU (quantize/gpu)."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from quire.core.errors import DoesNotFit
from quire.ops.native.heap import large_arrays_freed_at_once, large_arrays_reused
from quire.ops.opset import Keep
from quire.ops.tensors import StoredTensor
from quire.quantize.eager_model import EagerModel, linear_layers
from quire.quantize.eager_ops import MatmulHook
from quire.quantize.floats import Floats, read_floats
from quire.quantize.gptq import GPTQOptions, gptq, made_up, rounding_order
from quire.quantize.integers import GroupedIntegers, IntegerGrid, to_nearest
from quire.quantize.linear_formats import Encoded, LinearFormat
from quire.quantize.lockstep import ComparingHook, run_beside_originals, run_in_lockstep
from quire.quantize.plan import QuantizeError
from quire.quantize.threads import cores, in_threads, spans
from quire.runtime.available_memory import available_memory
from quire.weights.checkpoint import Checkpoint

Array = Any  # of numpy on the CPU, of torch on a GPU
Report = Callable[[str, float, float], None]  # (phase, done, of): called often
Item = TypeVar("Item")

BATCH_TOKENS = 4096  # of a forward pass
SIDE_BY_SIDE = 4  # forward passes at most, among which the cores are divided
COMPARED_TOKENS = 8192
ACTIVATION_COPIES = 2  # of inputs and outputs of the widest layer, for each token that is held


class Logits(Protocol):
    """The logits of all tokens of a forward pass, computed some rows at a time."""

    def rows(self, first: int, last: int) -> Floats: ...


class Device(Protocol):
    """`kind`: what is chosen may differ from kind to kind, as sums are rounded otherwise."""

    kind: str

    def read(self, tensor: StoredTensor) -> Array:
        """fp32 [rows, columns], checked to be numbers."""

    def array(self, values: Floats) -> Array: ...

    def numpy(self, array: Array) -> Floats: ...

    def squares(self, x: Array) -> Array:
        """x [rows, inputs] -> the sums of squares [inputs]"""

    def largest(self, x: Array) -> Array:
        """The largest of |x|."""

    def magnitudes(self, x: Array) -> tuple[Array, Array]:
        """The sums and the largest of |x| [inputs]"""

    def maximum(self, x: Array, y: Array) -> Array: ...

    def add_moments(self, moments: Array | None, x: Array, y: Array | None = None) -> Array:
        """moments + Y^T X, Y being X where it is not given; `moments` may be changed."""

    def rounding_order(self, moments: Array, group: int, options: GPTQOptions) -> Any: ...

    def made_up(self, w: Array, inputs: Array, outputs: Array | None, moments: Array) -> Array: ...

    def gptq(self, w: Array, shared: Any, grid: IntegerGrid, options: GPTQOptions) -> GroupedIntegers: ...

    def nearest(self, w: Array, grid: IntegerGrid) -> GroupedIntegers: ...

    def encode(self, form: LinearFormat, w: Array, importance: Floats | None) -> Encoded: ...

    def observe(
        self, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], hook: MatmulHook, report: Report
    ) -> dict[int, tuple[float, float]]:
        """Forward passes over all sequences -> the largest keys and values by layer."""

    def compare(self, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], hook: ComparingHook) -> None:
        """Forward passes over all sequences, some beside one of the original model. A matmul's weights are asked for
        when the inputs of all sequences have been observed or compared."""

    def logits(
        self, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], hook: MatmulHook | None = None
    ) -> Logits:
        """The logits of all tokens, in fp32."""

    def check_activations(self, checkpoint: Checkpoint, num_tokens: int) -> None:
        """Raises where the activations of all tokens at once do not fit in memory."""

    def each(self, work: Callable[[Item], Item], items: Sequence[Item]) -> Iterator[Item]:
        """Do the work of all items, perhaps of several at once -> items, as they are done."""


class CPU:
    """Numpy, native kernels, and the op set of `eager_ops.py`."""

    kind = "cpu"

    def read(self, tensor: StoredTensor) -> Floats:
        return read_floats(tensor)

    def array(self, values: Floats) -> Floats:
        return values

    def numpy(self, array: Floats) -> Floats:
        return array

    def squares(self, x: Floats) -> Floats:
        parts = in_threads(lambda span: np.einsum("ij,ij->j", x[:, span], x[:, span]), spans(x.shape[1]))
        return np.concatenate(parts)

    def largest(self, x: Floats) -> Floats:
        parts = in_threads(lambda span: np.maximum(x[span].max(), -x[span].min()), spans(len(x)))  # no copy of x
        largest: Floats = np.max(parts)
        return largest

    def magnitudes(self, x: Floats) -> tuple[Floats, Floats]:
        def measured(span: slice) -> tuple[Floats, Floats]:
            magnitude = np.abs(x[:, span])
            return magnitude.sum(0), magnitude.max(0)

        sums, largest = zip(*in_threads(measured, spans(x.shape[1])), strict=True)
        return np.concatenate(sums), np.concatenate(largest)

    def maximum(self, x: Floats, y: Floats) -> Floats:
        return np.maximum(x, y)

    def add_moments(self, moments: Floats | None, x: Floats, y: Floats | None = None) -> Floats:
        left = x if y is None else y
        sums = in_threads(lambda span: left[span].T @ x[span], spans(len(x)))
        total = sums.pop(0) if moments is None else moments
        for part in sums:
            total += part
        return total

    def rounding_order(self, moments: Floats, group: int, options: GPTQOptions) -> Any:
        return rounding_order(moments, group, options)

    def made_up(self, w: Floats, inputs: Floats, outputs: Floats | None, moments: Floats) -> Floats:
        return made_up(w, inputs, outputs, moments)

    def gptq(self, w: Floats, shared: Any, grid: IntegerGrid, options: GPTQOptions) -> GroupedIntegers:
        return gptq(w, shared, grid, options)

    def nearest(self, w: Floats, grid: IntegerGrid) -> GroupedIntegers:
        return to_nearest(w, grid, None)

    def encode(self, form: LinearFormat, w: Floats, importance: Floats | None) -> Encoded:
        return form.encode(w, importance)

    def observe(
        self, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], hook: MatmulHook, report: Report
    ) -> dict[int, tuple[float, float]]:
        forward = EagerModel(checkpoint, max(map(len, sequences)), hook)
        total, done = sum(map(len, sequences)), 0
        report("calibrating", 0, total)
        passes = [*batches(sequences, BATCH_TOKENS)]
        at_once = min(cores(), SIDE_BY_SIDE)
        with large_arrays_reused():
            for group in (passes[first : first + at_once] for first in range(0, len(passes), at_once)):
                forwards = [partial(forward, batch) for batch in group]
                run_in_lockstep(forwards, hook, lambda _: checkpoint.drop_pages(), at_once)
                done += sum(len(sequence) for batch in group for sequence in batch)
                report("calibrating", done, total)
        return forward.kv_largest

    def compare(self, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], hook: ComparingHook) -> None:
        forward = EagerModel(checkpoint, max(map(len, sequences)))
        beside, others = (
            [partial(forward, batch) for batch in part] for part in compared(checkpoint, sequences, BATCH_TOKENS)
        )
        at_once = min(cores(), SIDE_BY_SIDE)
        with large_arrays_freed_at_once():  # what all tokens keep would otherwise lie between what comes and goes
            run_beside_originals(beside, others, hook, self.read, lambda _: checkpoint.drop_pages(), at_once)

    def logits(
        self, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], hook: MatmulHook | None = None
    ) -> Logits:
        logits = EagerModel(checkpoint, max(map(len, sequences)), hook)(sequences)
        checkpoint.drop_pages()
        return logits

    def check_activations(self, checkpoint: Checkpoint, num_tokens: int) -> None:
        check_activations(checkpoint, num_tokens, 4 * ACTIVATION_COPIES, available_memory())

    def each(self, work: Callable[[Item], Item], items: Sequence[Item]) -> Iterator[Item]:
        return map(work, items)


def batches(sequences: Sequence[Sequence[int]], num_tokens: int) -> Iterator[list[Sequence[int]]]:
    """Batches of at least `num_tokens` tokens each, but for the last."""
    batch: list[Sequence[int]] = []
    for sequence in sequences:
        batch.append(sequence)
        if sum(map(len, batch)) >= num_tokens:
            yield batch
            batch = []
    if batch:
        yield batch


def compared(
    checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], num_tokens: int
) -> tuple[list[list[Sequence[int]]], list[list[Sequence[int]]]]:
    """Batches of `num_tokens`: those that are compared with the original model, from all over the text, and the
    rest."""
    cut = [*batches(sequences, num_tokens)]
    count = min(-(-_compared_tokens(checkpoint) // num_tokens), len(cut))
    chosen = {index * len(cut) // count for index in range(count)}
    beside = [batch for index, batch in enumerate(cut) if index in chosen]
    return beside, [batch for index, batch in enumerate(cut) if index not in chosen]


def _compared_tokens(checkpoint: Checkpoint) -> int:
    """Enough, and more where a layer has many inputs."""
    return max(COMPARED_TOKENS, 2 * max(use.shape[1] for use in linear_layers(checkpoint).values()))


def check_activations(checkpoint: Checkpoint, num_tokens: int, bytes_a_column: int, free: int) -> None:
    widest = max(sum(use.shape) for use in linear_layers(checkpoint).values() if use.keep is Keep.NOTHING)
    held = num_tokens + min(num_tokens, _compared_tokens(checkpoint))  # those in two models
    if (needed := bytes_a_column * widest * held) > free:
        raise DoesNotFit(
            f"GPTQ of {num_tokens} tokens needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free",
            f"use `--calibration-tokens {num_tokens * free // needed // 2}`",
        )


def find_device(asked: str) -> Device:
    """`asked`: "auto" takes a GPU where there is one and torch."""
    driver, torch = Path("/dev/nvidiactl").exists(), find_spec("torch") is not None and find_spec("triton") is not None
    if asked == "cuda" and not (driver and torch):
        missing = "there is no NVIDIA driver" if not driver else "torch and triton are not installed"
        raise QuantizeError(f"--device is cuda, and {missing}", "use --device cpu, or `pip install quire[gpu]`")
    if asked == "cpu" or not (driver and torch):
        return CPU()
    # Read when torch is imported: the sizes of arrays vary, and what is free must not lie in pieces.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    device: Device = import_module("quire.quantize.gpu.device").TorchDevice("cuda")
    return device
