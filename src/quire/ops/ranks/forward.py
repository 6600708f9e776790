"""The ops of a forward pass, as one rank computes them.

A model's forward pass runs unchanged: a `RankValue` is all columns of a value, or those of this rank. Matrices are
divided by their outputs, so a sum is never divided: every rank multiplies whole rows, and results have the bits of one
process. Where an op needs all columns, they are gathered; a value is gathered once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from quire.core.errors import Unsupported
from quire.ops.kv_spec import KVSpec
from quire.ops.opset import Activation, Mamba2Weights, MambaWeights, Routing, Value, Wkv7Weights
from quire.ops.ranks.cuts import Cut, HeadRange, RankIndex, state_columns
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight

WKV7_VECTORS = ("remove_scale", "learn_scale", "bonus", "norm", "norm_bias")


@dataclass(slots=True, eq=False)
class RankValue:
    """`local`: the columns that `cuts` name, side by side. Without cuts: all columns."""

    local: Value
    cuts: tuple[Cut, ...] = ()
    gathered: Value = None


@dataclass(frozen=True, slots=True, eq=False)
class RankWeight(PackedWeight):
    """This rank's outputs of a matrix: `num_outputs` counts them."""

    cuts: tuple[Cut, ...] = ()  # empty: all outputs


@dataclass(frozen=True, slots=True, eq=False)
class RankExperts(PackedExperts):
    cut: Cut | None = None  # of the outputs, or of gate and of up; None: all outputs
    experts: Cut | None = None  # None: all experts


@dataclass(frozen=True, slots=True, eq=False)
class RankHeads(PackedHeads):
    total_heads: int = 0  # of all ranks


@dataclass(frozen=True, slots=True, eq=False)
class RankTable:
    """Rows of an embedding table: those of this rank, if there is a cut."""

    rows: Any
    cut: Cut | None = None


