"""The ops of the op set that read and leave states, on a GPU."""

from functools import partial

import torch
from torch import Tensor

from quire.ops.gpu.batch import GpuBatch
from quire.ops.gpu.deferred import ActivatedRows, ColumnSlice, DeferredConv, DeferredDecay, GpuValue, materialize
from quire.ops.gpu.head_norm import norm_heads
from quire.ops.gpu.pointwise import gate_rows
from quire.ops.gpu.states.causal_conv import causal_conv
from quire.ops.gpu.states.functions import log_bounded_decay, log_decay
from quire.ops.gpu.states.linear_attention import Decays, Gates, attend_tokens
from quire.ops.gpu.states.mamba import mamba_scan
from quire.ops.gpu.states.rwkv import wkv7
from quire.ops.gpu.states.segments import DeviceSegments
from quire.ops.gpu.states.tiles import attend_tiles, takes_tiles
from quire.ops.gpu.weights import load_floats
from quire.ops.opset import Mamba2Weights, MambaWeights, Wkv7Weights
from quire.ops.reference.states import TorchStates
from quire.ops.tensors import StoredTensor


class StateOps:
    """`OpSet` describes the ops."""

    device: torch.device
    dtype: torch.dtype
    batch_invariant: bool

    def conv_weight(self, tensor: StoredTensor) -> Tensor:
        """[taps, channels]"""
        weight = load_floats(tensor, torch.float32, self.device)
        return weight.view(len(weight), -1).T.contiguous()

    def mul(self, x: GpuValue, y: GpuValue) -> Tensor:
        """A gate is activated on the way, and a norm of heads before it is taken on the way, too."""
        if isinstance(x, ActivatedRows):
            x, y = y, x
        if not isinstance(y, ActivatedRows):
            return materialize(x) * materialize(y)
        if isinstance(x, ColumnSlice) and x.norm is not None and x.angles is None:
            weight, eps = x.norm.weight, x.norm.eps
            return norm_heads(x.stored(), weight, eps, len(weight), y.source, y.kind)
        return gate_rows(materialize(x), y.source, y.kind)

    def causal_conv(
        self, x: GpuValue, weight: Tensor, bias: Tensor | None, batch: GpuBatch, layer: int, first: int = 0
    ) -> DeferredConv:
        rows, segments = materialize(x), _segments(batch)
        slots = batch.cache.states[layer] if batch.cache.slots is None else batch.cache.slots.conv[layer]
        own = slots[:, :, first : first + rows.shape[1]]  # a layer may have several convolutions
        return DeferredConv(len(rows), partial(causal_conv, rows, weight, bias, own, segments))

    def wkv7(
        self,
        r: GpuValue,
        w: GpuValue,
        k: GpuValue,
        v: GpuValue,
        a: GpuValue,
        weights: Wkv7Weights,
        batch: GpuBatch,
        layer: int,
    ) -> Tensor:
        r, w, k, v, a = (materialize(x) for x in (r, w, k, v, a))
        return wkv7(r, w, k, v, a, weights, _states(batch).recurrent[layer], _segments(batch))

    def decay(self, x: GpuValue, bias: Tensor, rate: Tensor) -> DeferredDecay:
        return DeferredDecay(log_decay(materialize(x), bias, rate), self.dtype)

    def bounded_decay(self, x: GpuValue, bias: Tensor, rate: Tensor, bound: float) -> DeferredDecay:
        return DeferredDecay(log_bounded_decay(materialize(x), bias, rate, bound), self.dtype)

    def delta_rule(
        self,
        q: GpuValue,
        k: GpuValue,
        v: GpuValue,
        decay: DeferredDecay,
        beta: GpuValue,
        batch: GpuBatch,
        layer: int,
        key_dim: int,
        tiled: bool = False,
    ) -> Tensor:
        heads = _states(batch).recurrent.shape[2]
        kind = Decays.TOKEN if decay.log.shape[1] == heads else Decays.ROW
        return self._attend(q, k, v, Gates(kind, decay.log, materialize(beta)), batch, layer, tiled)

    def linear_attention(
        self, q: GpuValue, k: GpuValue, v: GpuValue, decay: Tensor, batch: GpuBatch, layer: int, key_dim: int
    ) -> Tensor:
        return self._attend(q, k, v, Gates(Decays.HEAD, decay), batch, layer)

    def mamba2_scan(
        self, x: GpuValue, dt: GpuValue, b: GpuValue, c: GpuValue, weights: Mamba2Weights, batch: GpuBatch, layer: int
    ) -> Tensor:
        w = weights
        gates = Gates(Decays.MAMBA2, materialize(dt), None, w.dt_bias, w.a, w.skip, *w.dt_limit)
        return self._attend(c, b, x, gates, batch, layer)

    def _attend(
        self, q: GpuValue, k: GpuValue, v: GpuValue, gates: Gates, batch: GpuBatch, layer: int, tiled: bool = False
    ) -> Tensor:
        slots, segments = _states(batch).recurrent[layer], _segments(batch)
        q, k, v = (materialize(x) for x in (q, k, v))
        in_tiles = not self.batch_invariant and takes_tiles(q, k, v, slots.shape[2], segments)
        return (attend_tiles if in_tiles else attend_tokens)(q, k, v, gates, slots, segments, tiled)

    def mamba_scan(
        self, x: GpuValue, dt: GpuValue, b: GpuValue, c: GpuValue, weights: MambaWeights, batch: GpuBatch, layer: int
    ) -> Tensor:
        x, dt, b, c = (materialize(value) for value in (x, dt, b, c))
        return mamba_scan(x, dt, b, c, weights, _states(batch).recurrent[layer], _segments(batch))


def _segments(batch: GpuBatch) -> DeviceSegments:
    assert batch.segments is not None, "the model has no states"
    return batch.segments


def _states(batch: GpuBatch) -> TorchStates:
    assert batch.cache.slots is not None, "the model has no state slots"
    return batch.cache.slots
