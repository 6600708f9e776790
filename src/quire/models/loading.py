"""From the tensors of a checkpoint to the weights of a model, by a table.

A model file lists the weights it needs as tensor specs: a name of its own -> `Linear`, `Vector`, `LayerNorm`,
`EmbeddingTable`, ..., each of which says which stored tensors it is made of, and their shapes. `load_weights` compares
the table with the checkpoint and reports every missing, unknown or misshapen tensor before it reads one. Then it packs
weight by weight, so that no more than one matrix is in memory twice."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
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

MAX_TENSORS = 1 << 20
MAX_LISTED = 8  # names spelled out in an error


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A forward pass bound to its weights, ready for `OpSet.compile`."""

    config: ModelConfig
    forward: Callable[[OpSet, Any], Value]  # (ops, batch) -> logits
    weights: Sequence[Mapping[str, Any]]  # as `load_weights` returns them: those outside the layers, then each layer's
    # Of an encoder-decoder: (ops, batch) writes the cross-attention keys and values of sources to the cache.
    encode: Callable[[OpSet, Any], Value] | None = None

    @property
    def weight_bytes(self) -> int:
        return packed_bytes(self.weights)

    def weight(self, name: str) -> Any:
        """One outside the layers, such as `embed` or `head`."""
        return next(group[name] for group in self.weights if name in group)

    @property
    def linears(self) -> list[PackedWeight]:
        """The matrices of all linear layers but the head."""
        named = [item for group in self.weights for item in group.items()]
        return [w for name, w in named if isinstance(w, PackedWeight) and name != "head"]


def packed_bytes(weights: Sequence[Mapping[str, Any]]) -> int:
    """The bytes of the packed matrices. Embedding tables stay in the file."""
    packed = PackedWeight | PackedExperts | PackedHeads
    return sum(w.nbytes for group in weights for w in group.values() if isinstance(w, packed))


class TensorSpec(Protocol):
    """One weight of a model: the stored tensors it is made of, and how. A model file may define its own."""

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every stored tensor."""

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        """The weight. `tensors` are those of `shapes()`, in its order."""


TensorSpecs = Mapping[str, TensorSpec]  # a field of the model's layer or weights class -> its spec


@dataclass(frozen=True, slots=True, eq=False)
class LinearPart:
    """One stored linear layer of a `Linear`, where not all its outputs are taken as they are."""

    num_outputs: int
    order: NDArray[np.int32] | None = None  # output i is the stored output order[i], in the weight and in the bias
    already_ordered: bool = False  # `order` is that of the published model; this checkpoint has undone it
    num_stored: int | None = None  # outputs in the checkpoint, where not all are taken
    bias: bool | None = None  # whether it is stored; None: as in the other parts. A part without one adds 0


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layers that share their input, stacked to one matrix: name -> number of outputs (q, k and v; gate and up).

    A layer is stored as `name.weight` [outputs, inputs] ([inputs, outputs] where `transposed`) and `name.bias`."""

    parts: Mapping[str, int | LinearPart]
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
        """The stacked layers under the names, and with the outputs, that they have in the published model."""
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
            order = None if part.already_ordered else part.order
            weights.append(weight if order is None else weight.ordered(order))
            biases.append(bias if order is None else bias.ordered(order))
        has_bias = any(self._has_bias(part) for _, part in self._parts())
        return ops.pack(weights, biases if has_bias else None, keep=self.keep)

    def _parts(self) -> list[tuple[str, LinearPart]]:
        return [(name, part if isinstance(part, LinearPart) else LinearPart(part)) for name, part in self.parts.items()]

    def _has_bias(self, part: LinearPart) -> bool:
        return self.bias if part.bias is None else part.bias


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLinear:
    """A `Linear` for each expert: name -> number of outputs.

    A name with `{}` in it, for the expert's number, is the linear layer of one expert, stored as `name.weight` and
    `name.bias`. A name without `{}` is one tensor of all experts: [experts, outputs, inputs], or [experts, inputs,
    outputs] where `transposed`. Its biases are `name_bias` [experts, outputs]."""

    parts: Mapping[str, int]
    num_inputs: int
    num_experts: int
    transposed: bool = False
    bias: bool = False
    order: NDArray[np.int32] | None = None  # output i of each part is its stored output order[i]

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

        def of_all_experts(name: str) -> list[StoredTensor]:
            return [next(stored) for _ in range(self.num_experts)] if "{}" in name else _unstacked(next(stored))

        weights, biases = [], []
        for name in self.parts:
            weights.append([self._ordered(t.transposed() if self.transposed else t) for t in of_all_experts(name)])
            if self.bias:
                biases.append([self._ordered(bias) for bias in of_all_experts(name)])
        return ops.pack_experts([*zip(*weights, strict=True)], [*zip(*biases, strict=True)] if biases else None)

    def _ordered(self, tensor: StoredTensor) -> StoredTensor:
        return tensor if self.order is None else tensor.ordered(self.order)