class RankForward:
    """The ops of `OpSet` that forward passes call. `ops`: the backend's."""

    def __init__(self, ops: Any, index: RankIndex, spec: KVSpec, group: int) -> None:
        """`spec`: of the cache of all ranks. `group`: query heads that share a KV head of it."""
        self._ops, self._index, self._spec = ops, index, spec
        self._heads = group * spec.num_kv_heads

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise Unsupported(f"the model's `{name}` is not divided among ranks", "leave out tensor_parallel_size")

    # -- between all columns and this rank's

    def _all(self, x: RankValue) -> Value:
        """All columns."""
        if not x.cuts:
            return x.local
        if x.gathered is None:
            x.gathered = self._ops.all_gather(x.local, x.cuts)
        return x.gathered

    def _own(self, x: RankValue, cut: Cut) -> Value:
        """The columns of `cut`."""
        if x.cuts == (cut,):
            return x.local
        whole = self._all(x)
        if hasattr(self._ops, "deferred_columns") and (own := self._ops.deferred_columns(whole, cut)) is not None:
            return own
        sizes = (cut.first, cut.count, cut.total - cut.first - cut.count)
        present = [size for size in sizes if size]
        return self._ops.split(whole, present)[1 if cut.first else 0]

    def _changeable(self, x: RankValue) -> Value:
        """For an op that works in place: all columns may be in memory that other ranks read."""
        return x.local if x.cuts else self._ops.scale(x.local, 1.0)

    def _columns(self, x: RankValue) -> int:
        """The columns that a value has in all ranks together."""
        if x.cuts:
            return sum(cut.total for cut in x.cuts)
        return x.local.columns if hasattr(x.local, "columns") else int(x.local.shape[-1])

    # -- ops that need all columns

    def embedding(self, ids: Any, table: RankTable) -> RankValue:
        if table.cut is None:
            return RankValue(self._ops.embedding(ids, table.rows))
        return RankValue(self._ops.embedding(ids, table.rows, cut=table.cut))

    def linear(self, x: RankValue, w: PackedWeight) -> RankValue:
        assert isinstance(w, RankWeight)
        return RankValue(self._ops.linear(self._all(x), w), w.cuts)

    def adapt(self, y: RankValue, x: RankValue, slots: Any, batch: Any) -> RankValue:
        return RankValue(self._ops.adapt(y.local, self._all(x), slots.bind(y.cuts), batch), y.cuts)

    def logits(
        self, x: RankValue, head: PackedWeight, batch: Any, softcap: float = 0.0, vocabulary: Any = None
    ) -> Value:
        assert isinstance(head, RankWeight) and len(head.cuts) <= 1
        cut = {"cut": head.cuts[0]} if head.cuts else {}
        return self._ops.logits(self._all(x), head, batch, softcap, vocabulary, **cut)

    def tap(self, x: RankValue, index: int) -> None: ...

    def keep(self, x: RankValue, batch: Any) -> None:
        self._ops.keep(self._all(x), batch)

    def hidden_states(self, batch: Any) -> RankValue:
        return RankValue(self._ops.hidden_states(batch))

    def concat(self, parts: Sequence[RankValue]) -> RankValue:
        return RankValue(self._ops.concat([self._all(part) for part in parts]))

    def rows(self, x: RankValue, batch: Any) -> Value:
        return self._ops.rows(self._all(x), batch)

    def rope_angles(self, positions: Any, frequencies: Any, group: int = 1) -> RankValue:
        return RankValue(self._ops.rope_angles(positions, frequencies, *([group] if group > 1 else [])))

    def write_latent(self, latent: RankValue, k_rope: RankValue, batch: Any, layer: int) -> None:
        self._ops.write_latent(self._all(latent), self._all(k_rope), batch, layer)

    # Every rank has the keys of indexers, and chooses the same positions.

    def write_index_key(self, k: RankValue, batch: Any, layer: int) -> None:
        self._ops.write_index_key(self._all(k), batch, layer)

    def top_positions(self, q: RankValue, weights: RankValue, batch: Any, layer: int) -> RankValue:
        return RankValue(self._ops.top_positions(self._all(q), self._all(weights), batch, layer))

    # Every rank has the cache of compressed attention, chooses the same entries, and mixes the residual streams.

    def write_tokens(self, x: RankValue, batch: Any, layer: int, first: int = 0) -> None:
        self._ops.write_tokens(self._all(x), batch, layer, first)

    def pool_group(self, batch: Any, layer: int, first: int, columns: int, bias: Any, overlap: bool) -> RankValue:
        return RankValue(self._ops.pool_group(batch, layer, first, columns, bias, overlap))

    def write_entry(self, x: RankValue, batch: Any, layer: int, part: int) -> None:
        self._ops.write_entry(self._all(x), batch, layer, part)

    def top_entries(self, q: RankValue, weights: RankValue, batch: Any, layer: int, top_k: int) -> RankValue:
        return RankValue(self._ops.top_entries(self._all(q), self._all(weights), batch, layer, top_k))

    def stream_weights(
        self, x: RankValue, scale: Any, base: Any, streams: int, eps: float, iterations: int
    ) -> RankValue:
        return RankValue(self._ops.stream_weights(self._all(x), scale, base, streams, eps, iterations))

    def merge_streams(self, x: RankValue, weights: RankValue) -> RankValue:
        return RankValue(self._ops.merge_streams(self._all(x), self._all(weights)))

    def update_streams(self, x: RankValue, y: RankValue, post: RankValue, mixing: RankValue) -> RankValue:
        return RankValue(self._ops.update_streams(*map(self._all, (x, y, post, mixing))))

    def moe(
        self, x: RankValue, router_logits: RankValue, gate_up: PackedExperts, down: PackedExperts, routing: Routing,
        kind: Activation, correction: Any = None, chosen: RankValue | None = None,
    ) -> RankValue:  # fmt: skip
        assert isinstance(gate_up, RankExperts) and isinstance(down, RankExperts)
        args = self._all(x), self._all(router_logits), gate_up, down, routing, kind, correction
        by_token = {} if chosen is None else {"chosen": self._all(chosen)}
        if gate_up.experts is not None:
            return RankValue(self._ops.moe(*args, experts=gate_up.experts, **by_token))
        if routing.num_zero:
            raise Unsupported(
                "experts that pass on their input are not divided by their columns",
                "use enable_expert_parallel, or leave out tensor_parallel_size",
            )
        hidden = {} if gate_up.cut is None else {"cut": gate_up.cut}
        return RankValue(self._ops.moe(*args, **hidden, **by_token), () if down.cut is None else (down.cut,))

    # -- by heads

    def linear_heads(self, x: RankValue, w: PackedHeads) -> RankValue:
        assert isinstance(w, RankHeads)
        inputs, outputs = w.total_heads * w.num_inputs, w.total_heads * w.num_outputs
        cuts = [self._index.heads(columns, w.total_heads, w.total_heads) for columns in (inputs, outputs)]
        return RankValue(self._ops.linear_heads(self._own(x, cuts[0]), w), (cuts[1],))

    def rope(self, x: RankValue, angles: RankValue, head_dim: int) -> RankValue:
        if not all(cut.unit % head_dim == 0 for cut in x.cuts):
            x = RankValue(self._all(x))
        return RankValue(self._ops.rope(self._changeable(x), angles.local, head_dim), x.cuts)

    def write_kv(self, k: RankValue, v: RankValue, batch: Any, layer: int) -> None:
        cut = self._index.kv_heads(self._columns(k), self._heads, self._spec.num_kv_heads)
        self._ops.write_kv(self._own(k, cut), self._own(v, cut), batch, layer)

    def paged_attention(
        self, q: RankValue, batch: Any, layer: int, head_dim: int, scale: float, window: int = 0, softcap: float = 0.0,
        slopes: Any = None, sinks: Any = None, biases: Any = None,
    ) -> RankValue:  # fmt: skip
        cut, sharing = self._query_heads(q)
        per_head = [_heads_of(cut, vector) for vector in (slopes, sinks, biases)]
        attended = self._ops.paged_attention(
            self._own(q, cut), batch, layer, head_dim, scale, window, softcap, *per_head, **sharing
        )
        return RankValue(attended, (cut,))

    def cross_attention(self, q: RankValue, batch: Any, layer: int, head_dim: int, scale: float) -> RankValue:
        cut, sharing = self._query_heads(q)
        return RankValue(self._ops.cross_attention(self._own(q, cut), batch, layer, head_dim, scale, **sharing), (cut,))

    def attention(
        self, q: RankValue, k: RankValue, v: RankValue, batch: Any, head_dim: int, scale: float, causal: bool = False,
        window: int = 0, biases: Any = None,
    ) -> RankValue:  # fmt: skip
        heads, kv_heads = self._columns(q) // head_dim, self._columns(k) // head_dim
        if self._index.sharing(heads, kv_heads):  # this backend's kernels have no uneven groups
            whole = self._all(q), self._all(k), self._all(v)
            return RankValue(self._ops.attention(*whole, batch, head_dim, scale, causal, window, biases))
        cut = self._index.heads(self._columns(q), heads, kv_heads)
        kv_cut = self._index.kv_heads(self._columns(k), heads, kv_heads)
        own = self._own(q, cut), self._own(k, kv_cut), self._own(v, kv_cut)
        attended = self._ops.attention(*own, batch, head_dim, scale, causal, window, _heads_of(cut, biases))
        return RankValue(attended, (cut,))

    def compressed_attention(
        self, q: RankValue, batch: Any, layer: int, scale: float, window: int, sinks: Any,
        chosen: RankValue | None = None,
    ) -> RankValue:  # fmt: skip
        cut = self._index.heads(self._columns(q), len(sinks), len(sinks))
        entries = () if chosen is None else (self._all(chosen),)
        own = self._own(q, cut), batch, layer, scale, window, _heads_of(cut, sinks)
        return RankValue(self._ops.compressed_attention(*own, *entries), (cut,))

    def mla_attention(
        self,
        q_latent: RankValue,
        q_rope: RankValue,
        batch: Any,
        layer: int,
        scale: float,
        chosen: RankValue | None = None,
    ) -> RankValue:
        heads = self._columns(q_latent) // self._spec.latent
        latent, rope = (self._index.heads(self._columns(q), heads, heads) for q in (q_latent, q_rope))
        own = self._own(q_latent, latent), self._own(q_rope, rope)
        positions = () if chosen is None else (self._all(chosen),)
        return RankValue(self._ops.mla_attention(*own, batch, layer, scale, *positions), (latent,))

    def _query_heads(self, q: RankValue) -> tuple[Cut, dict[str, int]]:
        """This rank's, of those that read the cache, and how they share its KV heads."""
        kv_heads = self._spec.num_kv_heads
        return self._index.heads(self._columns(q), self._heads, kv_heads), self._index.sharing(self._heads, kv_heads)

    # -- recurrences: by their heads, or channels, as the state slots are divided

    def mamba2_scan(
        self, x: RankValue, dt: RankValue, b: RankValue, c: RankValue, weights: Mamba2Weights, batch: Any, layer: int
    ) -> RankValue:
        heads = self._columns(dt)
        own = self._index.state_heads(heads, weights.groups)
        by_head = [self._own_heads(value, own, heads) for value in (x, dt)]
        by_group = [self._own_groups(value, own, heads, weights.groups) for value in (b, c)]
        part = slice(own.first, own.first + own.count)
        vectors = {name: getattr(weights, name)[part] for name in ("a", "dt_bias", "skip")}
        own_weights = replace(weights, **vectors, groups=own.num_kv)
        scanned = self._ops.mamba2_scan(*by_head, *by_group, own_weights, batch, layer)
        return self._of_heads(scanned, own, heads, self._columns(x))

    def wkv7(
        self, r: RankValue, w: RankValue, k: RankValue, v: RankValue, a: RankValue, weights: Wkv7Weights, batch: Any,
        layer: int,
    ) -> RankValue:  # fmt: skip
        heads, columns = weights.heads, self._columns(r)
        own, size = self._index.state_heads(heads, heads), columns // heads
        part = slice(own.first * size, (own.first + own.count) * size)
        vectors = {name: getattr(weights, name)[part] for name in WKV7_VECTORS}
        values = [self._own_heads(value, own, heads) for value in (r, w, k, v, a)]
        mixed = self._ops.wkv7(*values, replace(weights, **vectors, heads=own.count), batch, layer)
        return self._of_heads(mixed, own, heads, columns)

    def mamba_scan(
        self, x: RankValue, dt: RankValue, b: RankValue, c: RankValue, weights: MambaWeights, batch: Any, layer: int
    ) -> RankValue:
        cut = self._index.even(self._columns(x))
        part = slice(cut.first, cut.first + cut.count)
        own_weights = MambaWeights(_contiguous(weights.a[:, part]), weights.skip[part])
        values = self._own(x, cut), self._own(dt, cut), self._all(b), self._all(c)
        scanned = self._ops.mamba_scan(*values, own_weights, batch, layer)
        return RankValue(scanned, () if cut.is_whole else (cut,))

    def delta_rule(
        self, q: RankValue, k: RankValue, v: RankValue, decay: RankValue, beta: RankValue, batch: Any, layer: int,
        key_dim: int, tiled: bool = False,
    ) -> RankValue:  # fmt: skip
        heads, groups = self._columns(beta), self._columns(q) // key_dim
        own = self._index.state_heads(heads, 0 if tiled else groups)
        keys = [self._own_groups(value, own, heads, groups) for value in (q, k)]
        values = [self._own_heads(value, own, heads) for value in (v, decay, beta)]
        attended = self._ops.delta_rule(*keys, *values, batch, layer, key_dim, tiled)
        return self._of_heads(attended, own, heads, self._columns(v))

    def linear_attention(
        self, q: RankValue, k: RankValue, v: RankValue, decay: Any, batch: Any, layer: int, key_dim: int
    ) -> RankValue:
        heads, groups = len(decay), self._columns(q) // key_dim
        own = self._index.state_heads(heads, groups)
        keys = [self._own_groups(value, own, heads, groups) for value in (q, k)]
        own_decay = decay[own.first : own.first + own.count]
        attended = self._ops.linear_attention(*keys, self._own_heads(v, own, heads), own_decay, batch, layer, key_dim)
        return self._of_heads(attended, own, heads, self._columns(v))

    def _own_heads(self, x: RankValue, own: HeadRange, heads: int) -> Value:
        if own.count == heads:
            return self._all(x)
        return self._own(x, state_columns(own.first, own.count, heads, self._columns(x)))

    def _own_groups(self, x: RankValue, own: HeadRange, heads: int, groups: int) -> Value:
        if own.count == heads:
            return self._all(x)
        return self._own(x, state_columns(own.first_kv, own.num_kv, groups, self._columns(x)))

    @staticmethod
    def _of_heads(local: Value, own: HeadRange, heads: int, columns: int) -> RankValue:
        cuts = () if own.count == heads else (state_columns(own.first, own.count, heads, columns),)
        return RankValue(local, cuts)

    # -- column by column

    def decay(self, x: RankValue, bias: Any, rate: Any) -> RankValue:
        return self._decay(self._ops.decay, x, bias, rate)

    def bounded_decay(self, x: RankValue, bias: Any, rate: Any, bound: float) -> RankValue:
        return self._decay(self._ops.bounded_decay, x, bias, rate, bound)

    def _decay(self, op: Callable[..., Value], x: RankValue, bias: Any, rate: Any, *bound: float) -> RankValue:
        if len(x.cuts) > 1:
            x = RankValue(self._all(x))
        own = [_own_part(vector, cut, cut.total) for cut in x.cuts for vector in (bias, rate)] or [bias, rate]
        return RankValue(op(x.local, *own, *bound), x.cuts)

    def causal_conv(self, x: RankValue, weight: Any, bias: Any, batch: Any, layer: int, first: int = 0) -> RankValue:
        """`first`: 0, or the columns of the one convolution of the layer before this one."""
        cut, own_first = self._index.even(self._columns(x)), self._index.even(first).count if first else 0
        own = self._own(x, cut), weight, _own_part(bias, cut, cut.total)
        mixed = self._ops.causal_conv(*own, batch, layer, own_first)
        return RankValue(mixed, () if cut.is_whole else (cut,))

    def mul(self, x: RankValue, y: RankValue) -> RankValue:
        return self._by_column(self._ops.mul, x, y)

    def split(self, x: RankValue, sizes: Sequence[int]) -> tuple[RankValue, ...]:
        """Split a divided value at the bounds of its fields."""
        if not x.cuts:
            return tuple(RankValue(part) for part in self._ops.split(x.local, sizes))
        ends = list(accumulate(cut.total for cut in x.cuts))
        if not set(accumulate(sizes)) <= set(ends):
            return self.split(RankValue(self._all(x)), sizes)
        groups: list[list[Cut]] = [[] for _ in sizes]
        last = list(accumulate(sizes))
        for cut, end in zip(x.cuts, ends, strict=True):
            groups[next(index for index, limit in enumerate(last) if end <= limit)].append(cut)
        locals_ = self._ops.split(x.local, [sum(cut.count for cut in group) for group in groups])
        return tuple(
            RankValue(local, () if len(group) == 1 and group[0].is_whole else tuple(group))
            for local, group in zip(locals_, groups, strict=True)
        )

    def rms_norm(self, x: RankValue, weight: Any, eps: float, groups: int = 1) -> RankValue:
        if not all(cut.unit % len(weight) == 0 for cut in x.cuts):
            x = RankValue(self._all(x))
        norm = getattr(self._ops, "rms_norm_of_heads", self._ops.rms_norm) if x.cuts else self._ops.rms_norm
        return RankValue(norm(x.local, weight, eps, groups), x.cuts)

    def layer_norm(self, x: RankValue, weight: Any, bias: Any, eps: float, groups: int = 1) -> RankValue:
        columns = self._columns(x)
        size = columns // groups
        if len(x.cuts) != 1 or x.cuts[0].unit % size:
            return RankValue(self._ops.layer_norm(self._all(x), weight, bias, eps, groups))
        [cut] = x.cuts
        own = [_own_part(vector, cut, columns) for vector in (weight, bias)]
        return RankValue(self._ops.layer_norm(x.local, *own, eps, cut.count // size), x.cuts)

    def activate(self, x: RankValue, kind: Activation) -> RankValue:
        return RankValue(self._ops.activate(x.local, kind), x.cuts)

    def activate_and_mul(self, x: RankValue, kind: Activation) -> RankValue:
        if x.cuts and (len(x.cuts) != 2 or x.cuts[0] != x.cuts[1]):
            x = RankValue(self._all(x))
        return RankValue(self._ops.activate_and_mul(x.local, kind), x.cuts[:1])

    def mul_sigmoid(self, x: RankValue, gate: RankValue) -> RankValue:
        return RankValue(self._ops.mul_sigmoid(x.local, self._all(gate)), x.cuts)

    def scale(self, x: RankValue, factor: float) -> RankValue:
        return RankValue(self._ops.scale(x.local, factor), x.cuts)

    def scale_by_position(self, x: RankValue, positions: Any, growth: float, length: int, offset: int = 0) -> RankValue:
        return RankValue(self._ops.scale_by_position(self._changeable(x), positions, growth, length, offset), x.cuts)

    def clamp(self, x: RankValue, limit: float) -> RankValue:
        return RankValue(self._ops.clamp(x.local, limit), x.cuts)

    def add(self, x: RankValue, y: RankValue) -> RankValue:
        return self._by_column(self._ops.add, x, y)

    def _by_column(self, op: Callable[[Value, Value], Value], x: RankValue, y: RankValue) -> RankValue:
        """Where a rank has all columns of one and some of the other, it computes these, and the result is gathered."""
        cuts = x.cuts or y.cuts
        if x.cuts == y.cuts:
            return RankValue(op(x.local, y.local), cuts)
        if (x.cuts and y.cuts) or len(cuts) > 1:
            return RankValue(op(self._all(x), self._all(y)))
        return RankValue(op(self._own(x, cuts[0]), self._own(y, cuts[0])), cuts)


def _heads_of(cut: Cut, vector: Any) -> Any:
    """The entries of this rank's heads, of a vector with one for each head."""
    first = cut.first // cut.unit
    return None if vector is None else vector[first : first + cut.count // cut.unit]


def _contiguous(matrix: Any) -> Any:
    return np.ascontiguousarray(matrix) if isinstance(matrix, np.ndarray) else matrix.contiguous()


def _own_part(vector: Any, cut: Cut, columns: int) -> Any:
    return vector if vector is None or len(vector) != columns else vector[cut.first : cut.first + cut.count]
