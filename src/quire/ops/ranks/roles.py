"""What the outputs of each matrix of a model are used for, which decides how ranks divide them.

`RoleOps` loads nothing and numbers the weights in the order in which they are packed. `RoleRecorder` follows each
matrix's outputs through a forward pass to the op that tells: attention by heads, two halves that are multiplied. A
value that goes another way is divided evenly, and gathered where it is needed: a role is a matter of speed alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from quire.ops.kv_spec import KVSpec
from quire.ops.native.hidden_states import NativeHiddenStates
from quire.ops.native.liveness import Storage
from quire.ops.native.recorder import RecordedFrequencies, RecordedTable, Recorder, SymbolicBatch
from quire.ops.native.scan_recorder import Emit, RecordedColumns
from quire.ops.opset import Activation, Float32, Int32, Keep, Routing
from quire.ops.ranks.cuts import Cut, RankIndex, whole
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight, StoredTensor

Kind = Literal["even", "heads", "kv_heads", "all"]


@dataclass(frozen=True, slots=True)
class Role:
    """What some neighbouring outputs of a matrix are, and so how ranks share them. `all`: every rank computes them."""

    kind: Kind
    heads: int = 0
    kv_heads: int = 0

    def cut(self, index: RankIndex, columns: int) -> Cut:
        match self.kind:
            case "heads":
                return index.heads(columns, self.heads, self.kv_heads)
            case "kv_heads":
                return index.kv_heads(columns, self.heads, self.kv_heads)
            case "all":
                return whole(columns)
            case _:
                return index.even(columns)


EVEN = Role("even")


@dataclass(slots=True)
class Outputs:
    """The outputs of one matrix: where they are divided into fields, and the roles of the fields that have one."""

    num_outputs: int
    bounds: set[int] = field(default_factory=set)
    roles: dict[tuple[int, int], Role] = field(default_factory=dict)  # (first, end) -> role

    def mark(self, first: int, end: int, role: Role | None = None) -> None:
        self.bounds |= {first, end}
        if role is not None and self.roles.setdefault((first, end), role) != role:
            self.roles[first, end] = EVEN

    def cuts(self, index: RankIndex) -> tuple[Cut, ...]:
        """The cuts of every field, in order."""
        bounds = sorted(self.bounds | {0, self.num_outputs})
        return tuple(self.roles.get(field, EVEN).cut(index, field[1] - field[0]) for field in pairwise(bounds))


@dataclass(slots=True)
class Roles:
    """The roles of a model's weights, by their numbers: the order in which they are packed."""

    matrices: list[Outputs] = field(default_factory=list)
    tables: list[bool] = field(default_factory=list)  # for each embedding table: whether it is of token ids
    gates: set[int] = field(default_factory=set)  # experts' matrices, whose outputs are gate and up
    num_experts: int = 0  # matrices of experts
    group: int = 1  # query heads that share a KV head of the cache
    undivided: set[int] = field(default_factory=set)  # experts' first matrices without a gate: every rank has all
    convs: set[tuple[int, int]] = field(default_factory=set)  # (first column, columns) of the convolutions of a layer
    state_groups: int = 0  # of the heads of recurrences, that share b and c, or q and k; 0: they are not divided

    def only(self, matrices: Sequence[int], experts: Sequence[int], tables: Sequence[int]) -> "Roles":
        """The roles of some of the weights, each kind by its own numbers: a model of which the others are not
        packed."""
        return Roles(
            [self.matrices[number] for number in matrices],
            [self.tables[number] for number in tables],
            {place for place, number in enumerate(experts) if number in self.gates},
            len(experts),
            self.group,
            {place for place, number in enumerate(experts) if number in self.undivided},
            self.convs,
            self.state_groups,
        )


