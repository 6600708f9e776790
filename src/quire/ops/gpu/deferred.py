"""Deferred values: an op of a forward pass is computed when the op that takes its result is known.

A sum is added by the norm that follows it; a norm writes rows, plain or quantized, as the GEMM after it wants them; q
and k are rotated by the kernel that writes K and V. So neighbouring ops become one kernel, and no model knows."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from quire.ops.gpu.head_norm import norm_heads
from quire.ops.gpu.linear.heads import linear_heads
from quire.ops.gpu.linear.norm_gemv import can_norm_gemv, norm_gemv
from quire.ops.gpu.linear.quantize_rows import QuantizedRows
from quire.ops.opset import Activation
from quire.ops.reference.rope import rotate_heads


@dataclass(slots=True, eq=False)
class DeferredSum:
    """x + y: the residual stream and what a layer adds to it."""

    x: "Tensor | DeferredSum"
    y: Tensor
    total: Tensor | None = None  # once it is computed

    def tensor(self) -> Tensor:
        if self.total is None:
            self.total = materialize(self.x) + self.y
        return self.total

    @property
    def columns(self) -> int:
        return int(self.y.shape[1])


@dataclass(slots=True, eq=False)
class DeferredRows:
    """The input of linear layers: plain rows or quantized ones, whichever they take."""

    num_rows: int
    compute: Callable[[], Tensor]
    compute_quantized: Callable[[torch.dtype, int], QuantizedRows]
    _plain: Tensor | None = None
    _quantized: dict[tuple[torch.dtype, int], QuantizedRows] = field(default_factory=dict)

    def tensor(self) -> Tensor:
        if self._plain is None:
            self._plain = self.compute()
        return self._plain

    def quantized(self, dtype: torch.dtype, group: int) -> QuantizedRows:
        if (dtype, group) not in self._quantized:
            self._quantized[dtype, group] = self.compute_quantized(dtype, group)
        return self._quantized[dtype, group]

    @property
    def columns(self) -> int:
        return int(self.tensor().shape[1])


@dataclass(slots=True, eq=False, kw_only=True)
class NormedRows(DeferredRows):
    """An RMS norm, which a matmul of few rows may do on the way."""

    x: Tensor | DeferredSum
    weight: Tensor
    eps: float

    def linear(self, w: Tensor, bias: Tensor | None, all_outputs: int, overlap: bool) -> Tensor | None:
        """The norm and the matmul behind it as one kernel; None: they are two. `all_outputs` as in `linear`."""
        if self._plain is not None:
            return None
        pending = isinstance(self.x, DeferredSum) and self.x.total is None
        rows = self.x.y if pending else materialize(self.x)
        if not can_norm_gemv(rows, w, all_outputs):
            return None
        residual = materialize(self.x.x) if pending else None
        y, self._plain, total = norm_gemv(rows, residual, self.weight, self.eps, w, bias, overlap)
        if isinstance(self.x, DeferredSum):
            self.x.total = total
        return y


@dataclass(slots=True, eq=False, kw_only=True)
class ActivatedRows(DeferredRows):
    """An activation of `source`, which a multiplication may do on the way."""

    source: Tensor
    kind: Activation


@dataclass(slots=True, eq=False)
class DeferredConv:
    """A causal convolution, which an activation behind it becomes a part of. It writes states: it runs once."""

    num_rows: int
    compute: Callable[[Activation | None], Tensor]
    _result: Tensor | None = None

    def tensor(self) -> Tensor:
        if self._result is None:
            self._result = self.compute(None)
        return self._result

    def activated(self, kind: Activation) -> Tensor:
        assert self._result is None, "a convolution is activated before it is used"
        self._result = self.compute(kind)
        return self._result


@dataclass(frozen=True, slots=True, eq=False)
class DeferredDecay:
    """exp(log): what a token leaves of a state. Its kernels want the logarithm, in fp32."""

    log: Tensor
    dtype: torch.dtype  # of the activations, which other ops take it in

    def tensor(self) -> Tensor:
        return self.log.exp().to(self.dtype)

    @property
    def columns(self) -> int:
        return int(self.log.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """Every head is divided by its root mean square, and multiplied with `weight` [head_dim]."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class ColumnSlice:
    """Neighbouring columns of a projection: q, k or v. First `norm` and then `angles` are still to be applied to every
    head, by the kernel that writes K and V; where there is none, by kernels of their own."""

    whole: Tensor  # [T, columns]
    first: int
    size: int
    norm: HeadNorm | None = None
    angles: Tensor | None = None
    head_dim: int = 0  # where there are angles

    def tensor(self) -> Tensor:
        heads = self.stored()
        if self.norm is not None:
            heads = norm_heads(heads, self.norm.weight, self.norm.eps, len(self.norm.weight))
        if self.angles is None:
            return heads
        return rotate_heads(heads.unflatten(1, (-1, self.head_dim)), self.angles).flatten(1)

    def stored(self) -> Tensor:
        """The columns as the projection leaves them."""
        return self.whole[:, self.first : self.first + self.size]

    @property
    def columns(self) -> int:
        return self.size


@dataclass(frozen=True, slots=True, eq=False)
class DeferredHeadLinear:
    """Every head of x [T, heads * inputs] times its matrix of w [heads, outputs, inputs], written where it is
    wanted."""

    x: Tensor
    w: Tensor
    batch_invariant: bool

    def tensor(self) -> Tensor:
        out = self.x.new_empty(len(self.x), *self.w.shape[:2])
        self.write(out)
        return out.flatten(1)

    @property
    def columns(self) -> int:
        return int(self.w.shape[0] * self.w.shape[1])

    def write(self, out: Tensor) -> None:
        """out [T, heads, outputs]"""
        heads = self.x.unflatten(1, (len(self.w), -1))
        linear_heads(heads, self.w, out, batch_invariant=self.batch_invariant)


GpuValue: TypeAlias = Tensor | DeferredSum | DeferredRows | ColumnSlice | DeferredConv | DeferredDecay


def materialize(x: GpuValue | DeferredHeadLinear) -> Tensor:
    return x if isinstance(x, Tensor) else x.tensor()


def as_columns(x: GpuValue) -> ColumnSlice:
    if isinstance(x, ColumnSlice):
        return x
    whole = materialize(x)
    return ColumnSlice(whole, 0, whole.shape[1])


def num_rows_of(x: GpuValue) -> int:
    match x:
        case DeferredRows() | DeferredConv():
            return x.num_rows
        case DeferredDecay():
            return len(x.log)
        case DeferredSum():
            return len(x.y)
        case ColumnSlice():
            return len(x.whole)
    return len(x)
