"""GPTQ of a whole model in one forward pass: each linear layer is quantized when its inputs are known, written, and
multiplied as it was written. A pass of the original model beside it tells what the layers before have lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from quire.ops.dequantize import dequantize
from quire.ops.tensors import StoredTensor
from quire.quantize.device import Array, Device, Report
from quire.quantize.eager_model import layers_of_stream, linear_layers
from quire.quantize.floats import Floats
from quire.quantize.gptq import GPTQOptions
from quire.quantize.huggingface_plan import linear_pieces
from quire.quantize.input_sources import InputSource
from quire.quantize.methods import LinearFormats
from quire.quantize.output import PartialOutput
from quire.quantize.plan import Task
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig
from quire.weights.formats import FORMATS
from quire.weights.raw import RawTensors
from quire.weights.safetensors import SafetensorsFile


@dataclass(slots=True, eq=False)
class Moments:
    """Sums over the rows of a matmul's inputs; see `gptq.made_up`. `compared`: of those rows whose inputs in the
    original model are known."""

    rows: int = 0
    alone: Array | None = None
    compared: Array | None = None
    inputs: Array | None = None
    outputs: Array | None = None

    def mean(self) -> Array | None:
        """Of the second moments of all rows."""
        if self.alone is None or self.compared is None:
            known = self.compared if self.alone is None else self.alone
            return None if known is None else known / self.rows
        return (self.alone + self.compared) / self.rows


class GPTQPass:
    """The hook of the forward pass. A layer that an earlier run wrote is read back. `unseen`: layers without a single
    input, such as experts that no token was routed to: they are left to the caller.

    Experts make up for nothing: in the original model, their inputs are those of other tokens. A model may have the
    rows of a matrix in another order than they are stored in: stored rows are quantized."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tasks: Mapping[str, Task],
        forms: LinearFormats,
        options: GPTQOptions,
        output: PartialOutput,
        there: set[str],
        device: Device,
        report: Report,
    ) -> None:
        self._checkpoint, self._tasks, self._forms, self._options = checkpoint, tasks, forms, options
        self._output, self._there, self._device, self._report = output, there, device, report
        self._of_stream = layers_of_stream(checkpoint)
        self._experts = {name for name, use in linear_layers(checkpoint).items() if use.expert}
        self._observed = Moments()
        self._total = sum(task.num_weights for task in tasks.values())
        self._done = 0
        self.unseen: list[str] = []
        self.losses: dict[str, float] = {}  # share of the output's energy that is lost

    def observe(
        self, parts: Sequence[StoredTensor], x: Array, source: InputSource | None = None, stream: Any = None
    ) -> None:
        if len(x) and self._has_tasks(parts):
            sums = self._observed
            x = _over_norm(x, stream) if self._is_added(parts) else x
            sums.alone = self._device.add_moments(sums.alone, x)
            sums.rows += len(x)

    def compare(self, parts: Sequence[StoredTensor], x: Array, stream: Array, original: Array, before: Array) -> None:
        if parts[0].name in self._experts or not self._has_tasks(parts):
            self.observe(parts, x)
            return
        sums, lost = self._observed, original - x
        if self._is_added(parts):
            x, lost, lost_before = (_over_norm(values, stream) for values in (x, lost, before - stream))
            sums.outputs = self._device.add_moments(sums.outputs, x, lost_before)
        sums.inputs = self._device.add_moments(sums.inputs, x, lost)
        sums.compared = self._device.add_moments(sums.compared, x)
        sums.rows += len(x)

    def _is_added(self, parts: Sequence[StoredTensor]) -> bool:
        """Whether the output is added to the stream, row by row as it is stored."""
        return parts[0].name in self._of_stream and parts[0].row_order is None

    def _has_tasks(self, parts: Sequence[StoredTensor]) -> bool:
        """Whether a layer is to be quantized, and an earlier run has not written it."""
        tasks = [self._tasks[part.name] for part in parts if part.name in self._tasks]
        return not all(task.is_in(self._there) for task in tasks)

    def weights(self, parts: Sequence[StoredTensor]) -> Sequence[Array]:
        observed, self._observed = self._observed, Moments()
        moments = observed.mean()
        orders: dict[int, Any] = {}  # by size of groups
        matrices = []
        for part in parts:
            task = self._tasks.get(part.name)
            if task is None:
                matrices.append(self._device.read(part))
                continue
            if task.is_in(self._there):
                matrices.append(self._as_in_model(self._device.array(self._written(task, part.name)), part))
            elif moments is None:
                self.unseen.append(part.name)
                matrices.append(self._device.read(part))
            else:
                matrices.append(self._quantized(task, part, moments, observed, orders))
            self._done += task.num_weights
            self._report("GPTQ", self._done, self._total)
        return matrices

    def _quantized(
        self, task: Task, part: StoredTensor, moments: Array, observed: Moments, orders: dict[int, Any]
    ) -> Array:
        w = self._device.read(self._checkpoint.tensor(part.name))
        if observed.inputs is not None:
            w = self._device.made_up(w, observed.inputs, observed.outputs, observed.compared)
        form = self._forms.of(part.name)
        grid, store = form.grid, form.store
        assert grid is not None and store is not None
        group = grid.group_of(part.num_columns)
        if group not in orders:
            orders[group] = self._device.rounding_order(moments, group, self._options)
        integers = self._device.gptq(w, orders[group], grid, self._options)
        encoded = store(integers)
        module = part.name.removesuffix(".weight")
        self._output.write(lambda: linear_pieces(module, encoded))
        self._there |= {tensor.name for tensor in task.outputs}
        values = integers.values()
        lost = values - w
        self.losses[part.name] = float(((lost @ moments) * lost).sum()) / max(float(((w @ moments) * w).sum()), 1e-30)
        return self._as_in_model(values, part)

    def _as_in_model(self, values: Array, part: StoredTensor) -> Array:
        if part.row_order is None:
            return values
        stored = self._checkpoint.tensor(part.name).row_order
        rows = part.row_order if stored is None else np.argsort(stored)[part.row_order]
        return values[rows.astype(np.int64)]

    def _written(self, task: Task, name: str) -> Floats:
        """From the partial output, by the reader of its format."""
        raw = _partial_tensors(self._output.folder, {tensor.name for tensor in task.outputs})
        config = CheckpointConfig(self._output.folder, self._forms.of(name).config([]))
        derived = import_module(FORMATS[config.str("quant_method")]).read(config, raw)
        return dequantize(derived[name].derive())


def _partial_tensors(folder: Path, names: set[str]) -> RawTensors:
    files = [SafetensorsFile(path) for path in sorted(folder.glob("*.safetensors"))]
    return RawTensors(folder, {name: file for file in files for name in file.entries if name in names})


def _over_norm(x: Array, stream: Array) -> Array:
    """Rows divided by the norm of the stream: as the norms of later layers divide what is added to it."""
    return x * ((stream * stream).mean(1) + 1e-12)[:, None] ** -0.5