def _unstacked(tensor: StoredTensor) -> list[StoredTensor]:
    return [tensor.part(index, 1).squeezed() for index in range(tensor.shape[0])]


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """A matrix for each head, cut out of the linear layer `name.weight`.

    Every `num_rows` outputs belong to one head. `count` of them are taken, from `first` on. Where `transposed`, the
    matrix is [inputs, outputs]."""

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
class StackedHeadLinear:
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


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """The weight of an RMS norm, or another tensor of one axis, stored as `name.suffix`."""

    name: str
    size: int
    suffix: str = "weight"
    offset: float = 0.0  # added to what is stored: Gemma's norms are stored less 1
    stored_as_row: bool = False  # [1, size]
    order: NDArray[np.int32] | None = None  # number i is the stored number order[i]

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.{self.suffix}", (1, self.size) if self.stored_as_row else (self.size,)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        (tensor,) = tensors
        tensor = tensor.squeezed() if self.stored_as_row else tensor
        tensor = tensor if self.order is None else tensor.ordered(self.order)
        return ops.vector(_with_offset(tensor, self.offset) if self.offset else tensor)


def _with_offset(tensor: StoredTensor, offset: float) -> StoredTensor:
    return stored_floats(tensor.name, dequantize(tensor).ravel() + np.float32(offset))


