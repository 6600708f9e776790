"""`--target-bits` and `--target-size`: the tensors of an output that may have several formats, and the mix of these."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire.core.errors import QuireError
from quire.ops.tensors import GGUF_TYPES
from quire.quantize.eager_model import linear_layers
from quire.quantize.file_types import SHORT_NAMES
from quire.quantize.floats import Floats, read_floats
from quire.quantize.gguf_files import planned as planned_gguf
from quire.quantize.gguf_plan import quantized_tensors, stored_as
from quire.quantize.gguf_types import ENCODERS
from quire.quantize.huggingface_plan import quantized_layers
from quire.quantize.integers import to_nearest
from quire.quantize.methods import LINEAR_METHODS, linear_format
from quire.quantize.mix import GGUF_CANDIDATES, LINEAR_CANDIDATES, MixTarget, chosen_mix, predicted_loss
from quire.quantize.plan import QuantizeError, count
from quire.quantize.run import QuantizeRun
from quire.quantize.safetensors_files import planned as planned_safetensors
from quire.quantize.sensitivity import MixTensor, Report, Rounding, measured_losses
from quire.quantize.threads import CHUNK_WEIGHTS, in_threads
from quire.weights.checkpoint import Checkpoint

PROBED_SEQUENCES, PROBED_LENGTH = 3, 64
ATTEMPTS = 4  # headers change a little with the formats


@dataclass(frozen=True, slots=True)
class Mix:
    run: QuantizeRun
    types: Mapping[str, str]
    predicted: float  # mean KL divergence

    @property
    def note(self) -> str:
        kinds = ", ".join(f"{number} {kind}" for kind, number in Counter(self.types.values()).most_common())
        return f"a mix by sensitivity: {kinds}; predicted KL divergence {self.predicted:.5f}"


def usual_method(out: Path) -> str:
    """The name that a run has until its mix is known."""
    return "Q4_K_M" if out.suffix == ".gguf" else "W4A16"


class MixPlan:
    """What a mix is chosen from, checked before the work: a target that no mix meets is refused here."""

    def __init__(self, run: QuantizeRun, checkpoint: Checkpoint, target: MixTarget) -> None:
        self._checkpoint, self._target = checkpoint, target
        self._shapes, self._rounding, size_of = _gguf(run, checkpoint) if run.to_gguf else _linear(run, checkpoint)
        candidates = _candidates(target, run)
        self._sizes = {name: size_of(name, shape, candidates) for name, (_, shape) in self._shapes.items()}
        if without := [name for name, formats in self._sizes.items() if not formats]:
            raise QuantizeError(f"{without[0]} fits none of {', '.join(candidates)}", "name others with --methods")
        self._budget = _budget(run, checkpoint, target, self._sizes)

    def chosen(self, run: QuantizeRun, calibrated: Sequence[Sequence[int]], report: Report) -> Mix:
        """The run with the format of each tensor; its importance is known by now."""
        sequences = [[*sequence[:PROBED_LENGTH]] for sequence in _spread(calibrated)]
        tensors, of = self._tensors(), run.importance.of
        losses = measured_losses(self._checkpoint, tensors, sequences, self._rounding, of, report)
        budget = self._budget
        for _ in range(ATTEMPTS):
            types = chosen_mix(losses, budget)
            mixed = _with_types(run, types, {name: count(shape) for name, (_, shape) in self._shapes.items()})
            over = 0 if self._target.nbytes is None else _written(mixed, self._checkpoint) - self._target.nbytes
            if over <= 0:
                break
            budget -= over
        return Mix(mixed, types, predicted_loss(losses, types))

    def _tensors(self) -> list[MixTensor]:
        num_weights = sum(count(shape) for _, shape in self._shapes.values())
        bits = 8 * self._budget / num_weights
        return [
            MixTensor(name, published, self._sizes[name], _probed(self._sizes[name], bits, count(shape)))
            for name, (published, shape) in self._shapes.items()
        ]


def _written(run: QuantizeRun, checkpoint: Checkpoint) -> int:
    return run.plan(checkpoint).written_bytes


Shapes = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]  # name -> published names and shape
SizeOf = Callable[[str, tuple[int, ...], Sequence[str]], dict[str, int]]


def _gguf(run: QuantizeRun, checkpoint: Checkpoint) -> tuple[Shapes, Rounding, SizeOf]:
    tensors = quantized_tensors(checkpoint, run.options)

    def size_of(name: str, shape: tuple[int, ...], kinds: Sequence[str]) -> dict[str, int]:
        fitting = [kind for kind in kinds if shape[-1] % GGUF_TYPES[kind].block == 0]
        return {kind: planned_gguf(name, kind, shape).nbytes for kind in fitting}

    return {tensor.name: (tensor.published, tensor.shape) for tensor in tensors}, _as_gguf, size_of


def _as_gguf(kind: str, w: Floats, importance: Floats | None) -> Floats:
    step = max(CHUNK_WEIGHTS // w.shape[1], 1)
    chunks = [slice(first, first + step) for first in range(0, len(w), step)]
    rounded = w.copy()

    def encode(rows: slice) -> None:
        rounded[rows] = read_floats(stored_as("", w[rows], kind, importance))

    in_threads(encode, chunks)
    return rounded


def _linear(run: QuantizeRun, checkpoint: Checkpoint) -> tuple[Shapes, Rounding, SizeOf]:
    forms = run.forms
    assert forms is not None
    layers = quantized_layers(checkpoint, linear_layers(checkpoint), forms, run.options)
    formats = {name: linear_format(name, run.formats) for name in LINEAR_METHODS if _is_packed(name, run)}

    def size_of(name: str, shape: tuple[int, ...], kinds: Sequence[str]) -> dict[str, int]:
        outputs, inputs = shape
        fitting = [kind for kind in kinds if formats[kind].fits(outputs, inputs)]
        return {
            kind: sum(
                planned_safetensors(name, dtype, *size).nbytes
                for dtype, size in formats[kind].shapes(outputs, inputs).values()
            )
            for kind in fitting
        }

    def rounding(kind: str, w: Floats, importance: Floats | None) -> Floats:
        grid = formats[kind].grid
        assert grid is not None
        return to_nearest(w, grid, importance).values()

    return {name: ((name,), shape) for name, shape in layers.items()}, rounding, size_of


def _is_packed(name: str, run: QuantizeRun) -> bool:
    try:
        config = linear_format(name, run.formats).config([])
    except QuireError:  # the format lacks an option that is set
        return False
    return config.get("format") == "pack-quantized"


def _candidates(target: MixTarget, run: QuantizeRun) -> tuple[str, ...]:
    given = target.candidates or (GGUF_CANDIDATES if run.to_gguf else LINEAR_CANDIDATES)
    possible = list(ENCODERS) if run.to_gguf else [name for name in LINEAR_METHODS if _is_packed(name, run)]
    if unknown := [name for name in given if name not in possible]:
        raise QuantizeError(
            f"{unknown[0]} cannot be part of a mix in {run.out.name}", f"the formats are {', '.join(possible)}"
        )
    return given


def _probed(sizes: Mapping[str, int], bits: float, num_weights: int) -> str:
    """The format that is measured: the one nearest to the bits of the whole."""
    return min(sizes, key=lambda kind: abs(8 * sizes[kind] / num_weights - bits))


def _budget(run: QuantizeRun, checkpoint: Checkpoint, target: MixTarget, sizes: Mapping[str, Mapping[str, int]]) -> int:
    """Bytes for the tensors of the mix: all but what the other tensors, headers and files take."""
    smallest = {name: min(formats, key=lambda kind: formats[kind]) for name, formats in sizes.items()}
    plan = replace(run, options=replace(run.options, types=tuple(smallest.items()))).plan(checkpoint)
    mixed = sum(sizes[name][kind] for name, kind in smallest.items())
    if target.nbytes is not None:
        least, given = f"{plan.written_bytes / 1e6:.3f}MB", target.nbytes - plan.written_bytes
        flag = "--target-size"
    else:
        assert target.bits is not None
        least, given = f"{plan.bits_a_weight + 0.005:.2f}", int(target.bits * plan.num_weights / 8) - plan.nbytes
        flag = "--target-bits"
    if given < 0:
        raise QuantizeError(
            f"the smallest mix takes {plan.nbytes / 1e6:,.1f} MB, {plan.bits_a_weight:.2f} bits a weight: with tensors "
            "that stay as they are",
            f"ask for `{flag} {least}` or more, or name smaller formats with --methods",
        )
    return mixed + given


def _spread(calibrated: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    return calibrated[:: max(len(calibrated) // PROBED_SEQUENCES, 1)][:PROBED_SEQUENCES]


def _with_types(run: QuantizeRun, types: Mapping[str, str], weights: Mapping[str, int]) -> QuantizeRun:
    """The run with these types of tensors. Its method is the type of most weights, after which a GGUF file is
    called."""
    counts: Counter[str] = Counter()
    for name, kind in types.items():
        counts[kind] += weights[name]
    most = counts.most_common(1)[0][0]
    method = SHORT_NAMES.get(most, most) if run.to_gguf else most
    return replace(run, options=replace(run.options, method=method, types=tuple(sorted(types.items()))))
