"""From the names in a checkpoint to the weights of a model, by a table.

A family lists what it wants (`Matrix`, `Vector`, ...: checkpoint names and shapes); `load_weights` finds all that is
missing, left over or of the wrong shape before it reads a byte, then packs tensor by tensor, so that at no moment
more than one matrix is held twice."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint
from quire.models.config import ModelConfig
from quire.ops.dequantize import as_floats, dequantize
from quire.ops.opset import Keep, OpSet, Value
from quire.ops.tensors import LinearLayer, PackedExperts, PackedHeads, PackedWeight, StoredTensor, stored_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.dummy_checkpoint import DummyCheckpoint

MAX_LISTED = 8  # names spelled out in an error


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A forward pass with its weights, ready for `OpSet.compile`."""

    config: ModelConfig
    forward: Callable[[OpSet, Any], Value]  # (ops, batch) -> logits
    weights: Sequence[Mapping[str, Any]]  # as `load_weights` has made them
    encode: Callable[[OpSet, Any], Value] | None = None  # of an encoder-decoder: writes what is attended to of sources

    @property
    def weight_bytes(self) -> int:
        """Of the packed matrices; tables stay in the file."""
        packed = PackedWeight | PackedExperts | PackedHeads
        return sum(w.nbytes for group in self.weights for w in group.values() if isinstance(w, packed))

    @property
    def linears(self) -> list[PackedWeight]:
        """The matrices of linear layers, the head apart."""
        named = [item for group in self.weights for item in group.items()]
        return [w for name, w in named if isinstance(w, PackedWeight) and name != "head"]


@dataclass(frozen=True, slots=True, eq=False)
class TensorPart:
    """What a matrix takes of one stored linear layer, where that is not all outputs as they are."""

    num_outputs: int
    order: NDArray[np.int32] | None = None  # output i is the stored output order[i], in the weight and in the bias
    ordered: bool = False  # of the model as published: this checkpoint has them in our order already
    num_stored: int | None = None  # outputs in the checkpoint, where not all are taken
    bias: bool | None = None  # whether it is stored; None: as in the other parts. What has none adds 0