class RoleOps:
    """The part of `OpSet` that is called when a model is loaded."""

    def __init__(self, group: int) -> None:
        self.roles = Roles(group=group)

    def pack(
        self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None, keep: Keep = Keep.NOTHING
    ) -> PackedWeight:
        outputs = sum(part.num_rows for part in parts)
        self.roles.matrices.append(Outputs(outputs))
        if keep is Keep.ALL:  # a router: few outputs, which every rank needs at once
            self.roles.matrices[-1].mark(0, outputs, Role("all"))
        return PackedWeight(outputs, parts[0].num_columns, 0, len(self.roles.matrices) - 1)

    def pack_experts(
        self, experts: Sequence[Sequence[StoredTensor]], biases: Sequence[Sequence[StoredTensor]] | None = None
    ) -> PackedExperts:
        outputs, inputs = sum(part.num_rows for part in experts[0]), experts[0][0].num_columns
        self.roles.num_experts += 1
        return PackedExperts(len(experts), outputs, inputs, 0, self.roles.num_experts - 1)

    def pack_heads(self, heads: Sequence[StoredTensor]) -> PackedHeads:
        num_outputs, num_inputs = heads[0].shape
        return PackedHeads(len(heads), num_outputs, num_inputs, 0, None)

    def vector(self, tensor: StoredTensor) -> Float32:
        return np.zeros(int(np.prod(tensor.shape)), np.float32)

    def conv_weight(self, tensor: StoredTensor) -> Float32:
        return np.zeros((tensor.num_columns, tensor.shape[0]), np.float32)

    def draft_vocabulary(self, tokens: Int32, vocab: int) -> None:
        """A draft vocabulary does not decide how a matrix is divided."""

    def table(self, tensor: StoredTensor) -> RecordedTable:
        self.roles.tables.append(False)
        return _NumberedTable(tensor.type.name, tensor.data, None, tensor.num_columns, len(self.roles.tables) - 1)

    def biases(self, table: Float32) -> Float32:
        return table

    def frequencies(self, inv_freq: Float32, scale: float) -> RecordedFrequencies:
        return RecordedFrequencies(inv_freq, scale)


@dataclass(frozen=True, slots=True, eq=False)
class _NumberedTable(RecordedTable):
    number: int


