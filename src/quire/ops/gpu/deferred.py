"""Values that wait: what a forward pass asks for is computed when it is known what for.

A sum is added by the norm that follows it, a norm gives rows or codes as the product after it wants, q and k are turned
while K and V are written. So neighbouring ops become one kernel, and no model knows."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.ops.gpu.linear.heads import linear_heads
from quire.ops.gpu.linear.quantize_rows import Quantized


@dataclass(slots=True, eq=False)
class Sum:
    """x + y: the residual stream and what a layer adds to it."""

    x: "Tensor | Sum"
    y: Tensor
    total: Tensor | None = None

    def tensor(self) -> Tensor:
        if self.total is None:
            self.total = tensor_of(self.x) + self.y
        return self.total


@dataclass(slots=True, eq=False)
class Rows:
    """The input of products: as rows, or as codes with scales, whichever they take."""

    num_rows: int
    plain: Callable[[], Tensor]
    quantized: Callable[[torch.dtype, int], Quantized]
    _plain: Tensor | None = None
    _codes: dict[tuple[torch.dtype, int], Quantized] = field(default_factory=dict)

    def tensor(self) -> Tensor:
        if self._plain is None:
            self._plain = self.plain()
        return self._plain

    def codes(self, dtype: torch.dtype, group: int) -> Quantized:
        if (dtype, group) not in self._codes:
            self._codes[dtype, group] = self.quantized(dtype, group)
        return self._codes[dtype, group]


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """Every head is divided by its root mean square, and multiplied with `weight` [head_dim]."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Neighbouring columns of a whole: q, k or v. `norm` and then `angles`: what is still to be done to every head of
    them, where K and V are written."""

    whole: Tensor  # [T, columns]
    first: int
    size: int
    norm: HeadNorm | None = None
    angles: Tensor | None = None

    def tensor(self) -> Tensor:
        assert self.norm is None and self.angles is None, "heads are normed and turned where K and V are written"
        return self.stored()

    def stored(self) -> Tensor:
        """As they are in the whole, with nothing done to them."""
        return self.whole[:, self.first : self.first + self.size]


@dataclass(frozen=True, slots=True, eq=False)
class HeadProducts:
    """Every head of x [T, heads * inputs] times its matrix of w [heads, outputs, inputs], to be written where it is
    wanted."""

    x: Tensor
    w: Tensor
    batch_invariant: bool

    def tensor(self) -> Tensor:
        out = self.x.new_empty(len(self.x), *self.w.shape[:2])
        self.write(out)
        return out.flatten(1)

    def write(self, out: Tensor) -> None:
        """out [T, heads, outputs]"""
        heads = self.x.unflatten(1, (len(self.w), -1))
        linear_heads(heads, self.w, out, batch_invariant=self.batch_invariant)


def tensor_of(x: "Tensor | Sum | Rows | Columns | HeadProducts") -> Tensor:
    return x if isinstance(x, Tensor) else x.tensor()


def columns_of(x: "Tensor | Rows | Columns") -> Columns:
    if isinstance(x, Columns):
        return x
    whole = tensor_of(x)
    return Columns(whole, 0, whole.shape[1])


def num_rows_of(x: "Tensor | Sum | Rows | Columns") -> int:
    match x:
        case Rows():
            return x.num_rows
        case Sum():
            return len(x.y)
        case Columns():
            return len(x.whole)
    return len(x)
