"""A GPU as the device of a run; the tests run the same on the CPU."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import BadCheckpoint
from quire.models.registry import family, read_model_config
from quire.ops.tensors import StoredTensor
from quire.quantize.device import Item, Report, batches, check_activations, compared
from quire.quantize.eager_model import linear_layers, shared_layers
from quire.quantize.eager_ops import MatmulHook, StoredWeights
from quire.quantize.floats import Floats, read_floats
from quire.quantize.gptq import GPTQOptions
from quire.quantize.gpu import float8
from quire.quantize.gpu.gptq import TorchRoundingOrder, gptq, made_up, rounding_order
from quire.quantize.gpu.host import to_device, to_host
from quire.quantize.gpu.integers import TorchIntegers, to_nearest
from quire.quantize.gpu.ops import ObservedLogits, ObservedOps
from quire.quantize.integers import GroupedIntegers, IntegerGrid
from quire.quantize.linear_formats import Encoded, LinearFormat
from quire.quantize.lockstep import ComparingHook, Forward, run_beside_originals, run_in_lockstep
from quire.weights.checkpoint import Checkpoint

BATCH_TOKENS = 8192  # computed at once
ACTIVATION_BYTES = 4  # a token has inputs and outputs of the widest layer, in 16 bits, and half as much besides
WORKERS = 8  # tensors that are read, encoded and written at once
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TorchDevice:
    """`dtype`: of values between ops, while a text is calibrated with."""

    def __init__(self, name: str, dtype: torch.dtype | None = None) -> None:
        self.kind = self._name = name
        self._dtype = dtype or (torch.float32 if name == "cpu" else torch.bfloat16)

    # -- arrays

    def read(self, tensor: StoredTensor) -> Tensor:
        dtype = DTYPES.get(tensor.type.name)
        if dtype is None or tensor.column_order is not None:
            return self.array(read_floats(tensor))
        data = tensor.data if tensor.row_order is None else tensor.data[tensor.row_order]
        values = to_device(data, self._name).view(dtype).float().view(-1, tensor.num_columns)
        if not bool(values.sum().isfinite()) and (wrong := int((~values.isfinite()).sum())):
            raise BadCheckpoint(
                f"tensor {tensor.name!r} has {wrong} weights that are not numbers (NaN or Inf) among {values.numel()}",
                "the checkpoint is damaged, or its training diverged",
            )
        return values

    def array(self, values: Floats) -> Tensor:
        return to_device(values, self._name)

    def numpy(self, array: Tensor) -> Floats:
        return to_host(array.float())

    def squares(self, x: Tensor) -> Tensor:
        return x.float().square_().sum(0) if x.dtype != torch.float32 else x.square().sum(0)

    def largest(self, x: Tensor) -> Tensor:
        return x.abs().max()

    def magnitudes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        magnitude = x.abs()
        return magnitude.sum(0, dtype=torch.float32), magnitude.amax(0).float()

    def maximum(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.maximum(x, y)

    # -- rounding

    def add_moments(self, moments: Tensor | None, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = x.float()
        left = x if y is None else y.float()
        total = torch.zeros(left.shape[1], x.shape[1], device=x.device) if moments is None else moments
        with _tensor_cores(self._dtype != torch.float32):  # which take what 16 bits hold as it is
            return total.addmm_(left.T, x)

    def rounding_order(self, moments: Tensor, group: int, options: GPTQOptions) -> TorchRoundingOrder:
        return rounding_order(moments, group, options)

    def made_up(self, w: Tensor, inputs: Tensor, outputs: Tensor | None, moments: Tensor) -> Tensor:
        return made_up(w, inputs, outputs, moments)

    def gptq(self, w: Tensor, shared: Any, grid: IntegerGrid, options: GPTQOptions) -> GroupedIntegers:
        return gptq(w, shared, grid, options)

    def nearest(self, w: Tensor, grid: IntegerGrid) -> TorchIntegers:
        return to_nearest(w, grid, None)

    def encode(self, form: LinearFormat, w: Tensor, importance: Floats | None) -> Encoded:
        """Integers and fp8 on the device; what else there is, on the CPU."""
        if form.grid is not None and form.store is not None:
            return form.store(to_nearest(w, form.grid, None if importance is None else self.array(importance)))
        if form.fp8_by is not None:
            return float8.encode(w, form.fp8_by)
        return form.encode(self.numpy(w), importance)

    # -- forward passes

    def observe(
        self, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], hook: MatmulHook, report: Report
    ) -> dict[int, tuple[float, float]]:
        """All sequences together: matrices are read from the disk once."""
        ops, forward = self._load(checkpoint, max(map(len, sequences)), self._dtype)
        total = sum(use.shape[0] * use.shape[1] for use in linear_layers(checkpoint).values())
        done = 0

        def met(parts: Sequence[StoredTensor]) -> None:
            nonlocal done
            done += sum(part.num_rows * part.num_columns for part in parts)
            checkpoint.drop_pages()
            report("calibrating", done, total)

        report("calibrating", 0, total)
        run_in_lockstep(_passes(ops, forward, [*batches(sequences, BATCH_TOKENS)]), hook, met)
        self._free_cache()
        return {layer: (float(k), float(v)) for layer, (k, v) in ops.kv_largest.items()}

    def compare(self, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], hook: ComparingHook) -> None:
        ops, forward = self._load(checkpoint, max(map(len, sequences)), self._dtype)
        beside, others = (_passes(ops, forward, part) for part in compared(checkpoint, sequences, BATCH_TOKENS))
        run_beside_originals(beside, others, hook, self.read, lambda _: checkpoint.drop_pages())
        self._free_cache()

    def _free_cache(self) -> None:
        """Memory that the streams of `each` could not take."""
        if self._name != "cpu":
            torch.cuda.empty_cache()

    def logits(
        self, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], hook: MatmulHook | None = None
    ) -> ObservedLogits:
        ops, forward = self._load(checkpoint, max(map(len, sequences)), torch.float32)
        logits: ObservedLogits = forward(ops.for_batch(hook or StoredWeights(self.read)), ops.on_device(sequences))
        checkpoint.drop_pages()
        return logits

    def _load(
        self, checkpoint: Checkpoint, max_length: int, dtype: torch.dtype
    ) -> tuple[ObservedOps, Callable[[Any, Any], Any]]:
        loaded_family = family(checkpoint.config.architecture)
        config = read_model_config(loaded_family, checkpoint.config)
        ops = ObservedOps(self._name, dtype, self.read, shared_layers(config))
        model: Any = loaded_family.load(ops, checkpoint, config, min(max_length, config.max_length))
        return ops, model.forward

    # -- memory and threads

    def check_activations(self, checkpoint: Checkpoint, num_tokens: int) -> None:
        if self._name != "cpu":
            check_activations(checkpoint, num_tokens, ACTIVATION_BYTES, torch.cuda.mem_get_info()[0])

    def each(self, work: Callable[[Item], Item], items: Sequence[Item]) -> Iterator[Item]:
        """Several at once, each on a stream of its own: one is read while another is encoded and a third is written."""
        left = list(reversed(items))
        with ThreadPoolExecutor(WORKERS, initializer=self._use_stream) as pool:
            running: set[Future[Item]] = set()
            try:
                while left or running:
                    while left and len(running) < WORKERS:
                        running.add(pool.submit(work, left.pop()))
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            finally:
                left.clear()

    def _use_stream(self) -> None:
        if self._name != "cpu":
            torch.cuda.set_stream(torch.cuda.Stream())


def _passes(
    ops: ObservedOps, forward: Callable[[Any, Any], Any], cut: Sequence[Sequence[Sequence[int]]]
) -> list[Forward]:
    def passing(batch: Sequence[Sequence[int]]) -> Forward:
        return lambda own: forward(ops.for_batch(own), ops.on_device(batch)) and None

    return [passing(batch) for batch in cut]


@contextmanager
def _tensor_cores(allowed: bool) -> Iterator[None]:
    """fp32 matmuls with inputs of 11 bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