@dataclass(frozen=True, slots=True)
class Matrix:
    """Linear layers that share their input, their outputs one below the other: name -> number of outputs.

    A layer is stored as `name.weight` [outputs, inputs] ([inputs, outputs] where `transposed`) and `name.bias`."""

    parts: Mapping[str, int | TensorPart]
    num_inputs: int
    bias: bool = False
    transposed: bool = False
    keep: Keep = Keep.NOTHING

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, part in self._parts():
            stored = part.num_stored or part.num_outputs
            yield f"{name}.weight", (self.num_inputs, stored) if self.transposed else (stored, self.num_inputs)
            if self._has_bias(part):
                yield f"{name}.bias", (stored,)

    def layers(self, prefix: str) -> tuple[LinearLayer, ...]:
        """What it is made of, by the names and with the outputs that they have in the model as published."""
        return tuple(
            LinearLayer(prefix + name, part.num_outputs, part.num_stored or part.num_outputs, part.order)
            for name, part in self._parts()
        )

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedWeight:
        stored = iter(tensors)
        weights, biases = [], []
        for name, part in self._parts():
            weight = next(stored)
            weight = weight.transposed() if self.transposed else weight
            zeros = np.zeros(part.num_stored or part.num_outputs, np.float32)
            bias = next(stored) if self._has_bias(part) else stored_floats(f"{name}.bias", zeros)
            order = None if part.ordered else part.order
            weights.append(weight if order is None else weight.ordered(order))
            biases.append(bias if order is None else bias.ordered(order))
        has_bias = any(self._has_bias(part) for _, part in self._parts())
        return ops.pack(weights, biases if has_bias else None, keep=self.keep)

    def _parts(self) -> list[tuple[str, TensorPart]]:
        return [(name, part if isinstance(part, TensorPart) else TensorPart(part)) for name, part in self.parts.items()]

    def _has_bias(self, part: TensorPart) -> bool:
        return self.bias if part.bias is None else part.bias


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """A matrix for each expert, its parts one below the other: name -> number of outputs.

    A name with `{}` in it, for the expert's number, is a linear layer of one expert, stored as `name.weight` and
    `name.bias`. A name without is one tensor of all experts, [experts, outputs, inputs] ([experts, inputs, outputs]
    where `transposed`), whose biases are `name_bias` [experts, outputs]."""

    parts: Mapping[str, int]
    num_inputs: int
    num_experts: int
    transposed: bool = False
    bias: bool = False
    order: NDArray[np.int32] | None = None  # output i of a part is the stored output order[i]

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, num_outputs in self.parts.items():
            axes = (self.num_inputs, num_outputs) if self.transposed else (num_outputs, self.num_inputs)
            yield from self._stored(name, "weight", axes)
            if self.bias:
                yield from self._stored(name, "bias", (num_outputs,))

    def _stored(self, name: str, kind: str, axes: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        if "{}" in name:
            yield from ((f"{name.format(expert)}.{kind}", axes) for expert in range(self.num_experts))
        else:
            yield name if kind == "weight" else f"{name}_bias", (self.num_experts, *axes)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedExperts:
        stored = iter(tensors)

        def of_all(name: str) -> list[StoredTensor]:
            return [next(stored) for _ in range(self.num_experts)] if "{}" in name else _unstacked(next(stored))

        weights, biases = [], []
        for name in self.parts:
            weights.append([self._ordered(t.transposed() if self.transposed else t) for t in of_all(name)])
            if self.bias:
                biases.append([self._ordered(bias) for bias in of_all(name)])
        return ops.pack_experts([*zip(*weights, strict=True)], [*zip(*biases, strict=True)] if biases else None)

    def _ordered(self, tensor: StoredTensor) -> StoredTensor:
        return tensor if self.order is None else tensor.ordered(self.order)


def _unstacked(tensor: StoredTensor) -> list[StoredTensor]:
    return [tensor.part(index, 1).squeezed() for index in range(tensor.shape[0])]


@dataclass(frozen=True, slots=True)
class Heads:
    """A matrix for each head, cut out of a linear layer that is stored as `name.weight`: of every `num_rows` of its
    outputs, which belong to one head, those from `first` on; with its axes exchanged where `transposed`."""

    name: str
    num_heads: int
    num_rows: int
    num_inputs: int
    first: int
    count: int
    transposed: bool = False

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.num_heads * self.num_rows, self.num_inputs)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedHeads:
        (tensor,) = tensors
        cuts = [as_floats(tensor.part(head * self.num_rows + self.first, self.count)) for head in range(self.num_heads)]
        return ops.pack_heads([cut.transposed() if self.transposed else cut for cut in cuts])


@dataclass(frozen=True, slots=True)
class StackedHeads:
    """A matrix for each head, all in one tensor: `name.weight` [heads, outputs, inputs]."""

    name: str
    num_heads: int
    num_outputs: int
    num_inputs: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.num_heads, self.num_outputs, self.num_inputs)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedHeads:
        (tensor,) = tensors
        return ops.pack_heads([as_floats(head) for head in _unstacked(tensor)])


@dataclass(frozen=True, slots=True)
class Vector:
    """The weight of a norm, or another tensor of one axis: `name.weight`, or what `of` says."""

    name: str
    size: int
    of: str = "weight"
    plus: float = 0.0  # Gemma stores its norms less 1
    row: bool = False  # stored with a second axis, as the one row of a matrix

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.{self.of}", (1, self.size) if self.row else (self.size,)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        (tensor,) = tensors
        tensor = tensor.squeezed() if self.row else tensor
        return ops.vector(_plus(tensor, self.plus) if self.plus else tensor)


def _plus(tensor: StoredTensor, number: float) -> StoredTensor:
    return stored_floats(tensor.name, dequantize(tensor).ravel() + np.float32(number))