class RoleRecorder(Recorder):
    def __init__(self, spec: KVSpec, roles: Roles, hidden: NativeHiddenStates | None = None) -> None:
        """`hidden`: what the forward pass of a head reads."""
        super().__init__(spec, hidden=hidden)
        self._roles = roles
        self._origins: dict[Storage, tuple[int, int]] = {}  # a value -> the matrix, and the output of its first column

    def _mark(self, x: RecordedColumns, role: Role | None = None) -> None:
        if x.storage in self._origins:
            matrix, first = self._origins[x.storage]
            self._roles.matrices[matrix].mark(first + x.first, first + x.first + x.columns, role)

    def _mark_heads(self, x: RecordedColumns, heads: int, kv_heads: int) -> None:
        self._mark(x, Role("heads", heads, kv_heads))

    def _record(
        self,
        inputs: Sequence[RecordedColumns],
        output: RecordedColumns,
        emit: Emit,
        *,
        barrier: bool = False,
        in_place: Sequence[RecordedColumns] = (),
        any_rows: bool = False,
    ) -> RecordedColumns:
        recorded = super()._record(inputs, output, emit, barrier=barrier, in_place=in_place, any_rows=any_rows)
        if len(in_place) == 1 and in_place[0].storage in self._origins:
            matrix, first = self._origins[in_place[0].storage]
            self._origins[output.storage] = matrix, first + in_place[0].first
        return recorded

    def embedding(self, ids: Any, table: RecordedTable) -> RecordedColumns:
        if isinstance(table, _NumberedTable) and ids == SymbolicBatch.ids:
            self._roles.tables[table.number] = True
        return super().embedding(ids, table)

    def linear(self, x: RecordedColumns, w: PackedWeight) -> RecordedColumns:
        out = super().linear(x, w)
        self._origins[out.storage] = w.packed, 0
        return out

    def split(self, x: RecordedColumns, sizes: Sequence[int]) -> tuple[RecordedColumns, ...]:
        parts = super().split(x, sizes)
        for part in parts:
            self._mark(part)
        return parts

    def linear_heads(self, x: RecordedColumns, w: PackedHeads) -> RecordedColumns:
        self._mark_heads(x, w.num_heads, w.num_heads)
        return super().linear_heads(x, w)

    def write_kv(self, k: RecordedColumns, v: RecordedColumns, batch: Any, layer: int) -> None:
        for x in (k, v):
            self._mark(x, Role("kv_heads", self._roles.group * self._spec.num_kv_heads, self._spec.num_kv_heads))
        super().write_kv(k, v, batch, layer)

    def write_latent(self, latent: RecordedColumns, k_rope: RecordedColumns, batch: Any, layer: int) -> None:
        for x in (latent, k_rope):
            self._mark(x, Role("all"))
        super().write_latent(latent, k_rope, batch, layer)

    def paged_attention(
        self, q: RecordedColumns, batch: Any, layer: int, head_dim: int, *options: Any, **named: Any
    ) -> RecordedColumns:
        self._mark_heads(q, q.columns // head_dim, self._spec.num_kv_heads)
        return super().paged_attention(q, batch, layer, head_dim, *options, **named)

    def cross_attention(
        self, q: RecordedColumns, batch: Any, layer: int, head_dim: int, scale: float, group: int = 0, skipped: int = 0
    ) -> RecordedColumns:
        self._mark_heads(q, q.columns // head_dim, self._spec.num_kv_heads)
        return super().cross_attention(q, batch, layer, head_dim, scale, group, skipped)

    def attention(
        self, q: RecordedColumns, k: RecordedColumns, v: RecordedColumns, batch: Any, head_dim: int, scale: float,
        causal: bool = False, window: int = 0, biases: Any = None,
    ) -> RecordedColumns:  # fmt: skip
        kv_heads = k.columns // head_dim
        self._mark_heads(q, q.columns // head_dim, kv_heads)
        for x in (k, v):
            self._mark(x, Role("kv_heads", q.columns // head_dim, kv_heads))
        return super().attention(q, k, v, batch, head_dim, scale, causal, window, biases)

    def write_index_key(self, k: RecordedColumns, batch: Any, layer: int) -> None:
        self._mark(k, Role("all"))
        super().write_index_key(k, batch, layer)

    def top_positions(self, q: RecordedColumns, weights: RecordedColumns, batch: Any, layer: int) -> RecordedColumns:
        for x in (q, weights):
            self._mark(x, Role("all"))
        return super().top_positions(q, weights, batch, layer)

    def write_tokens(self, x: RecordedColumns, batch: Any, layer: int, first: int = 0) -> None:
        self._mark(x, Role("all"))
        super().write_tokens(x, batch, layer, first)

    def top_entries(
        self, q: RecordedColumns, weights: RecordedColumns, batch: Any, layer: int, top_k: int
    ) -> RecordedColumns:
        for x in (q, weights):
            self._mark(x, Role("all"))
        return super().top_entries(q, weights, batch, layer, top_k)

    def compressed_attention(
        self, q: RecordedColumns, batch: Any, layer: int, scale: float, window: int, sinks: Float32,
        chosen: RecordedColumns | None = None,
    ) -> RecordedColumns:  # fmt: skip
        self._mark_heads(q, len(sinks), len(sinks))
        return super().compressed_attention(q, batch, layer, scale, window, sinks, chosen)

    def mla_attention(
        self,
        q_latent: RecordedColumns,
        q_rope: RecordedColumns,
        batch: Any,
        layer: int,
        scale: float,
        chosen: RecordedColumns | None = None,
    ) -> RecordedColumns:
        heads = q_latent.columns // self._spec.latent
        self._mark_heads(q_rope, heads, heads)
        return super().mla_attention(q_latent, q_rope, batch, layer, scale, chosen)

    def causal_conv(
        self, x: RecordedColumns, weight: Float32, bias: Float32 | None, batch: Any, layer: int, first: int = 0
    ) -> RecordedColumns:
        self._roles.convs.add((first, x.columns))
        return super().causal_conv(x, weight, bias, batch, layer, first)

    def wkv7(self, *values: Any) -> RecordedColumns:
        r, w, k, v, a, weights, batch, layer = values
        self._roles.state_groups = weights.heads
        return super().wkv7(r, w, k, v, a, weights, batch, layer)

    def mamba2_scan(self, *values: Any) -> RecordedColumns:
        x, dt, b, c, weights, batch, layer = values
        self._roles.state_groups = weights.groups
        return super().mamba2_scan(x, dt, b, c, weights, batch, layer)

    def delta_rule(
        self, q: RecordedColumns, k: RecordedColumns, v: RecordedColumns, decay: RecordedColumns, beta: RecordedColumns,
        batch: Any, layer: int, key_dim: int, tiled: bool = False,
    ) -> RecordedColumns:  # fmt: skip
        self._roles.state_groups = 0 if tiled else q.columns // key_dim
        return super().delta_rule(q, k, v, decay, beta, batch, layer, key_dim, tiled)

    def linear_attention(
        self, q: RecordedColumns, k: RecordedColumns, v: RecordedColumns, decay: Float32, batch: Any, layer: int,
        key_dim: int,
    ) -> RecordedColumns:  # fmt: skip
        self._roles.state_groups = q.columns // key_dim
        return super().linear_attention(q, k, v, decay, batch, layer, key_dim)

    def activate_and_mul(self, x: RecordedColumns, kind: Activation) -> RecordedColumns:
        for half in super().split(x, (x.columns // 2, x.columns // 2)):
            self._mark(half)
        return super().activate_and_mul(x, kind)

    def moe(
        self, x: RecordedColumns, router_logits: RecordedColumns, gate_up: PackedExperts, down: PackedExperts,
        routing: Routing, kind: Activation, correction: Any = None, chosen: RecordedColumns | None = None,
    ) -> RecordedColumns:  # fmt: skip
        is_gated = gate_up.num_outputs != down.num_inputs
        (self._roles.gates if is_gated else self._roles.undivided).add(gate_up.packed)
        return super().moe(x, router_logits, gate_up, down, routing, kind, correction, chosen)
