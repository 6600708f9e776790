"""An op set that computes at once, in numpy, and shows the inputs of every matmul to a hook.

Model files cannot tell it from a backend, so every family of decoders can be calibrated. Matrices stay in the mapped
file: one at a time is read when it is multiplied, whatever the model's size. All sequences are whole, so there is no
KV cache: keys and values live as long as their layer, or as long as the pass where other layers read them."""

import threading
from collections.abc import Callable, Container, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import Unsupported
from quire.ops.opset import Activation, Keep, Mamba2Weights, MambaWeights, Routing, Wkv7Weights
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight, StoredTensor
from quire.quantize.eager_attention import AttentionHeads
from quire.quantize.eager_scans import mamba2_scan, mamba_scan
from quire.quantize.eager_states import linear_attention, wkv7
from quire.quantize.floats import Floats, read_floats
from quire.quantize.input_sources import InputSource, InputSources
from quire.quantize.routing import routed
from quire.quantize.threads import in_threads, spans


class MatmulHook(Protocol):
    """Sees the inputs of every linear layer, and may give other weights in place of the stored ones."""

    def observe(
        self, parts: Sequence[StoredTensor], x: Any, source: InputSource | None = None, stream: Any = None
    ) -> None:
        """Linear layers that share the input x [rows, inputs]; in a pass over several batches, once for each. `stream`:
        the last sum of hidden states."""

    def weights(self, parts: Sequence[StoredTensor]) -> Sequence[Any]:
        """Their matrices [outputs, inputs], when all inputs have been observed."""


class StoredWeights:
    """The hook that changes nothing. `read`: the values of a tensor."""

    def __init__(self, read: Callable[[StoredTensor], Any] = read_floats) -> None:
        self._read = read

    def observe(
        self, parts: Sequence[StoredTensor], x: Any, source: InputSource | None = None, stream: Any = None
    ) -> None: ...

    def weights(self, parts: Sequence[StoredTensor]) -> Sequence[Any]:
        return [self._read(part) for part in parts]


class OutputProbe(Protocol):
    """May change what a matmul or an embedding gives, for some of the tokens. `rows`: which tokens x and out are of."""

    def linear(self, parts: Sequence[StoredTensor], x: Floats, out: Floats, rows: NDArray[np.intp]) -> None: ...

    def embedding(self, table: StoredTensor, ids: NDArray[np.int32], out: Floats) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class EagerBatch:
    """Whole sequences, one after the other; logits of all tokens."""

    ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    seq_starts: NDArray[np.int32]

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> "EagerBatch":
        lengths = [len(sequence) for sequence in sequences]
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        return cls(np.concatenate([np.asarray(s, np.int32) for s in sequences]), positions, starts)

    @property
    def spans(self) -> list[slice]:
        """The rows of each sequence."""
        return [slice(first, last) for first, last in pairwise(self.seq_starts)]


@dataclass(frozen=True, slots=True, eq=False)
class EagerLogits:
    """Hidden states and the head: logits are computed a few rows at a time."""

    x: Floats
    head: Callable[[], Sequence[Floats]]  # read when logits are asked for
    bias: Floats | None
    softcap: float
    parts: Sequence[StoredTensor] = ()  # of the head, for the probe
    probe: OutputProbe | None = None

    def rows(self, first: int, last: int) -> Floats:
        logits = np.concatenate([matmul(self.x[first:last], part) for part in self.head()], axis=1)
        if self.probe is not None:
            self.probe.linear(self.parts, self.x[first:last], logits, np.arange(first, last))
        if self.bias is not None:
            logits += self.bias
        return np.float32(self.softcap) * np.tanh(logits / np.float32(self.softcap)) if self.softcap else logits


@dataclass(frozen=True, slots=True, eq=False)
class LinearUse:
    """A linear layer as the model loads it."""

    name: str  # of the stored weight
    shape: tuple[int, int]
    keep: Keep
    expert: bool = False


