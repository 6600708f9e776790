"""Which format each tensor gets where the whole is to have a given size: the mix that is predicted to lose least."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from quire.quantize.plan import QuantizeError
from quire.quantize.sensitivity import TensorLosses

GGUF_CANDIDATES = ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "Q5_0", "Q5_1", "Q8_0")
LINEAR_CANDIDATES = ("W2A16", "W3A16", "W4A16", "W8A16")


@dataclass(frozen=True, slots=True)
class MixTarget:
    """What is asked for: bits a weight, or bytes of the output; and the formats to choose from, () for the usual."""

    bits: float | None = None
    nbytes: int | None = None
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Step:
    """A tensor goes to its next larger format."""

    tensor: int
    kind: str
    nbytes: int  # more than before
    gain: float  # loss that is saved for each byte


def chosen_mix(tensors: Sequence[TensorLosses], budget: int) -> dict[str, str]:
    """Name -> format, in at most `budget` bytes: all tensors begin in their smallest format, and the step that saves
    most for its bytes is taken next, as long as it fits."""
    hulls = [_hull(tensor) for tensor in tensors]
    chosen = [hull[0] for hull in hulls]
    used = smallest_mix([tensor.sizes for tensor in tensors], budget)
    steps = [step for index, hull in enumerate(hulls) for step in _steps(index, tensors[index], hull)]
    full: set[int] = set()
    for step in sorted(steps, key=lambda step: (-step.gain, step.tensor, step.nbytes)):
        if step.tensor in full:
            continue
        if used + step.nbytes > budget:
            full.add(step.tensor)  # the tensor's later steps build on this one
            continue
        chosen[step.tensor] = step.kind
        used += step.nbytes
    return {tensor.name: kind for tensor, kind in zip(tensors, chosen, strict=True)}


def smallest_mix(sizes: Iterable[Mapping[str, int]], budget: int) -> int:
    """The bytes of the smallest mix; raises where that is more than `budget`."""
    smallest = sum(min(formats.values()) for formats in sizes)
    if smallest > budget:
        raise QuantizeError(
            f"the smallest mix takes {smallest / 1e6:,.1f} MB, {(smallest - budget) / 1e6:,.3f} MB more than are left",
            "ask for that much more, or name smaller formats with --methods",
        )
    return smallest


def predicted_loss(tensors: Sequence[TensorLosses], mix: dict[str, str]) -> float:
    return sum(tensor.losses[mix[tensor.name]] for tensor in tensors)


def _hull(tensor: TensorLosses) -> list[str]:
    """The formats worth having, the smallest first: each further one saves less for its bytes than the one before."""
    hull: list[str] = []
    for kind in sorted(tensor.sizes, key=lambda kind: (tensor.sizes[kind], tensor.losses[kind])):
        if hull and tensor.losses[kind] >= tensor.losses[hull[-1]]:
            continue
        while len(hull) > 1 and _gain(tensor, hull[-2], hull[-1]) <= _gain(tensor, hull[-2], kind):
            hull.pop()
        hull.append(kind)
    return hull


def _gain(tensor: TensorLosses, small: str, large: str) -> float:
    return (tensor.losses[small] - tensor.losses[large]) / max(tensor.sizes[large] - tensor.sizes[small], 1)


def _steps(index: int, tensor: TensorLosses, hull: list[str]) -> list[_Step]:
    return [
        _Step(index, large, tensor.sizes[large] - tensor.sizes[small], _gain(tensor, small, large))
        for small, large in pairwise(hull)
    ]
