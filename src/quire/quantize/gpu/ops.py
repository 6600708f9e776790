"""The plain op set in torch over whole sequences, which shows the inputs of every matmul to a hook.

As in `eager_ops.py`, matrices stay in the mapped file, and there is no KV cache. Values between ops have the device's
dtype; norms, softmax and states are computed in fp32."""

from collections.abc import Callable, Container, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.errors import Unsupported
from quire.ops.opset import Activation, Keep, Mamba2Weights, MambaWeights, Routing
from quire.ops.reference.attention import attention
from quire.ops.reference.causal_conv import convolve
from quire.ops.reference.linear_attention import attend_states
from quire.ops.reference.mamba import mamba2_scan, mamba_scan
from quire.ops.reference.opset import TorchOps, activate_and_clamp
from quire.ops.reference.routing import choose_experts
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight, StoredTensor
from quire.quantize.eager_ops import EagerBatch, EagerOps, MatmulHook
from quire.quantize.floats import Floats
from quire.quantize.gpu.host import to_host
from quire.quantize.input_sources import InputSource, InputSources

Read = Callable[[StoredTensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class ObservedBatch:
    """An `EagerBatch` whose positions are on the device."""

    ids: np.ndarray
    positions: Tensor
    starts: list[int]

    @property
    def spans(self) -> list[slice]:
        return [slice(first, last) for first, last in pairwise(self.starts)]

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        """The segments as the op set's recurrences take them: every sequence begins without a state, and leaves one in
        slot 0."""
        return [(last, -1, 0) for last in self.starts[1:]]


@dataclass(frozen=True, slots=True, eq=False)
class ObservedLogits:
    """Hidden states and the head, which is read when rows are asked for."""

    x: Tensor
    head: Callable[[], Sequence[Tensor]]
    bias: Tensor | None
    softcap: float

    def rows(self, first: int, last: int) -> Floats:
        x = self.x[first:last]
        logits = torch.cat([F.linear(x, part.to(x.dtype)).float() for part in self.head()], 1)
        if self.bias is not None:
            logits = logits + self.bias
        logits = self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits
        return to_host(logits)


class ObservedOps(TorchOps):
    """`read`: a matrix or vector in fp32 on the device. `shared`: layers whose keys and values others read."""

    def __init__(self, device: str, dtype: torch.dtype, read: Read, shared: Container[int] = ()) -> None:
        super().__init__(device)
        self.dtype, self._read, self.shared = dtype, read, shared
        self._loader: Any = EagerOps()  # packs nothing: weights stay as they are stored
        self._sources = InputSources()
        self._hook: MatmulHook | None = None
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}  # by layer
        self.kv_largest: dict[int, tuple[Tensor, Tensor]] = {}  # shared by all batches

    def for_batch(self, hook: MatmulHook) -> "ObservedOps":
        """These ops with the same weights, for a forward pass with values of its own."""
        ops = copy(self)
        ops._hook, ops._kv, ops._sources = hook, {}, copy(self._sources)
        ops._sources.begin()
        return ops

    def on_device(self, sequences: Sequence[Sequence[int]]) -> ObservedBatch:
        batch = EagerBatch.of(sequences)
        positions = torch.from_numpy(batch.positions.astype(np.int64)).to(self.device)
        return ObservedBatch(batch.ids, positions, batch.seq_starts.tolist())

    # -- when a model is loaded

    def pack(
        self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None, keep: Keep = Keep.NOTHING
    ) -> PackedWeight:
        packed: PackedWeight = self._loader.pack(parts, bias, keep)
        return PackedWeight(packed.num_outputs, packed.num_inputs, 0, packed.packed, self._biases(packed.bias))

    def pack_experts(
        self, experts: Sequence[Sequence[StoredTensor]], biases: Sequence[Sequence[StoredTensor]] | None = None
    ) -> PackedExperts:
        packed: PackedExperts = self._loader.pack_experts(experts, biases)
        shape = (packed.num_experts, packed.num_outputs, packed.num_inputs)
        return PackedExperts(*shape, 0, packed.packed, self._biases(packed.biases))

    def pack_heads(self, heads: Sequence[StoredTensor]) -> PackedHeads:
        packed: PackedHeads = self._loader.pack_heads(heads)
        return packed

    def _biases(self, values: Floats | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(values).to(self.device)

    def vector(self, tensor: StoredTensor) -> Tensor:
        values = self._loader.vector(tensor)
        vector = torch.from_numpy(values).to(self.device)
        self._sources.add_vector(vector, tensor.name, values)
        return vector

    def table(self, tensor: StoredTensor) -> Any:
        return tensor

    def conv_weight(self, tensor: StoredTensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self._loader.conv_weight(tensor))).to(self.device)

    # -- in a forward pass

    def embedding(self, ids: Any, table: Any, cut: Any = None) -> Tensor:
        rows: Floats = self._loader.embedding(ids, table)
        x = torch.from_numpy(rows).to(self.device).to(self.dtype)
        self._sources.came_from_sum(x)
        return x

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        total = super().add(x, y)
        self._sources.came_from_sum(total)
        return total

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
        out = super().rms_norm(x.float(), weight, eps, groups).to(self.dtype)
        self._sources.came_from_norm(out, weight)
        return out

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int = 1) -> Tensor:
        out = super().layer_norm(x.float(), weight, bias, eps, groups).to(self.dtype)
        vectors = () if weight is None else (weight,) if bias is None else (weight, bias)
        self._sources.came_from_norm(out, *vectors)
        return out

    def linear(self, x: Tensor, w: PackedWeight) -> Tensor:
        out = self._matmul(x, w.packed, w.bias, self._sources.of(x), self._sources.stream)
        self._sources.came_from_linear(out, w.packed)
        return out

    def _matmul(
        self, x: Tensor, parts: Sequence[StoredTensor], bias: Tensor | None, source: InputSource | None,
        stream: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert self._hook is not None
        self._hook.observe(parts, x, source, stream)
        matrices = self._hook.weights(parts)  # all batches wait here: what each holds meanwhile is held as often
        out = x.new_empty(len(x), sum(part.num_rows for part in parts))
        first = 0
        for matrix in matrices:
            torch.mm(x, matrix.to(self.dtype).T, out=out[:, first : first + len(matrix)])
            first += len(matrix)
        return out if bias is None else out + bias.to(self.dtype)

    def linear_heads(self, x: Tensor, w: PackedHeads) -> Tensor:
        heads = x.unflatten(-1, (w.num_heads, w.num_inputs))
        return torch.cat([heads[:, i] @ self._read(head).to(self.dtype).T for i, head in enumerate(w.packed)], 1)

    def write_kv(self, k: Tensor, v: Tensor, batch: Any, layer: int) -> None:
        self._kv[layer] = (k, v)
        largest = (k.abs().max(), v.abs().max())
        known = self.kv_largest.get(layer, largest)
        self.kv_largest[layer] = (torch.maximum(known[0], largest[0]), torch.maximum(known[1], largest[1]))

    def paged_attention(
        self, q: Tensor, batch: Any, layer: int, head_dim: int, scale: float, window: int = 0, softcap: float = 0.0,
        slopes: Tensor | None = None, sinks: Tensor | None = None, biases: Tensor | None = None, group: int = 0,
        skipped: int = 0,
    ) -> Tensor:  # fmt: skip
        assert biases is None and not group
        k, v = self._written(layer)
        out = []
        for span in batch.spans:
            queries, keys = (x[span].unflatten(-1, (-1, head_dim)) for x in (q, k))
            values = v[span].unflatten(-1, (keys.shape[1], -1))
            if window or softcap or slopes is not None or sinks is not None:
                scoring = (scale, window, softcap, slopes, sinks)
                attended = attention(queries.float(), keys.float(), values.float(), *scoring)
            else:
                attended = _causal(queries, keys, values, scale)
            out.append(attended.to(self.dtype).flatten(1))
        return torch.cat(out)

    def _written(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._kv[layer] if layer in self.shared else self._kv.pop(layer)

    def write_latent(self, latent: Tensor, k_rope: Tensor, batch: Any, layer: int) -> None:
        self._kv[layer] = (torch.cat((latent, k_rope), 1), latent)

    def stream_weights(self, *given: Any) -> Tensor:
        raise Unsupported(
            "a model with several residual streams cannot be calibrated", "choose a method without --calibrate"
        )

    def write_index_key(self, k: Tensor, batch: Any, layer: int) -> None:
        raise Unsupported("texts that are longer than what an indexer chooses (index_topk)", "use shorter texts")

    def mla_attention(
        self, q_latent: Tensor, q_rope: Tensor, batch: Any, layer: int, scale: float, chosen: Tensor | None = None
    ) -> Tensor:
        assert chosen is None, "texts of a calibration are shorter than what indexers keep"
        k, v = self._written(layer)
        width, latent = k.shape[1], v.shape[1]
        parts = (q_latent.unflatten(-1, (-1, latent)), q_rope.unflatten(-1, (-1, width - latent)))
        q = torch.cat(parts, 2)
        out = [_causal(q[span], k[span][:, None], v[span][:, None], scale).flatten(1) for span in batch.spans]
        return torch.cat(out)

    def activate_and_mul(self, x: Tensor, kind: Activation) -> Tensor:
        out = super().activate_and_mul(x, kind)
        if kind is not Activation.CLAMPED_SWIGLU:
            self._sources.came_from_gate(out, x)
        return out

    def moe(
        self, x: Tensor, router_logits: Tensor, gate_up: PackedExperts, down: PackedExperts, routing: Routing,
        kind: Activation, correction: Tensor | None = None, chosen: Tensor | None = None, cut: Any = None,
        experts: Any = None,
    ) -> Tensor:  # fmt: skip
        ids, shares = choose_experts(router_logits, routing, correction, chosen)
        source = self._sources.of(x)
        out = x.new_zeros(len(x), down.num_outputs)
        activate = self.activate if gate_up.num_outputs == down.num_inputs else self.activate_and_mul
        if routing.limit:
            activate = partial(activate_and_clamp, limit=routing.limit, gate_limit=routing.gate_limit)
        for expert in range(gate_up.num_experts):
            tokens, places = (ids == expert).nonzero(as_tuple=True)
            # An expert without tokens is shown to the hook too, which counts it as unseen.
            weights = shares[tokens, places, None].to(self.dtype)
            taken = x[tokens] * weights if routing.weigh_inputs else x[tokens]
            biases = [None if w.biases is None else w.biases[expert] for w in (gate_up, down)]
            hidden = activate(self._matmul(taken, gate_up.packed[expert], biases[0], source), kind)
            result = self._matmul(hidden, down.packed[expert], biases[1], None)
            out.index_add_(0, tokens, result if routing.weigh_inputs else result * weights)
        passed = (ids >= router_logits.shape[1] - routing.num_zero).to(shares.dtype)  # on, without a matrix
        return out + x * (passed * shares).sum(1, keepdim=True).to(self.dtype) if routing.num_zero else out

    def scale_by_position(self, x: Tensor, positions: Tensor, growth: float, length: int, offset: int = 0) -> Tensor:
        return super().scale_by_position(x.float(), positions, growth, length, offset).to(self.dtype)

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, batch: Any, layer: int, first: int = 0
    ) -> Tensor:
        before = x.new_zeros(len(weight) - 1, x.shape[1]).float()
        out = [convolve(torch.cat((before, x[span].float())), weight, bias) for span in batch.spans]
        return torch.cat(out).to(self.dtype)

    def mamba2_scan(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, weights: Mamba2Weights, batch: Any, layer: int
    ) -> Tensor:
        heads = dt.shape[1]
        slots = self._slots(heads, b.shape[1] // weights.groups, x.shape[1] // heads)
        x, dt, b, c = (value.float() for value in (x, dt, b, c))
        return mamba2_scan(x, dt, b, c, weights, slots, batch.segments).to(self.dtype)

    def mamba_scan(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, weights: MambaWeights, batch: Any, layer: int
    ) -> Tensor:
        slots = self._slots(b.shape[1], x.shape[1])
        x, dt, b, c = (value.float() for value in (x, dt, b, c))
        return mamba_scan(x, dt, b, c, weights, slots, batch.segments).to(self.dtype)

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, batch: Any, layer: int, key_dim: int,
        tiled: bool = False,
    ) -> Tensor:  # fmt: skip
        slots = self._slots(beta.shape[1], key_dim, v.shape[1] // beta.shape[1])
        q, k, v, decay, beta = (value.float() for value in (q, k, v, decay, beta))
        return attend_states(q, k, v, decay, beta, slots, batch.segments, tiled).to(self.dtype)

    def linear_attention(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, batch: Any, layer: int, key_dim: int
    ) -> Tensor:
        heads = q.shape[1] // key_dim
        slots = self._slots(heads, key_dim, v.shape[1] // heads)
        q, k, v = (value.float() for value in (q, k, v))
        return attend_states(q, k, v, decay.expand(len(v), -1), None, slots, batch.segments).to(self.dtype)

    def _slots(self, *shape: int) -> Tensor:
        return torch.zeros(1, *shape, device=self.device)

    def logits(
        self, x: Tensor, head: PackedWeight, batch: Any, softcap: float = 0.0, vocabulary: Any = None, cut: Any = None
    ) -> Any:
        hook = self._hook
        assert hook is not None
        hook.observe(head.packed, x)
        return ObservedLogits(x, lambda: hook.weights(head.packed), head.bias, softcap)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [n, heads, ...], k and v [n, kv_heads, ...] -> [n, heads, ...]"""
    shared = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(shared, 1).transpose(0, 1)[None] for x in (k, v))
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, is_causal=True, scale=scale)
    return out[0].transpose(0, 1)
