"""From the names in a checkpoint to the weights of a model, by a table.

A family lists what it wants (`Matrix`, `Vector`, `Table`: checkpoint names and shapes); `load_weights` finds all that
is missing, left over or of the wrong shape before it reads a byte, then packs tensor by tensor, so that at no moment
more than one matrix is held twice."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.core.errors import BadCheckpoint
from quire.models.config import ModelConfig
from quire.ops.opset import OpSet, Value
from quire.ops.tensors import PackedWeight, StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.dummy_checkpoint import DummyCheckpoint

MAX_LISTED = 8  # names spelled out in an error


@dataclass(frozen=True, slots=True)
class Model:
    """A forward pass with its weights, ready for `OpSet.compile`."""

    config: ModelConfig
    forward: Callable[[OpSet, Any], Value]  # (ops, batch) -> logits
    weight_bytes: int  # of the packed matrices; tables stay in the file


@dataclass(frozen=True, slots=True)
class Matrix:
    """Linear layers that share their input, their outputs one below the other: name -> number of outputs."""

    parts: Mapping[str, int]
    num_inputs: int
    bias: bool = False

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, num_outputs in self.parts.items():
            yield f"{name}.weight", (num_outputs, self.num_inputs)
            if self.bias:
                yield f"{name}.bias", (num_outputs,)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        return ops.pack(tensors[::2], tensors[1::2]) if self.bias else ops.pack(tensors)


@dataclass(frozen=True, slots=True)
class Vector:
    """The weight of a norm."""

    name: str
    size: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.size,)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        return ops.vector(tensors[0])


@dataclass(frozen=True, slots=True)
class Table:
    """Rows to gather from."""

    name: str
    num_rows: int
    num_columns: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.num_rows, self.num_columns)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        return ops.table(tensors[0])


Wanted = Mapping[str, Matrix | Vector | Table]  # our name -> what it is made of


def load_weights(
    ops: OpSet, checkpoint: Checkpoint, top: Wanted, layer: Wanted, prefixes: Sequence[str], unused: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """-> the weights outside the layers, and those of each layer.

    The names in `layer` stand behind each of `prefixes`. Tensors whose whole name matches the pattern `unused` may be
    in the checkpoint and are not read."""
    groups = [("", top), *((prefix, layer) for prefix in prefixes)]
    _check(checkpoint, groups, unused)
    loaded = [
        {
            ours: want.load(ops, [checkpoint.tensor(prefix + name) for name, _ in want.shapes()])
            for ours, want in group.items()
        }
        for prefix, group in groups
    ]
    return loaded[0], loaded[1:]


def packed_bytes(groups: Iterable[Mapping[str, Any]]) -> int:
    return sum(w.nbytes for group in groups for w in group.values() if isinstance(w, PackedWeight))


def _check(checkpoint: Checkpoint, groups: Iterable[tuple[str, Wanted]], unused: str) -> None:
    wanted = {
        prefix + name: shape for prefix, group in groups for want in group.values() for name, shape in want.shapes()
    }
    if isinstance(checkpoint, DummyCheckpoint):
        checkpoint.shapes = wanted
    stored = set(checkpoint.names())
    problems = []
    if missing := [name for name in wanted if name not in stored]:
        problems.append(f"{_count(missing)} missing: {_listed(missing)}")
    if left_over := sorted(name for name in stored - wanted.keys() if not re.fullmatch(unused, name)):
        problems.append(f"{_count(left_over)} unknown: {_listed(left_over)}")
    shapes = ((name, checkpoint.shape(name), shape) for name, shape in wanted.items() if name in stored)
    if misshapen := [f"{name} is {[*found]} and not {[*shape]}" for name, found, shape in shapes if found != shape]:
        problems.append(f"{_count(misshapen)} of another shape: {_listed(misshapen)}")
    if problems:
        raise BadCheckpoint(
            f"the tensors of the checkpoint are not those of `{checkpoint.config.architecture}`: "
            + "; ".join(problems),
            "the download may be incomplete, or config.json belongs to another model",
        )


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} {'is' if len(names) == 1 else 'are'}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