class EagerOps:
    """`linears` lists the linear layers that were loaded, in the order of the files. `shared`: layers whose keys and
    values others read."""

    def __init__(
        self, hook: MatmulHook | None = None, probe: OutputProbe | None = None, shared: Container[int] = ()
    ) -> None:
        self.hook, self.probe, self.shared = hook or StoredWeights(), probe, shared
        self.linears: list[LinearUse] = []
        self._sources = InputSources()
        self._kv: dict[int, tuple[Floats, Floats]] = {}  # by layer
        # By layer, and shared by all passes: the largest magnitudes of keys and values.
        self.kv_largest: dict[int, tuple[float, float]] = {}
        self._kv_lock = threading.Lock()

    def for_pass(self, hook: MatmulHook | None = None) -> "EagerOps":
        """These ops with the same weights, for a forward pass with places of its own. `hook`: in place of the usual
        one."""
        ops = copy(self)
        ops.hook, ops._kv, ops._sources = hook or self.hook, {}, copy(self._sources)
        ops._sources.begin()
        return ops

    # -- when a model is loaded

    def pack(
        self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None, keep: Keep = Keep.NOTHING
    ) -> PackedWeight:
        self.linears += [LinearUse(part.name, (part.num_rows, part.num_columns), keep) for part in parts]
        vector = np.concatenate([self.vector(part) for part in bias]) if bias else None
        return PackedWeight(sum(p.num_rows for p in parts), parts[0].num_columns, 0, tuple(parts), vector)

    def pack_experts(
        self, experts: Sequence[Sequence[StoredTensor]], biases: Sequence[Sequence[StoredTensor]] | None = None
    ) -> PackedExperts:
        shape = (sum(part.num_rows for part in experts[0]), experts[0][0].num_columns)
        self.linears += [
            LinearUse(p.name, (p.num_rows, p.num_columns), Keep.NOTHING, True) for parts in experts for p in parts
        ]
        added = None
        if biases is not None:
            added = np.stack([np.concatenate([self.vector(part) for part in parts]) for parts in biases])
        return PackedExperts(len(experts), *shape, 0, [tuple(parts) for parts in experts], added)

    def pack_heads(self, heads: Sequence[StoredTensor]) -> PackedHeads:
        return PackedHeads(len(heads), heads[0].shape[0], heads[0].shape[1], 0, tuple(heads))

    def vector(self, tensor: StoredTensor) -> Floats:
        values = read_floats(tensor).reshape(-1)
        self._sources.add_vector(values, tensor.name, values)
        return values

    def table(self, tensor: StoredTensor) -> StoredTensor:
        return tensor

    def conv_weight(self, tensor: StoredTensor) -> Floats:
        return read_floats(tensor).reshape(tensor.shape[0], -1).T

    def biases(self, table: Floats) -> Floats:
        return table

    def frequencies(self, inv_freq: Floats, scale: float) -> tuple[Floats, float]:
        return inv_freq, scale

    # -- in a forward pass

    def embedding(self, ids: NDArray[np.int32], table: StoredTensor) -> Floats:
        rows = ids if table.row_order is None else table.row_order[ids]
        shape = (len(ids), table.num_columns)
        x = read_floats(replace(table, data=table.data[rows], shape=shape, row_order=None))
        if self.probe is not None:
            self.probe.embedding(table, ids, x)
        self._sources.came_from_sum(x)
        return x

    def tap(self, x: Floats, index: int) -> None: ...

    def rms_norm(self, x: Floats, weight: Floats, eps: float, groups: int = 1) -> Floats:
        def norm(parts: Floats) -> Floats:
            mean = np.mean(np.square(parts), axis=3, keepdims=True)
            normal: Floats = parts / np.sqrt(mean + np.float32(eps)) * weight.reshape(groups, -1)
            return normal

        normal = by_rows(norm, x.reshape(len(x), -1, groups, len(weight) // groups)).reshape(x.shape)
        self._sources.came_from_norm(normal, weight)
        return normal

    def layer_norm(self, x: Floats, weight: Floats | None, bias: Floats | None, eps: float, groups: int = 1) -> Floats:
        parts = x.reshape(len(x), groups, -1)
        centred = parts - parts.mean(2, keepdims=True)
        variance = np.mean(centred * centred, axis=2, keepdims=True)
        normal: Floats = (centred / np.sqrt(variance + np.float32(eps))).reshape(x.shape)
        if weight is not None:
            normal *= np.tile(weight, x.shape[1] // len(weight))
        if bias is not None:
            normal += np.tile(bias, x.shape[1] // len(bias))
        vectors = (weight,) if bias is None else (weight, bias)
        self._sources.came_from_norm(normal, *(vectors if weight is not None else ()))
        return normal

    def linear(self, x: Floats, w: PackedWeight) -> Floats:
        self.hook.observe(w.packed, x, self._sources.of(x), self._sources.stream)
        matrices = self.hook.weights(w.packed)
        out = np.empty((len(x), w.num_outputs), np.float32)  # only now: other passes may run while weights are awaited
        first = 0
        for matrix in matrices:
            matmul(x, matrix, out[:, first : first + len(matrix)])
            first += len(matrix)
        if self.probe is not None:
            self.probe.linear(w.packed, x, out, np.arange(len(x)))
        self._sources.came_from_linear(out, w.packed)
        return out if w.bias is None else np.add(out, w.bias, out=out)

    def linear_heads(self, x: Floats, w: PackedHeads) -> Floats:
        heads = x.reshape(len(x), w.num_heads, w.num_inputs)
        outs = [heads[:, index] @ read_floats(head).T for index, head in enumerate(w.packed)]
        return np.concatenate(outs, axis=1)

    def split(self, x: Floats, sizes: Sequence[int]) -> tuple[Floats, ...]:
        """Copies: the last part that is alive would keep them all."""
        return tuple(np.ascontiguousarray(part) for part in np.split(x, np.cumsum(sizes)[:-1], axis=1))

    def concat(self, parts: Sequence[Floats]) -> Floats:
        return np.concatenate(parts, axis=1)

    def stream_weights(self, *given: Any) -> Floats:
        raise Unsupported(
            "a model with several residual streams cannot be calibrated", "choose a method without --calibrate"
        )

    def rope_angles(self, positions: NDArray[np.int32], frequencies: tuple[Floats, float], group: int = 1) -> Floats:
        inv_freq, scale = frequencies
        angles = (positions // group * group)[:, None].astype(np.float32) * inv_freq
        return np.concatenate((np.cos(angles), np.sin(angles)), axis=1) * np.float32(scale)

    def rope(self, x: Floats, angles: Floats, head_dim: int) -> Floats:
        return by_rows(_rotated, x.reshape(len(x), -1, head_dim), angles[:, None]).reshape(x.shape)

    def write_kv(self, k: Floats, v: Floats, batch: EagerBatch, layer: int) -> None:
        self._kv[layer] = (k, v)
        largest = (_largest(k), _largest(v))
        with self._kv_lock:
            known = self.kv_largest.get(layer, (0.0, 0.0))
            self.kv_largest[layer] = (max(known[0], largest[0]), max(known[1], largest[1]))

    def paged_attention(
        self, q: Floats, batch: EagerBatch, layer: int, head_dim: int, scale: float, window: int = 0,
        softcap: float = 0.0, slopes: Floats | None = None, sinks: Floats | None = None, biases: Floats | None = None,
    ) -> Floats:  # fmt: skip
        assert biases is None
        k, v = self._written(layer)
        head = AttentionHeads(head_dim, scale, window, softcap, slopes, sinks)
        return np.concatenate(in_threads(lambda span: head.attend(q[span], k[span], v[span]), batch.spans))

    def _written(self, layer: int) -> tuple[Floats, Floats]:
        return self._kv[layer] if layer in self.shared else self._kv.pop(layer)

    def write_latent(self, latent: Floats, k_rope: Floats, batch: EagerBatch, layer: int) -> None:
        self._kv[layer] = (np.concatenate((latent, k_rope), axis=1), latent)

    def write_index_key(self, k: Floats, batch: Any, layer: int) -> None:
        raise Unsupported(
            "a calibration text with more tokens than the indexer of the model chooses (index_topk)",
            "use shorter texts",
        )

    def mla_attention(
        self, q_latent: Floats, q_rope: Floats, batch: EagerBatch, layer: int, scale: float, chosen: None = None
    ) -> Floats:
        assert chosen is None, "texts of a calibration are shorter than what indexers keep"
        k, v = self._written(layer)
        width, latent = k.shape[1], v.shape[1]
        heads = q_latent.shape[1] // latent
        parts = (q_latent.reshape(len(k), heads, latent), q_rope.reshape(len(k), heads, -1))
        q = np.concatenate(parts, axis=2).reshape(len(k), -1)
        head = AttentionHeads(width, scale)
        return np.concatenate(in_threads(lambda span: head.attend(q[span], k[span], v[span]), batch.spans))

    def activate(self, x: Floats, kind: Activation) -> Floats:
        return by_rows(ACTIVATIONS[kind], x)

    def activate_and_mul(self, x: Floats, kind: Activation) -> Floats:
        gate, up = np.split(x, 2, axis=1)
        if kind is Activation.CLAMPED_SWIGLU:
            gate = np.minimum(gate, 7)
            return gate * _sigmoid(np.float32(1.702) * gate) * (np.clip(up, -7, 7) + 1)
        product = by_rows(lambda gate, up: ACTIVATIONS[kind](gate) * up, gate, up)
        self._sources.came_from_gate(product, x)
        return product

    def moe(
        self, x: Floats, router_logits: Floats, gate_up: PackedExperts, down: PackedExperts, routing: Routing,
        kind: Activation, correction: Floats | None = None,
    ) -> Floats:  # fmt: skip
        experts, shares = routed(router_logits, routing, correction)
        source = self._sources.of(x)
        out = np.zeros((len(x), down.num_outputs), np.float32)
        activate = self.activate if gate_up.num_outputs == down.num_inputs else self.activate_and_mul
        if routing.limit:
            activate = partial(self._activate_and_clamp, limit=routing.limit)
        for expert in range(gate_up.num_experts):
            tokens, places = np.nonzero(experts == expert)
            # An expert without tokens is shown to the hook too, which counts it as unseen.
            weights = shares[tokens, places, None]
            taken = x[tokens] * weights if routing.weigh_inputs else x[tokens]
            hidden = self._expert(taken, gate_up, expert, tokens, source)
            result = self._expert(activate(hidden, kind), down, expert, tokens)
            np.add.at(out, tokens, result if routing.weigh_inputs else result * weights)
        passed = experts >= router_logits.shape[1] - routing.num_zero  # on, without a matrix
        return out + x * np.where(passed, shares, 0).sum(axis=1, keepdims=True) if routing.num_zero else out

    def _activate_and_clamp(self, x: Floats, kind: Activation, limit: float) -> Floats:
        gate, up = np.split(x, 2, axis=1)
        return self.clamp(self.activate(gate, kind), limit) * self.clamp(up, limit)

    def _expert(
        self, x: Floats, w: PackedExperts, expert: int, tokens: NDArray[np.intp], source: InputSource | None = None
    ) -> Floats:
        self.hook.observe(w.packed[expert], x, source)
        out = np.concatenate([matmul(x, matrix) for matrix in self.hook.weights(w.packed[expert])], axis=1)
        if self.probe is not None:
            self.probe.linear(w.packed[expert], x, out, tokens)
        return out if w.biases is None else out + w.biases[expert]

    def mul_sigmoid(self, x: Floats, gate: Floats) -> Floats:
        return x * _sigmoid(gate)

    def scale(self, x: Floats, factor: float) -> Floats:
        return x * np.float32(factor)

    def scale_by_position(
        self, x: Floats, positions: NDArray[np.int32], growth: float, length: int, offset: int = 0
    ) -> Floats:
        return x * (1 + growth * np.log1p((positions + offset) // length))[:, None].astype(np.float32)

    def clamp(self, x: Floats, limit: float) -> Floats:
        return np.clip(x, -np.float32(limit), np.float32(limit))

    def add(self, x: Floats, y: Floats) -> Floats:
        total = x + y
        self._sources.came_from_sum(total)
        return total

    def mul(self, x: Floats, y: Floats) -> Floats:
        return x * y

    def causal_conv(
        self, x: Floats, weight: Floats, bias: Floats | None, batch: EagerBatch, layer: int, first: int = 0
    ) -> Floats:
        out = np.zeros_like(x) if bias is None else np.tile(bias, (len(x), 1))
        for span in batch.spans:
            for distance, row in enumerate(weight[::-1]):
                length = span.stop - span.start - distance
                out[span.stop - max(length, 0) : span.stop] += row * x[span.start : span.start + max(length, 0)]
        return out

    def decay(self, x: Floats, bias: Floats, rate: Floats) -> Floats:
        kept: Floats = np.exp(-rate * np.logaddexp(np.float32(0), x + bias))
        return kept

    def bounded_decay(self, x: Floats, bias: Floats, rate: Floats, bound: float) -> Floats:
        kept: Floats = np.exp(np.float32(bound) * _sigmoid(rate * (x + bias)))
        return kept

    def delta_rule(
        self, q: Floats, k: Floats, v: Floats, decay: Floats, beta: Floats, batch: EagerBatch, layer: int, key_dim: int,
        tiled: bool = False,
    ) -> Floats:  # fmt: skip
        return linear_attention(q, k, v, decay, beta, batch.spans, key_dim, tiled)

    def linear_attention(
        self, q: Floats, k: Floats, v: Floats, decay: Floats, batch: EagerBatch, layer: int, key_dim: int
    ) -> Floats:
        return linear_attention(q, k, v, np.tile(decay, (len(v), 1)), None, batch.spans, key_dim)

    def wkv7(
        self, r: Floats, w: Floats, k: Floats, v: Floats, a: Floats, weights: Wkv7Weights, batch: EagerBatch, layer: int
    ) -> Floats:
        return wkv7(r, w, k, v, a, weights, batch.spans)

    def mamba2_scan(
        self, x: Floats, dt: Floats, b: Floats, c: Floats, weights: Mamba2Weights, batch: EagerBatch, layer: int
    ) -> Floats:
        return mamba2_scan(x, dt, b, c, weights, batch.spans)

    def mamba_scan(
        self, x: Floats, dt: Floats, b: Floats, c: Floats, weights: MambaWeights, batch: EagerBatch, layer: int
    ) -> Floats:
        return mamba_scan(x, dt, b, c, weights, batch.spans)

    def logits(self, x: Floats, head: PackedWeight, batch: EagerBatch, softcap: float = 0.0) -> EagerLogits:
        self.hook.observe(head.packed, x)
        matrices = cache(partial(self.hook.weights, head.packed))
        return EagerLogits(x, matrices, head.bias, softcap, head.packed, self.probe)


def _largest(x: Floats) -> float:
    """The largest absolute value, without an array of all."""
    return max(float(x.max()), -float(x.min()))


def _rotated(heads: Floats, angles: Floats) -> Floats:
    half = angles.shape[2] // 2
    cos, sin = angles[..., :half], angles[..., half:]
    left, right = heads[..., :half], heads[..., half : 2 * half]
    return np.concatenate((left * cos - right * sin, right * cos + left * sin, heads[..., 2 * half :]), axis=2)


def _sigmoid(x: Floats) -> Floats:
    y: Floats = np.float32(0.5) * np.tanh(x * np.float32(0.5)) + np.float32(0.5)
    return y


def _gelu(x: Floats) -> Floats:
    """With Abramowitz and Stegun's 7.1.26 for erf, whose error is below 1.5e-7."""
    z = np.abs(x) * np.float32(0.70710678)
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = np.sign(x) * (1 - series * np.exp(-z * z))
    y: Floats = (np.float32(0.5) * x * (1 + erf)).astype(np.float32)
    return y


def _gelu_tanh(x: Floats) -> Floats:
    inner = np.float32(0.79788456) * (x + np.float32(0.044715) * x * x * x)
    y: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
    return y


CACHED_VALUES = 1 << 15  # of an array, computed at once by what is done value by value

ACTIVATIONS: dict[Activation, Callable[[Floats], Floats]] = {
    Activation.SILU: lambda x: x * _sigmoid(x),
    Activation.GELU: _gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.RELU: lambda x: np.maximum(x, 0),
    Activation.RELU_SQUARED: lambda x: np.square(np.maximum(x, 0)),
    Activation.QUICK_GELU: lambda x: x * _sigmoid(np.float32(1.702) * x),
    Activation.TANH: np.tanh,
    Activation.ELU: lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    Activation.SIGMOID: _sigmoid,
}


def by_rows(compute: Callable[..., Floats], *arrays: Floats) -> Floats:
    """compute(*arrays), which has the shape of the first and whose rows do not depend on each other, in threads.

    Some rows at a time: what is between input and output stays in a core's cache."""
    out = np.empty(arrays[0].shape, np.float32)
    step = max(CACHED_VALUES * len(out) // max(out.size, 1), 1)

    def fill(span: slice) -> None:
        for first in range(span.start, span.stop, step):
            rows = slice(first, min(first + step, span.stop))
            out[rows] = compute(*(array[rows] for array in arrays))

    in_threads(fill, spans(len(out)))
    return out


def matmul(x: Floats, matrix: Floats, out: Floats | None = None) -> Floats:
    """x @ matrix.T, its rows divided among threads."""
    result = np.empty((len(x), len(matrix)), np.float32) if out is None else out

    in_threads(lambda span: np.matmul(x[span], matrix.T, out=result[span]), spans(len(x)))
    return result
