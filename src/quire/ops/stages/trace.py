"""What each layer of a model has: its weights, and its layers of the KV cache.

`TraceOps` loads nothing and numbers the weights in the order in which they are packed. `TraceForward` runs the model's
forward pass on values that are counted, and have no numbers in them. Its taps tell where a layer begins, and so which
values layers read of those before: `StageForward` counts the same."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import signature
from typing import Any, Literal

from quire.core.errors import Unsupported
from quire.ops.opset import Keep, OpSet
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight, StoredTensor

PRESENT = object()  # stands for vectors and such
COMPRESSED_OPS = ("write_tokens", "pool_group", "write_entry", "top_entries", "compressed_attention")
KV_OPS = (
    "write_kv", "paged_attention", "write_latent", "mla_attention", "write_index_key", "top_positions", *COMPRESSED_OPS
)  # fmt: skip
STATE_OPS = ("causal_conv", "mamba_scan", "mamba2_scan", "delta_rule", "linear_attention", "wkv7")
BEFORE_LAYERS = -1
WeightKind = Literal["matrix", "experts", "heads", "table"]


@dataclass(slots=True)
class LayerTrace:
    """What one layer has: numbers of weights, of layers of the KV cache, of layers with states."""

    weights: set[int] = field(default_factory=set)
    kv: set[int] = field(default_factory=set)
    states: set[int] = field(default_factory=set)


@dataclass(slots=True)
class ValueTrace:
    """Where a value is made, and where it is read last: indices of layers."""

    made: int
    last_read: int = BEFORE_LAYERS


@dataclass(frozen=True, slots=True, eq=False)
class TracedValue:
    number: int


@dataclass(slots=True)
class ModelTrace:
    sizes: list[int] = field(default_factory=list)  # of each weight: its numbers; 0 for tables, which are looked up
    layers: dict[int, LayerTrace] = field(default_factory=dict)  # by index; what comes before and after has its own
    kinds: list[WeightKind] = field(default_factory=list)  # of each weight
    values: list[ValueTrace] = field(default_factory=list)
    columns: dict[int, int] = field(default_factory=dict)  # of values that stages hand on beside others

    def add(self, size: int, kind: WeightKind) -> int:
        """-> the number of the weight"""
        self.sizes.append(size)
        self.kinds.append(kind)
        return len(self.sizes) - 1

    def carried(self, layer: int) -> list[int]:
        """The values made before a layer that it reads, or one behind it."""
        return [number for number, value in enumerate(self.values) if value.made < layer <= value.last_read]

    def own_numbers(self, kind: WeightKind, weights: Set[int]) -> list[int]:
        """Which of the weights of a kind, counted by themselves, are among `weights`."""
        of_kind = [number for number, other in enumerate(self.kinds) if other == kind]
        return [place for place, number in enumerate(of_kind) if number in weights]


@dataclass(frozen=True, slots=True)
class TracedTable:
    packed: int  # its number


class TraceOps:
    """The part of `OpSet` that is called when a model is loaded."""

    def __init__(self) -> None:
        self.trace = ModelTrace()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Vectors and such belong to all stages: they are small."""
        return lambda *args, **named: PRESENT

    def pack(
        self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None, keep: Keep = Keep.NOTHING
    ) -> PackedWeight:
        absent = absent_weight(parts)
        return PackedWeight(
            absent.num_outputs, absent.num_inputs, 0, self.trace.add(absent.num_outputs * absent.num_inputs, "matrix")
        )

    def pack_experts(
        self, experts: Sequence[Sequence[StoredTensor]], biases: Sequence[Sequence[StoredTensor]] | None = None
    ) -> PackedExperts:
        w = absent_experts(experts)
        number = self.trace.add(w.num_experts * w.num_outputs * w.num_inputs, "experts")
        return PackedExperts(w.num_experts, w.num_outputs, w.num_inputs, 0, number)

    def pack_heads(self, heads: Sequence[StoredTensor]) -> PackedHeads:
        w = absent_heads(heads)
        number = self.trace.add(w.num_heads * w.num_outputs * w.num_inputs, "heads")
        return PackedHeads(w.num_heads, w.num_outputs, w.num_inputs, 0, number)

    def table(self, tensor: StoredTensor) -> TracedTable:
        return TracedTable(self.trace.add(0, "table"))


