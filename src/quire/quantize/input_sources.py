"""Where the inputs of a matmul come from, as far as dividing them there is exact, and the stream that layers add to."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.ops.tensors import StoredTensor
from quire.quantize.floats import Floats


@dataclass(frozen=True, slots=True)
class InputSource:
    """Inputs can be divided in the weights of a norm, or in the rows of a linear layer that is multiplied with an
    activated gate."""

    vectors: tuple[tuple[str, bytes], ...] = ()  # stored name, and values as the model has them
    rows_of: str | None = None


class InputSources:
    """Follows values through a forward pass. They are only referred to weakly: large ones must not outlive their use.

    Values are arrays of numpy or torch."""

    def __init__(self) -> None:
        self._vectors: dict[int, tuple[Any, str, bytes]] = {}  # by id, which the array keeps
        self.begin()

    def begin(self) -> None:
        """Forget the values of an earlier forward pass."""
        self._sources: dict[str, tuple[Any, InputSource | None]] = {}  # kind of op -> its last output
        self._linear: tuple[Any, str | None] = (None, None)  # the input of gate and up, and the name of up
        self._stream: Any = None

    def add_vector(self, vector: Any, name: str, values: Floats) -> None:
        """A vector of the checkpoint, as the model is loaded."""
        self._vectors[id(vector)] = (vector, name, values.tobytes())

    def came_from_norm(self, out: Any, *vectors: Any) -> None:
        """`vectors`: weight and bias. If one is not the checkpoint's, or serves several heads, there is no source."""
        known = [self._vectors.get(id(vector)) for vector in vectors if len(vector) == out.shape[1]]
        stored = tuple((entry[1], entry[2]) for entry in known if entry is not None)
        source = InputSource(stored) if vectors and len(stored) == len(vectors) else None
        self._sources["norm"] = (weakref.ref(out), source)

    def came_from_linear(self, out: Any, parts: Sequence[StoredTensor]) -> None:
        gated = len(parts) == 2 and parts[0].shape == parts[1].shape and parts[1].row_order is None
        self._linear = (weakref.ref(out), parts[1].name if gated else None)

    def came_from_gate(self, out: Any, gate_up: Any) -> None:
        """`out`: the activated first half of `gate_up`, multiplied with the second."""
        output, name = self._linear
        is_gated = name is not None and output() is gate_up
        self._sources["gate"] = (weakref.ref(out), InputSource(rows_of=name) if is_gated else None)

    def came_from_sum(self, out: Any) -> None:
        """`out`: of an embedding, or of an addition."""
        self._stream = weakref.ref(out)

    @property
    def stream(self) -> Any:
        """The last sum, if it is still in use."""
        return None if self._stream is None else self._stream()

    def of(self, x: Any) -> InputSource | None:
        for output, source in self._sources.values():
            if output() is x:
                return source
        return None
