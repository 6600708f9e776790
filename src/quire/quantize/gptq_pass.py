"""GPTQ of a whole model in one forward pass: each linear layer is quantized when its inputs are known, written, and
multiplied as it was written."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from quire.core.errors import DoesNotFit
from quire.ops.dequantize import dequantize
from quire.ops.opset import Keep
from quire.ops.tensors import StoredTensor
from quire.quantize.eager_model import EagerModel, linear_layers
from quire.quantize.eager_ops import InputSource
from quire.quantize.floats import Floats, read_floats
from quire.quantize.gptq import GPTQOptions, gptq, second_moments
from quire.quantize.huggingface_plan import linear_pieces
from quire.quantize.methods import LinearFormats
from quire.quantize.output import PartialOutput
from quire.quantize.plan import Task
from quire.runtime.available_memory import available_memory
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig
from quire.weights.formats import FORMATS
from quire.weights.raw import RawTensors
from quire.weights.safetensors import SafetensorsFile

ACTIVATION_COPIES = 3  # inputs and outputs of the widest layer, and what is computed of them

Report = Callable[[str, float, float], None]


class GPTQPass:
    """The hook of the forward pass. A layer that an earlier run wrote is read back. `unseen`: layers without a single
    input, such as experts that no token was routed to: they are left to the caller."""

    def __init__(
        self,
        tasks: Mapping[str, Task],
        forms: LinearFormats,
        options: GPTQOptions,
        output: PartialOutput,
        there: set[str],
        report: Report,
    ) -> None:
        self._tasks, self._forms, self._options = tasks, forms, options
        self._output, self._there, self._report = output, there, report
        self._total = sum(task.num_weights for task in tasks.values())
        self._done = 0
        self.unseen: list[str] = []
        self.losses: dict[str, float] = {}  # share of the output's energy that is lost

    def weights(self, parts: Sequence[StoredTensor], x: Floats, source: InputSource | None = None) -> Sequence[Floats]:
        moments: Floats | None = None
        matrices = []
        for part in parts:
            task = self._tasks.get(part.name)
            if task is None:
                matrices.append(read_floats(part))
                continue
            if task.is_in(self._there):
                matrices.append(self._written(task, part.name))
            elif not len(x):
                self.unseen.append(part.name)
                matrices.append(read_floats(part))
            else:
                moments = second_moments(x) if moments is None else moments
                matrices.append(self._quantized(task, part, moments))
            self._done += task.num_weights
            self._report("GPTQ", self._done, self._total)
        return matrices

    def _quantized(self, task: Task, part: StoredTensor, moments: Floats) -> Floats:
        w = read_floats(part)
        form = self._forms.of(part.name)
        grid, store = form.grid, form.store
        assert grid is not None and store is not None
        integers = gptq(w, moments, grid, self._options)
        encoded = store(integers)
        module = part.name.removesuffix(".weight")
        self._output.write(lambda: linear_pieces(module, encoded))
        self._there |= {tensor.name for tensor in task.outputs}
        values = integers.values()
        lost = values - w
        self.losses[part.name] = float(((lost @ moments) * lost).sum() / max(((w @ moments) * w).sum(), 1e-30))
        return values

    def _written(self, task: Task, name: str) -> Floats:
        """From the partial output, by the reader of its format."""
        raw = _partial_tensors(self._output.folder, {tensor.name for tensor in task.outputs})
        config = CheckpointConfig(self._output.folder, self._forms.of(name).config([]))
        derived = import_module(FORMATS[config.str("quant_method")]).read(config, raw)
        return dequantize(derived[name].derive())


def _partial_tensors(folder: Path, names: set[str]) -> RawTensors:
    files = [SafetensorsFile(path) for path in sorted(folder.glob("*.safetensors"))]
    return RawTensors(folder, {name: file for file in files for name in file.entries if name in names})


def check_activations(checkpoint: Checkpoint, num_tokens: int) -> None:
    """Raises where the activations of all tokens at once do not fit in memory."""
    widest = max(sum(use.shape) for use in linear_layers(checkpoint).values() if use.keep is Keep.NOTHING)
    needed, free = 4 * ACTIVATION_COPIES * widest * num_tokens, available_memory()
    if needed > free:
        raise DoesNotFit(
            f"GPTQ of {num_tokens} tokens needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free",
            f"use `--calibration-tokens {num_tokens * free // needed // 2}`",
        )


def run_gptq(checkpoint: Checkpoint, hook: GPTQPass, all_sequences: Sequence[Sequence[int]]) -> None:
    EagerModel(checkpoint, max(map(len, all_sequences)), hook)(all_sequences)