def absent_weight(parts: Sequence[StoredTensor]) -> PackedWeight:
    return PackedWeight(sum(part.num_rows for part in parts), parts[0].num_columns, 0, None)


def absent_experts(experts: Sequence[Sequence[StoredTensor]]) -> PackedExperts:
    return PackedExperts(len(experts), sum(part.num_rows for part in experts[0]), experts[0][0].num_columns, 0, None)


def absent_heads(heads: Sequence[StoredTensor]) -> PackedHeads:
    num_outputs, num_inputs = heads[0].shape
    return PackedHeads(len(heads), num_outputs, num_inputs, 0, None)


class TraceForward:
    """The ops of a forward pass: each notes what it is given."""

    def __init__(self, trace: ModelTrace) -> None:
        self._trace = trace
        self._enter(BEFORE_LAYERS)

    def _enter(self, index: int) -> None:
        self._index = index
        self._layer = self._trace.layers.setdefault(index, LayerTrace())

    def _new(self) -> TracedValue:
        self._trace.values.append(ValueTrace(self._index))
        return TracedValue(len(self._trace.values) - 1)

    def _read(self, given: Any) -> None:
        if isinstance(given, TracedValue):
            self._trace.values[given.number].last_read = self._index
        elif isinstance(given, list | tuple):
            for one in given:
                self._read(one)

    def tap(self, x: Any, index: int) -> None:
        self._enter(index)

    def rope_angles(self, positions: Any, frequencies: Any, group: int = 1) -> object:
        """Every stage computes them: they are none of the values that it gets."""
        return PRESENT

    def split(self, x: Any, sizes: Sequence[int]) -> tuple[Any, ...]:
        self._read(x)
        return tuple(self._new() for _ in sizes)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._note, name)

    def _note(self, name: str, *args: Any, **named: Any) -> Any:
        for given in (*args, *named.values()):
            self._read(given)
            if isinstance(given, PackedWeight | PackedExperts | PackedHeads | TracedTable):
                self._layer.weights.add(given.packed)
        if (place := layer_argument(name)) is not None:
            (self._layer.states if name in STATE_OPS else self._layer.kv).add(args[place])
        return self._new()


class ColumnsForward:
    """Counts values as `TraceForward` does, and notes how many columns they have. `ops`: record, and compute
    nothing."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.columns: dict[int, int] = {}  # by number
        self._num_values = 0

    def rope_angles(self, positions: Any, frequencies: Any, group: int = 1) -> Any:
        return self._ops.rope_angles(positions, frequencies, group)

    def tap(self, x: Any, index: int) -> None: ...

    def split(self, x: Any, sizes: Sequence[int]) -> tuple[Any, ...]:
        return tuple(self._note(part) for part in self._ops.split(x, sizes))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(self._ops, name)
        return lambda *args, **named: self._note(op(*args, **named))

    def _note(self, value: Any) -> Any:
        if hasattr(value, "columns"):  # most ops give a value; writing keys gives none
            self.columns[self._num_values] = value.columns
        self._num_values += 1
        return value


@cache
def layer_argument(name: str) -> int | None:
    """Where an op is told the number of its layer in the cache; None: it is not."""
    names = list(signature(getattr(OpSet, name)).parameters)[1:]
    if "layer" not in names:
        return None
    if name not in (*KV_OPS, *STATE_OPS):
        raise Unsupported(f"layers with `{name}` are not divided into stages", "leave out pipeline_parallel_size")
    return names.index("layer")
