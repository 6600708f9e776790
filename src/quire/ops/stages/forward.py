"""The ops of a forward pass, as one stage computes them.

A model's forward pass runs unchanged. Before its own layers and after them, a stage computes nothing: values are
absent. At the tap of its first layer the rows of the stage before it take the place of absent values: the hidden
states, and other values that layers from there on read. At the tap behind its last layer such rows are kept for the
stage after it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.ops.opset import Value
from quire.ops.stages.parts import StagePart
from quire.ops.stages.trace import STATE_OPS, layer_argument

ABSENT = object()


@dataclass(slots=True, eq=False)
class StageValue:
    number: int | None  # as in the trace; None: every stage computes it
    local: Value = ABSENT


class StageForward:
    """The ops of `OpSet` that forward passes call. `ops`: the backend's."""

    def __init__(self, ops: Any, part: StagePart, batch: Any) -> None:
        self._ops, self._part, self._batch = ops, part, batch
        self._is_own = part.first == 0
        self._last: Value = ABSENT  # what the next stage reads
        self._num_values = 0
        self._carried: dict[int, StageValue] = {}  # by number: those that go from a stage to another
        self._wanted = {value.number for value in (*part.received, *part.handed_on)}
        self._numbers = {
            kind: {number: own for own, number in enumerate(numbers)}
            for kind, numbers in (("kv", part.kv_layers), ("states", part.state_layers))
        }

    def tap(self, x: StageValue, index: int) -> None:
        if index == self._part.first and index > 0:
            assert x.number in self._carried, "the forward pass that was traced has other ops"
            self._is_own = True
            self._receive()
        if index == self._part.end and not self._part.is_last:
            assert x.number in self._carried, "the forward pass that was traced has other ops"
            self._hand_on()
            self._is_own = False

    def _receive(self) -> None:
        rows, sizes = self._ops.hidden_states(self._batch), [value.columns for value in self._part.received]
        parts = [rows] if len(sizes) == 1 else self._ops.split(rows, sizes)
        for value, part in zip(self._part.received, parts, strict=True):
            self._carried[value.number].local = part

    def _hand_on(self) -> None:
        parts = [_local(self._carried[value.number]) for value in self._part.handed_on]
        self._last = parts[0] if len(parts) == 1 else self._ops.concat(parts)
        self._ops.keep(self._last, self._batch)

    def _new(self, local: Value = ABSENT) -> StageValue:
        value = StageValue(self._num_values, local)
        self._num_values += 1
        return self._note(value)

    def _note(self, value: StageValue) -> StageValue:
        if value.number in self._wanted:
            self._carried[value.number] = value
        return value

    def rope_angles(self, positions: Any, frequencies: Any, group: int = 1) -> StageValue:
        """Once a step, before all layers: every stage needs them."""
        return StageValue(None, self._ops.rope_angles(positions, frequencies, group))

    def split(self, x: StageValue, sizes: Sequence[int]) -> tuple[StageValue, ...]:
        if not self._is_own:
            return tuple(self._new() for _ in sizes)
        return tuple(self._new(part) for part in self._ops.split(_local(x), sizes))

    def adapt(self, y: StageValue, x: StageValue, slots: Any, batch: Any) -> StageValue:
        """In the place of y: the trace has no adapters."""
        local = self._ops.adapt(_local(y), _local(x), slots.bind(), batch) if self._is_own else ABSENT
        return self._note(StageValue(y.number, local))

    def logits(self, x: StageValue, head: Any, batch: Any, softcap: float = 0.0, vocabulary: Any = None) -> Value:
        """Stages before the last end in hidden states, and no row of them is asked for here."""
        if not self._is_own:
            return self._ops.rows(self._last, batch)
        return self._ops.logits(_local(x), head, batch, softcap, vocabulary)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._compute, name)

    def _compute(self, name: str, *args: Any, **named: Any) -> StageValue:
        if not self._is_own:
            return self._new()
        given = [_local(one) for one in args]
        if (place := layer_argument(name)) is not None:
            given[place] = self._numbers["states" if name in STATE_OPS else "kv"][given[place]]
        return self._new(getattr(self._ops, name)(*given, **{key: _local(one) for key, one in named.items()}))


class BindingOps:
    """Compute nothing: for a pass that only tells which layers are a stage's."""

    def split(self, x: Any, sizes: Sequence[int]) -> tuple[Any, ...]:
        return (None,) * len(sizes)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given, **named: None


def _local(given: Any) -> Any:
    if isinstance(given, StageValue):
        assert given.local is not ABSENT, f"the trace does not know that value {given.number} is read here"
        return given.local
    return [_local(one) for one in given] if isinstance(given, list | tuple) else given
