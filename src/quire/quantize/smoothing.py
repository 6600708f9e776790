"""Scales that move the difficulty of quantizing from some inputs to others, without changing what a model computes.

The inputs of a linear layer are divided by a vector s, and its columns multiplied with s. The division costs nothing
where the inputs come out of a norm, or out of a gated product: the norm's weights, or the rows of the layer before, are
divided instead.

    AWQ          s = mean|x| ^ a, a searched for the least error of the rounded layers    (Lin et al., 2023)
    SmoothQuant  s = max|x| ^ a / max|w| ^ (1 - a): activations can be quantized to 8 bits (Xiao et al., 2022)

Which layers can be scaled is seen in a forward pass; another checks that the scaled model computes the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.ops.tensors import StoredTensor, stored_floats
from quire.quantize.calibration import ImportanceSums
from quire.quantize.device import CPU, Array, Device, Logits, Report
from quire.quantize.eager_ops import StoredWeights
from quire.quantize.floats import Floats, read_floats
from quire.quantize.input_sources import InputSource
from quire.quantize.integers import IntegerGrid
from quire.quantize.plan import Importance, QuantizeError
from quire.weights.checkpoint import Checkpoint
from quire.weights.delegating_checkpoint import DelegatingCheckpoint

SAMPLE_ROWS = 256  # of the inputs of a layer, for the search
EXPONENTS = np.arange(20) / 20
CHECKED_TOKENS = 32
TOLERANCE = 1e-3  # of the largest logit


@dataclass(slots=True)
class ScaledInputs:
    """The inputs of linear layers that share them, and can be divided where they come from."""

    source: InputSource
    parts: tuple[StoredTensor, ...]
    mean: Array
    largest: Array
    sample: list[Array] = field(default_factory=list)


class InputStatistics(ImportanceSums):
    """A hook: sums of squares, and of inputs that can be divided, their magnitudes and a sample."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.groups: dict[InputSource, ScaledInputs] = {}
        self._shared: set[InputSource] = set()  # inputs that several matmuls take

    def observe(
        self, parts: Sequence[StoredTensor], x: Array, source: InputSource | None = None, stream: Any = None
    ) -> None:
        super().observe(parts, x)
        if source is not None and len(x):
            self._add(source, tuple(parts), x)

    def _add(self, source: InputSource, parts: tuple[StoredTensor, ...], x: Array) -> None:
        sums, largest = self._device.magnitudes(x)
        known = self.groups.get(source)
        if known is None:
            known = self.groups[source] = ScaledInputs(source, parts, sums, largest)
        elif {part.name for part in known.parts} != {part.name for part in parts}:
            self._shared.add(source)
            return
        else:
            known.mean = known.mean + sums
            known.largest = self._device.maximum(known.largest, largest)
        if sum(map(len, known.sample)) < SAMPLE_ROWS:
            rows = x[:: max(len(x) * 4 // SAMPLE_ROWS, 1)]
            known.sample.append(self._device.numpy(rows).copy())

    def scalable(self) -> list[ScaledInputs]:
        return [group for source, group in self.groups.items() if source not in self._shared]


def awq_scales(group: ScaledInputs, grid: IntegerGrid, device: Device) -> Floats:
    matrices = [device.read(part) for part in group.parts]
    x = device.array(np.concatenate(group.sample)[:SAMPLE_ROWS])
    mean = device.numpy(group.mean)
    mean = np.maximum(mean / max(float(mean.mean()), 1e-30), np.float32(1e-4))
    best, chosen = np.inf, np.ones(mean.shape, np.float32)
    for exponent in EXPONENTS:
        scales = (mean**exponent).astype(np.float32)
        scales /= np.sqrt(scales.max() * scales.min())
        s = device.array(scales)
        loss = 0.0
        for w in matrices:
            error = device.nearest(w * s, grid).values() / s - w
            loss += float(((x @ error.T) ** 2).sum())
        if loss < best:
            best, chosen = loss, scales
    return chosen


def smoothquant_scales(group: ScaledInputs, device: Device, strength: float = 0.5) -> Floats:
    """`strength`: how much of the difficulty goes from inputs to weights, 0 to 1."""
    columns = np.max([device.numpy(device.magnitudes(device.read(part))[1]) for part in group.parts], axis=0)
    largest = device.numpy(group.largest)
    inputs, weights = (np.maximum(part, np.float32(1e-5)) for part in (largest, columns))
    scales: Floats = (inputs**strength / weights ** (1 - strength)).astype(np.float32)
    even: Floats = scales / np.exp(np.log(scales).mean())
    return even


class ScaledCheckpoint(DelegatingCheckpoint):
    """A checkpoint with scales folded into its weights, which become fp32 where they change."""

    def __init__(self, checkpoint: Checkpoint, scales: Mapping[InputSource, tuple[ScaledInputs, Floats]]) -> None:
        super().__init__(checkpoint)
        self._columns = {part.name: s for group, s in scales.values() for part in group.parts}
        self._rows: dict[str, Floats] = {}
        self._vectors: dict[str, tuple[Floats, Floats]] = {}  # name -> (its values in the model, divisors)
        for source, (_, s) in scales.items():
            if source.rows_of is not None:
                self._rows[source.rows_of] = self._rows[source.rows_of.removesuffix("weight") + "bias"] = s
            for name, values in source.vectors:
                self._vectors[name] = (np.frombuffer(values, np.float32), s)

    def tensor(self, name: str) -> StoredTensor:
        tensor = self._checkpoint.tensor(name)
        if name in self._vectors:
            # What is stored may differ from the model's values by an offset, which stays.
            values, s = self._vectors[name]
            return stored_floats(
                name, read_floats(tensor).reshape(tensor.shape) + values * (np.float32(1) / s - np.float32(1))
            )
        if name not in self._columns and name not in self._rows:
            return tensor
        if len(tensor.shape) == 1:
            return stored_floats(name, read_floats(tensor).reshape(-1) / self._rows[name])
        return stored_floats(name, self.matrix(tensor, CPU()))

    def unscaled(self, name: str) -> StoredTensor:
        return self._checkpoint.tensor(name)

    def matrix(self, tensor: StoredTensor, device: Device) -> Array:
        """`tensor`: of the checkpoint that is scaled."""
        weights = device.read(tensor)
        if tensor.name in self._columns:
            weights = weights * device.array(self._columns[tensor.name])
        if tensor.name in self._rows:
            weights = weights / device.array(self._rows[tensor.name])[:, None]
        return weights

    def logits(self, sequences: Sequence[Sequence[int]], device: Device) -> Logits:
        """The logits of the scaled model, with one of its matrices in memory at a time."""
        hook = StoredWeights(lambda part: self.matrix(part, device))
        return device.logits(_ScaledVectors(self._checkpoint, self), sequences, hook)


class _ScaledVectors(DelegatingCheckpoint):
    """Matrices are as they were."""

    def __init__(self, checkpoint: Checkpoint, scaled: ScaledCheckpoint) -> None:
        super().__init__(checkpoint)
        self._scaled = scaled

    def tensor(self, name: str) -> StoredTensor:
        return (self._scaled if len(self.shape(name)) == 1 else self._checkpoint).tensor(name)


def read_weights(checkpoint: Checkpoint, name: str, device: Device) -> Array:
    """A matrix of a checkpoint; of a scaled one, scaled on the device."""
    if isinstance(checkpoint, ScaledCheckpoint):
        return checkpoint.matrix(checkpoint.unscaled(name), device)
    return device.read(checkpoint.tensor(name))


def smoothed(
    checkpoint: Checkpoint, algorithm: str, grid: IntegerGrid, sequences: Sequence[Sequence[int]], source: str,
    device: Device, report: Report, strength: float = 0.5,
) -> tuple[ScaledCheckpoint, Importance]:  # fmt: skip
    """The scaled checkpoint, and the importance of its inputs. `strength`: of SmoothQuant."""
    hook = InputStatistics(device)
    device.observe(checkpoint, sequences, hook, report)
    groups = hook.scalable()
    if not groups:
        raise QuantizeError(
            f"no layer of `{checkpoint.config.architecture}` takes its inputs from a norm alone",
            "use `--algorithm gptq`",
        )
    scales: dict[InputSource, tuple[ScaledInputs, Floats]] = {}
    report("scaling", 0, len(groups))
    sums = hook.sums
    for index, group in enumerate(groups, 1):
        is_awq = algorithm == "awq"
        chosen = awq_scales(group, grid, device) if is_awq else smoothquant_scales(group, device, strength)
        scales[group.source] = (group, chosen)
        for part in group.parts:
            sums[part.name] = sums[part.name] / (chosen * chosen)
        report("scaling", index, len(groups))
    scaled = ScaledCheckpoint(checkpoint, scales)
    _check_equal(checkpoint, scaled, [[*sequences[0][:CHECKED_TOKENS]]], device)
    return scaled, Importance(sums, hook.counts, source)


def _check_equal(
    checkpoint: Checkpoint, scaled: ScaledCheckpoint, sequences: Sequence[Sequence[int]], device: Device
) -> None:
    count = len(sequences[0])
    before = device.logits(checkpoint, sequences).rows(0, count)
    after = scaled.logits(sequences, device).rows(0, count)
    if (difference := float(np.abs(before - after).max() / np.abs(before).max())) > TOLERANCE:
        raise QuantizeError(
            f"scaled, a `{checkpoint.config.architecture}` computes something else (by {difference:.2g} of its largest "
            "logit): its inputs are used elsewhere too",
            "use `--algorithm gptq`",
        )