class Affine(NamedTuple):
    """The weights of a layer norm, each a vector or None: `ops.layer_norm(x, *norm, eps)`."""

    weight: Any
    bias: Any


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A layer norm: `name.weight` and `name.bias`, either of which a family may not have."""

    name: str
    size: int
    weight: bool = True
    bias: bool = True
    offset: float = 0.0  # added to the stored weight: Nemotron stores it less 1

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for suffix, stored in (("weight", self.weight), ("bias", self.bias)):
            if stored:
                yield f"{self.name}.{suffix}", (self.size,)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Affine:
        if self.offset:
            weight, *bias = tensors
            tensors = [_with_offset(weight, self.offset), *bias]
        vectors = iter([ops.vector(tensor) for tensor in tensors])
        return Affine(next(vectors) if self.weight else None, next(vectors) if self.bias else None)


@dataclass(frozen=True, slots=True, eq=False)
class HeadLayerNorms:
    """A layer norm without a bias for each head.

    A name with `{}` in it, for the number of the head, is the norm of one head. A name without `{}` is one tensor of
    all heads, [heads, size]."""

    name: str
    num_heads: int
    size: int  # columns of a head
    order: NDArray[np.int32] | None = None  # weight i of all heads is the stored weight order[i]

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        if "{}" in self.name:
            yield from ((f"{self.name.format(head)}.weight", (self.size,)) for head in range(self.num_heads))
        else:
            yield f"{self.name}.weight", (self.num_heads, self.size)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Affine:
        weights = np.concatenate([dequantize(tensor).ravel() for tensor in tensors])
        weights = weights if self.order is None else weights[self.order]
        return Affine(ops.vector(stored_floats(tensors[0].name, weights)), None)


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """Rows to look up, of tokens or of positions: `name.weight` [skip_rows + num_rows, num_columns]."""

    name: str
    num_rows: int
    num_columns: int
    skip_rows: int = 0  # before the first: OPT's positions begin at row 2

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.skip_rows + self.num_rows, self.num_columns)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        (tensor,) = tensors
        return ops.table(tensor.part(self.skip_rows, self.num_rows) if self.skip_rows else tensor)


def load_weights(
    ops: OpSet, checkpoint: Checkpoint, top: TensorSpecs, layers: Mapping[str, TensorSpecs], unused: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """-> the weights outside the layers, and those of each layer, under the keys of their specs.

    `layers` has, for each layer, the prefix of its tensor names and its specs. Tensors whose whole name matches the
    pattern `unused` may be in the checkpoint and are not read."""
    groups = [("", top), *layers.items()]
    _check(checkpoint, groups, unused)
    loaded = {key: _load(ops, checkpoint, prefix, spec) for key, prefix, spec in _in_file_order(checkpoint, groups)}
    top_weights, *of_layers = [{ours: loaded[index, ours] for ours in group} for index, (_, group) in enumerate(groups)]
    return top_weights, of_layers


def _in_file_order(
    checkpoint: Checkpoint, groups: Sequence[tuple[str, TensorSpecs]]
) -> list[tuple[tuple[int, str], str, TensorSpec]]:
    """((group, our name), prefix, spec) of every weight, such that files are read from the beginning to the end."""
    file_order = {name: index for index, name in enumerate(checkpoint.names())}
    specs = [
        ((index, ours), prefix, spec) for index, (prefix, group) in enumerate(groups) for ours, spec in group.items()
    ]

    def first_tensor(one: tuple[tuple[int, str], str, TensorSpec]) -> int:
        _, prefix, spec = one
        return min((file_order[prefix + name] for name, _ in spec.shapes()), default=0)

    return sorted(specs, key=first_tensor)


def _load(ops: OpSet, checkpoint: Checkpoint, prefix: str, spec: TensorSpec) -> Any:
    loaded = spec.load(ops, [checkpoint.tensor(prefix + name) for name, _ in spec.shapes()])
    checkpoint.drop_pages()
    return replace(loaded, layers=spec.layers(prefix)) if isinstance(spec, Linear) else loaded


def _check(checkpoint: Checkpoint, groups: Iterable[tuple[str, TensorSpecs]], unused: str) -> None:
    shapes = (
        (prefix + name, shape) for prefix, group in groups for spec in group.values() for name, shape in spec.shapes()
    )
    expected = dict(islice(shapes, MAX_TENSORS + 1))
    if len(expected) > MAX_TENSORS:
        raise BadCheckpoint(
            f"config.json describes more than {MAX_TENSORS} tensors, and the checkpoint has {len(checkpoint.names())}",
            "look at its numbers of layers and of experts",
        )
    if isinstance(checkpoint, DummyCheckpoint):
        checkpoint.shapes = expected
    stored = set(checkpoint.names())
    problems = []
    if missing := [name for name in expected if name not in stored]:
        problems.append(f"{_count(missing)} missing: {_listed(missing)}")
    if left_over := sorted(name for name in stored - expected.keys() if not re.fullmatch(unused, name)):
        problems.append(f"{_count(left_over)} unknown: {_listed(left_over)}")
    stored_shapes = ((name, checkpoint.shape(name), shape) for name, shape in expected.items() if name in stored)
    if misshapen := [
        f"{name} is {[*actual]} and not {[*shape]}" for name, actual, shape in stored_shapes if actual != shape
    ]:
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