class Affine(NamedTuple):
    """What a layer norm multiplies with and adds: `ops.layer_norm(x, *norm, eps)`."""

    weight: Any
    bias: Any


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A norm with a weight and a bias, or without one of them, or both."""

    name: str
    size: int
    weight: bool = True
    bias: bool = True
    plus: float = 0.0  # Nemotron stores weights less 1

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for of, stored in (("weight", self.weight), ("bias", self.bias)):
            if stored:
                yield f"{self.name}.{of}", (self.size,)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Affine:
        if self.plus:
            weight, *bias = tensors
            tensors = [_plus(weight, self.plus), *bias]
        vectors = iter([ops.vector(tensor) for tensor in tensors])
        return Affine(next(vectors) if self.weight else None, next(vectors) if self.bias else None)


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorms:
    """A norm for each of several groups of columns, without biases, one after the other.

    A name with `{}` in it, for the number of the group, is the norm of one group. A name without is one tensor of all,
    [groups, columns of a group]."""

    name: str
    num_groups: int
    size: int
    order: NDArray[np.int32] | None = None  # number i of all groups is the stored number order[i]

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        if "{}" in self.name:
            yield from ((f"{self.name.format(group)}.weight", (self.size,)) for group in range(self.num_groups))
        else:
            yield f"{self.name}.weight", (self.num_groups, self.size)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Affine:
        numbers = np.concatenate([dequantize(tensor).ravel() for tensor in tensors])
        numbers = numbers if self.order is None else numbers[self.order]
        return Affine(ops.vector(stored_floats(tensors[0].name, numbers)), None)


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Rows to gather from. `skipped` rows stand before them in the checkpoint: OPT's positions begin at 2."""

    name: str
    num_rows: int
    num_columns: int
    skipped: int = 0

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.skipped + self.num_rows, self.num_columns)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        (tensor,) = tensors
        return ops.table(tensor.part(self.skipped, self.num_rows) if self.skipped else tensor)


class Want(Protocol):
    """All of the above, and what a family makes of its own."""

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The names and shapes of the tensors it is made of."""

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any: ...


Wanted = Mapping[str, Want]  # our name -> what it is made of


def load_weights(
    ops: OpSet, checkpoint: Checkpoint, top: Wanted, layers: Mapping[str, Wanted], unused: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """-> the weights outside the layers, and those of each layer.

    `layers` has for each layer what its names begin with, and what it is made of. Tensors whose whole name matches the
    pattern `unused` may be in the checkpoint and are not read."""
    groups = [("", top), *layers.items()]
    _check(checkpoint, groups, unused)
    loaded = {place: _load(ops, checkpoint, *want) for place, want in _in_order(checkpoint, groups)}
    top_weights, *of_layers = [{ours: loaded[index, ours] for ours in group} for index, (_, group) in enumerate(groups)]
    return top_weights, of_layers


def _in_order(
    checkpoint: Checkpoint, groups: Sequence[tuple[str, Wanted]]
) -> list[tuple[tuple[int, str], tuple[str, Want]]]:
    """What is wanted, by group and name, with what its names begin with: in the order of the files, so that they are
    read from the beginning to the end."""
    places = {name: place for place, name in enumerate(checkpoint.names())}
    wanted = [
        ((index, ours), (prefix, want)) for index, (prefix, group) in enumerate(groups) for ours, want in group.items()
    ]
    return sorted(wanted, key=lambda one: min((places[one[1][0] + name] for name, _ in one[1][1].shapes()), default=0))


def _load(ops: OpSet, checkpoint: Checkpoint, prefix: str, want: Want) -> Any:
    loaded = want.load(ops, [checkpoint.tensor(prefix + name) for name, _ in want.shapes()])
    checkpoint.forget()
    return replace(loaded, layers=want.layers(prefix)) if isinstance(want, Matrix) else loaded


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
