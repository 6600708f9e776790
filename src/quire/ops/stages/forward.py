"""The ops of a forward pass, as one stage computes them.

A model's forward pass runs unchanged. Before its own layers and after them, a stage computes nothing: values are
absent. At the tap of its first layer the hidden states of the stage before it take the place of an absent value, and
at the tap behind its last layer they are kept for the stage after it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.core.errors import Unsupported
from quire.ops.opset import Value
from quire.ops.stages.parts import StagePart
from quire.ops.stages.trace import STATE_OPS, layer_argument

ABSENT = object()


@dataclass(slots=True, eq=False)
class StageValue:
    local: Value = ABSENT


class StageForward:
    """The ops of `OpSet` that forward passes call. `ops`: the backend's."""

    def __init__(self, ops: Any, part: StagePart, batch: Any) -> None:
        self._ops, self._part, self._batch = ops, part, batch
        self._is_own = part.first == 0
        self._last: Value = ABSENT  # what the next stage reads
        self._numbers = {
            kind: {number: own for own, number in enumerate(numbers)}
            for kind, numbers in (("kv", part.kv_layers), ("states", part.state_layers))
        }

    def tap(self, x: StageValue, index: int) -> None:
        if index == self._part.first and index > 0:
            self._is_own = True
            x.local = self._ops.hidden_states(self._batch)
        if index == self._part.end and not self._part.is_last:
            self._last = x.local
            self._ops.keep(self._last, self._batch)
            self._is_own = False

    def rope_angles(self, positions: Any, frequencies: Any) -> StageValue:
        """Once a step, before all layers: every stage needs them."""
        return StageValue(self._ops.rope_angles(positions, frequencies))

    def split(self, x: StageValue, sizes: Sequence[int]) -> tuple[StageValue, ...]:
        if not self._is_own:
            return tuple(StageValue() for _ in sizes)
        return tuple(StageValue(part) for part in self._ops.split(_local(x), sizes))

    def adapt(self, y: StageValue, x: StageValue, slots: Any, batch: Any) -> StageValue:
        if not self._is_own:
            return StageValue()
        return StageValue(self._ops.adapt(_local(y), _local(x), slots.bind(), batch))

    def logits(self, x: StageValue, head: Any, batch: Any, softcap: float = 0.0, vocabulary: Any = None) -> Value:
        """Stages before the last end in hidden states, and no row of them is asked for here."""
        if not self._is_own:
            return self._ops.rows(self._last, batch)
        return self._ops.logits(_local(x), head, batch, softcap, vocabulary)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._compute, name)

    def _compute(self, name: str, *args: Any, **named: Any) -> StageValue:
        if not self._is_own:
            return StageValue()
        given = [_local(one) for one in args]
        if (place := layer_argument(name)) is not None:
            given[place] = self._numbers["states" if name in STATE_OPS else "kv"][given[place]]
        return StageValue(getattr(self._ops, name)(*given, **{key: _local(one) for key, one in named.items()}))


class BindingOps:
    """Compute nothing: for a pass that only tells which layers are a stage's."""

    def split(self, x: Any, sizes: Sequence[int]) -> tuple[Any, ...]:
        return (None,) * len(sizes)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given, **named: None


def _local(given: Any) -> Any:
    if isinstance(given, StageValue):
        if given.local is ABSENT:
            raise Unsupported(
                "a layer of this model reads values of layers before the one before it",
                "leave out pipeline_parallel_size",
            )
        return given.local
    return [_local(one) for one in given] if isinstance(given, list | tuple) else given
