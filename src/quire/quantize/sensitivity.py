"""How much each tensor of a model suffers in each format: what a mix is chosen by.

A tensor is rounded to one format, and the divergence of the next-token distribution from the original's is measured.
Other formats lose in proportion to their squared error, weighted by the importance of inputs: for small errors the
divergence is a quadratic form of them. Many tensors are measured in one forward pass: each has copies of the same
sequences, and only those see it rounded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.ops.tensors import StoredTensor
from quire.quantize.eager_model import EagerModel
from quire.quantize.floats import Floats, read_floats
from quire.quantize.quality import log_softmax
from quire.weights.checkpoint import Checkpoint

VARIANTS = 16  # tensors that are measured in one forward pass
SAMPLED_WEIGHTS = 1 << 18  # of a tensor, rounded to every format
SMALLEST_DIVERGENCE = 1e-9  # below what fp32 can tell

Report = Callable[[str, float, float], None]
Rounding = Callable[[str, Floats, Floats | None], Floats]  # (format, weights, importance) -> what they become


@dataclass(frozen=True, slots=True)
class MixTensor:
    """A tensor whose format is chosen: what it takes in each. `published`: its names in Hugging Face's layout."""

    name: str
    published: tuple[str, ...]
    sizes: Mapping[str, int]  # format -> bytes
    probed: str  # the format that is measured


@dataclass(frozen=True, slots=True)
class TensorLosses:
    """Format -> bytes, and the divergence that it adds."""

    name: str
    sizes: Mapping[str, int]
    losses: Mapping[str, float]


class RoundingProbe:
    """The probe of a forward pass over copies of `length` tokens: copy i sees the tensors of variant i rounded."""

    def __init__(
        self, variants: Sequence[MixTensor], length: int, rounding: Rounding, importance: Callable[[str], Floats | None]
    ) -> None:
        self._variants = {name: (index, tensor) for index, tensor in enumerate(variants) for name in tensor.published}
        self._length, self._rounding, self._importance = length, rounding, importance
        self._last: tuple[str, Floats] = ("", np.empty(0, np.float32))  # logits ask for the head's several times

    def linear(self, parts: Sequence[StoredTensor], x: Floats, out: Floats, rows: NDArray[np.intp]) -> None:
        first = 0
        for part in parts:
            last = first + part.num_rows
            if (known := self._variants.get(part.name)) is not None:
                mine = rows // self._length == known[0]
                if mine.any():
                    out[mine, first:last] += x[mine] @ self._error(part, known[1].probed).T
            first = last

    def embedding(self, table: StoredTensor, ids: NDArray[np.int32], out: Floats) -> None:
        if (known := self._variants.get(table.name)) is not None:
            mine = np.arange(len(ids)) // self._length == known[0]
            out[mine] = self._rounding(known[1].probed, out[mine], self._importance(table.name))

    def _error(self, part: StoredTensor, kind: str) -> Floats:
        if self._last[0] != part.name:
            w = read_floats(part)
            self._last = (part.name, self._rounding(kind, w, self._importance(part.name)) - w)
        return self._last[1]


def measured_losses(
    checkpoint: Checkpoint,
    tensors: Sequence[MixTensor],
    sequences: Sequence[Sequence[int]],
    rounding: Rounding,
    importance: Callable[[str], Floats | None],
    report: Report,
) -> list[TensorLosses]:
    divergences = _divergences(checkpoint, tensors, sequences, rounding, importance, report)
    found = []
    for index, tensor in enumerate(tensors):
        errors = _errors(checkpoint, tensor, rounding, importance)
        scale = divergences[index] / max(errors[tensor.probed], 1e-30)
        losses = {kind: scale * error for kind, error in errors.items()}
        found.append(TensorLosses(tensor.name, tensor.sizes, losses))
        report("comparing types", index + 1, len(tensors))
    return found


def _divergences(
    checkpoint: Checkpoint, tensors: Sequence[MixTensor], sequences: Sequence[Sequence[int]], rounding: Rounding,
    importance: Callable[[str], Floats | None], report: Report,
) -> list[float]:  # fmt: skip
    """The divergence for each tensor in the format that is probed: the mean over the tokens."""
    length, longest = sum(map(len, sequences)), max(map(len, sequences))
    original = log_softmax(EagerModel(checkpoint, longest)(sequences).rows(0, length))
    shares = np.exp(original)
    divergences: list[float] = []
    report("measuring sensitivity", 0, len(tensors))
    for first in range(0, len(tensors), VARIANTS):
        batch = tensors[first : first + VARIANTS]
        probe = RoundingProbe(batch, length, rounding, importance)
        logits = EagerModel(checkpoint, longest, probe=probe)([*sequences] * len(batch))
        for index in range(len(batch)):
            rounded = log_softmax(logits.rows(index * length, (index + 1) * length))
            mean = float((shares * (original - rounded)).sum(1, dtype=np.float64).mean())
            divergences.append(max(mean, SMALLEST_DIVERGENCE))
        checkpoint.drop_pages()
        report("measuring sensitivity", len(divergences), len(tensors))
    return divergences


def _errors(
    checkpoint: Checkpoint, tensor: MixTensor, rounding: Rounding, importance: Callable[[str], Floats | None]
) -> dict[str, float]:
    """Weighted squared errors of a sample of rows, in each format."""
    names = tensor.published[:: max(len(tensor.published) // 8, 1)]
    errors = dict.fromkeys(tensor.sizes, 0.0)
    for name in names:
        part = checkpoint.tensor(name)
        rows = max(SAMPLED_WEIGHTS // len(names) // part.num_columns, 1)
        step = max(part.num_rows // rows, 1)
        w = read_floats(part.ordered(np.arange(0, part.num_rows, step, dtype=np.int32)))
        vector = importance(name)
        for kind in errors:
            lost = np.square(rounding(kind, w, vector) - w)
            errors[kind] += float((lost if vector is None else lost * vector).sum())
    return errors
