"""The ops as a forward pass sees them: each is noted down, and none is computed.

A value is columns of a storage with one row a token; how many rows there are is known only when the tape runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.ops.native.liveness import Storage, Use
from quire.ops.native.lora import NativeLoraSlots
from quire.ops.opset import Activation, Float32, KVSpec, Routing
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight

Place = Callable[["Columns"], Any]  # where a value lies: a native View
Emit = Callable[[Any, Place], None]  # put one op on a native Tape


@dataclass(frozen=True, slots=True)
class Columns:
    """A recorded value: columns first .. first + columns of a storage."""

    storage: Storage
    first: int
    columns: int


@dataclass(frozen=True, slots=True)
class Logits:
    """What a forward pass must return."""

    vocab_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """An embedding table, row by row as the checkpoint stores it."""

    storage: str
    data: NDArray[np.uint8]  # [rows, row_bytes]
    row_order: NDArray[np.int32] | None
    columns: int


@dataclass(frozen=True, slots=True, eq=False)
class Frequencies:
    inv_freq: Float32  # [rotary_dim / 2]
    scale: float


class SymbolicBatch:
    """Stands for a `StepBatch` in a recording. Its fields are handed to ops and mean themselves."""

    ids, positions, slots = "ids", "positions", "slots"
    seq_starts, context_lens, block_tables = "seq_starts", "context_lens", "block_tables"
    logit_rows = "logit_rows"


class Recorder:
    """The ops of a forward pass; see `OpSet` for what each means."""

    def __init__(self, spec: KVSpec) -> None:
        self.uses: list[Use] = []
        self.emits: list[Emit] = []
        self.logits_taken: Logits | None = None
        self._spec = spec

    def embedding(self, ids: Any, table: Table) -> Columns:
        assert ids in (SymbolicBatch.ids, SymbolicBatch.positions), "ids or positions are looked up, and nothing else"
        out, of_positions = _fresh(table.columns), ids == SymbolicBatch.positions
        return self._note(
            (),
            out,
            lambda tape, at: tape.embedding(of_positions, table.storage, table.data, table.row_order, at(out)),
        )

    def rms_norm(self, x: Columns, weight: Float32, eps: float) -> Columns:
        assert x.columns % len(weight) == 0, f"{x.columns} columns and a norm weight of {weight.shape}"
        out = _fresh(x.columns)
        return self._note(
            (x,), out, lambda tape, at: tape.rms_norm(at(x), weight, eps, at(out)), in_place=(x,), any_rows=True
        )

    def layer_norm(
        self, x: Columns, weight: Float32 | None, bias: Float32 | None, eps: float, groups: int = 1
    ) -> Columns:
        sizes = (x.columns, x.columns // groups)
        assert x.columns % groups == 0 and all(v is None or len(v) in sizes for v in (weight, bias))
        out = _fresh(x.columns)
        return self._note(
            (x,),
            out,
            lambda tape, at: tape.layer_norm(at(x), weight, bias, eps, groups, at(out)),
            in_place=(x,),
            any_rows=True,
        )

    def linear(self, x: Columns, w: PackedWeight) -> Columns:
        assert x.columns == w.num_inputs, f"{x.columns} columns and a matrix of {w.num_inputs} inputs"
        out = _fresh(w.num_outputs)
        return self._note(
            (x,), out, lambda tape, at: tape.linear(at(x), w.packed, w.bias, at(out)), barrier=True, any_rows=True
        )

    def adapt(self, y: Columns, x: Columns, slots: NativeLoraSlots, batch: Any) -> Columns:
        sizes = (x.columns, y.columns)
        assert sizes == (slots.num_inputs, slots.num_outputs), f"{sizes} columns and adapters of another layer"
        return self._note(
            (x, y), y, lambda tape, at: tape.adapt(at(y), at(x), slots.native), barrier=True, any_rows=True
        )

    def linear_heads(self, x: Columns, w: PackedHeads) -> Columns:
        assert x.columns == w.num_heads * w.num_inputs, f"{x.columns} columns and heads of {w.num_inputs} inputs"
        out = _fresh(w.num_heads * w.num_outputs)
        return self._note(
            (x,), out, lambda tape, at: tape.linear_heads(at(x), w.packed, at(out)), barrier=True, any_rows=True
        )

    def split(self, x: Columns, sizes: Sequence[int]) -> tuple[Columns, ...]:
        assert sum(sizes) == x.columns, f"{x.columns} columns split into {sizes}"
        firsts = np.cumsum([x.first, *sizes]).tolist()
        return tuple(Columns(x.storage, first, size) for first, size in zip(firsts, sizes, strict=False))

    def rope_angles(self, positions: Any, frequencies: Frequencies) -> Columns:
        assert positions == SymbolicBatch.positions, "the positions of the batch are rotated by, and nothing else"
        out, inv_freq, scale = _fresh(2 * len(frequencies.inv_freq)), frequencies.inv_freq, frequencies.scale
        return self._note((), out, lambda tape, at: tape.rope_angles(inv_freq, scale, at(out)))

    def rope(self, x: Columns, angles: Columns, head_dim: int) -> Columns:
        assert x.columns % head_dim == 0, f"{x.columns} columns in heads of {head_dim}"
        assert angles.columns <= head_dim, f"{angles.columns} rotated columns in heads of {head_dim}"
        return self._note((x, angles), x, lambda tape, at: tape.rope(at(x), at(angles), head_dim))

    def write_kv(self, k: Columns, v: Columns, batch: Any, layer: int) -> None:
        width = self._spec.num_kv_heads * self._spec.head_dim
        assert not self._spec.latent, "pages of latents have no keys and values"
        assert k.columns == v.columns == width, f"{k.columns} columns of k and {v.columns} of v in pages of {width}"
        assert 0 <= layer < self._spec.num_layers, f"layer {layer} of {self._spec.num_layers}"
        self._append(
            Use([k.storage, v.storage], None, barrier=False), lambda tape, at: tape.write_kv(at(k), at(v), layer)
        )

    def paged_attention(
        self,
        q: Columns,
        batch: Any,
        layer: int,
        head_dim: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        slopes: Float32 | None = None,
        sinks: Float32 | None = None,
        biases: Float32 | None = None,
    ) -> Columns:
        assert not self._spec.latent, "pages of latents have no keys and values"
        assert head_dim == self._spec.head_dim, f"heads of {head_dim} columns and pages of {self._spec.head_dim}"
        assert q.columns % (head_dim * self._spec.num_kv_heads) == 0, f"{q.columns} columns of q"
        assert 0 <= layer < self._spec.num_layers and window >= 0 and softcap >= 0
        for vector in (slopes, sinks):
            assert vector is None or vector.shape == (q.columns // head_dim,), f"{q.columns} columns of q, other heads"
        bias = _given(biases, q.columns // head_dim)
        out = _fresh(q.columns)
        return self._note(
            (q,),
            out,
            lambda tape, at: tape.attention(at(q), layer, scale, window, softcap, slopes, sinks, at(out), **bias),
            barrier=True,
            any_rows=True,
        )

    def cross_attention(self, q: Columns, batch: Any, layer: int, head_dim: int, scale: float) -> Columns:
        assert not self._spec.latent and head_dim == self._spec.head_dim
        assert q.columns % (head_dim * self._spec.num_kv_heads) == 0, f"{q.columns} columns of q"
        assert 0 <= layer < self._spec.num_layers, f"layer {layer} of {self._spec.num_layers}"
        out = _fresh(q.columns)
        return self._note(
            (q,),
            out,
            lambda tape, at: tape.cross_attention(at(q), layer, scale, at(out)),
            barrier=True,
            any_rows=True,
        )

    def write_latent(self, latent: Columns, turned: Columns, batch: Any, layer: int) -> None:
        spec = self._spec
        sizes = latent.columns, turned.columns
        assert spec.latent and sizes == (spec.latent, spec.head_dim - spec.latent), f"{sizes} columns in pages {spec}"
        assert 0 <= layer < spec.num_layers, f"layer {layer} of {spec.num_layers}"
        self._append(
            Use([latent.storage, turned.storage], None, barrier=False),
            lambda tape, at: tape.write_latent(at(latent), at(turned), layer),
        )

    def mla_attention(self, q_latent: Columns, q_turned: Columns, batch: Any, layer: int, scale: float) -> Columns:
        spec, heads = self._spec, q_latent.columns // max(self._spec.latent, 1)
        assert spec.latent and q_latent.columns == heads * spec.latent, f"{q_latent.columns} columns in pages {spec}"
        assert q_turned.columns == heads * (spec.head_dim - spec.latent), f"{q_turned.columns} columns of {heads} heads"
        assert 0 <= layer < spec.num_layers, f"layer {layer} of {spec.num_layers}"
        out = _fresh(q_latent.columns)
        return self._note(
            (q_latent, q_turned),
            out,
            lambda tape, at: tape.mla_attention(at(q_latent), at(q_turned), layer, scale, at(out)),
            barrier=True,
            any_rows=True,
        )

    def attention(
        self,
        q: Columns,
        k: Columns,
        v: Columns,
        batch: Any,
        head_dim: int,
        scale: float,
        causal: bool = False,
        window: int = 0,
        biases: Float32 | None = None,
    ) -> Columns:
        assert k.columns == v.columns and k.columns % head_dim == 0 == q.columns % k.columns and window >= 0
        bias = _given(biases, q.columns // head_dim)
        kv_heads, out = k.columns // head_dim, _fresh(q.columns)
        self._append(
            Use([k.storage, v.storage], None, barrier=False), lambda tape, at: tape.keep_kv(at(k), at(v), head_dim)
        )
        return self._note(
            (q,),
            out,
            lambda tape, at: tape.self_attention(at(q), kv_heads, head_dim, scale, causal, window, at(out), **bias),
            barrier=True,
            any_rows=True,
        )

    def activate(self, x: Columns, kind: Activation) -> Columns:
        out = _fresh(x.columns)
        return self._note(
            (x,), out, lambda tape, at: tape.activate(at(x), int(kind), at(out)), in_place=(x,), any_rows=True
        )

    def activate_and_mul(self, x: Columns, kind: Activation) -> Columns:
        assert x.columns % 2 == 0, f"{x.columns} columns: gate and up differ"
        out = _fresh(x.columns // 2)
        return self._note((x,), out, lambda tape, at: tape.activate_and_mul(at(x), int(kind), at(out)), any_rows=True)

    def moe(
        self,
        x: Columns,
        router_logits: Columns,
        gate_up: PackedExperts,
        down: PackedExperts,
        routing: Routing,
        kind: Activation,
        correction: Float32 | None = None,
    ) -> Columns:
        assert x.columns == gate_up.num_inputs, f"{x.columns} columns and experts of {gate_up.num_inputs} inputs"
        assert gate_up.num_outputs == 2 * down.num_inputs and router_logits.columns == gate_up.num_experts
        assert correction is None or correction.shape == (gate_up.num_experts,)
        routing.check(gate_up.num_experts)
        out = _fresh(down.num_outputs)
        return self._note(
            (x, router_logits),
            out,
            lambda tape, at: tape.moe(
                at(x),
                at(router_logits),
                gate_up.packed,
                down.packed,
                gate_up_biases=gate_up.biases,
                down_biases=down.biases,
                top_k=routing.top_k,
                sigmoid=routing.scoring == "sigmoid",
                renormalize=routing.renormalize,
                scale=routing.scale,
                num_groups=routing.num_groups,
                top_groups=routing.top_groups,
                group_best=2 if routing.group_score == "best two" else 1,
                near=routing.sparsemixer_threshold,
                correction=correction,
                kind=int(kind),
                out=at(out),
            ),
            barrier=True,
            any_rows=True,
        )

    def mul_sigmoid(self, x: Columns, gate: Columns) -> Columns:
        assert gate.columns == 1, f"a gate of {gate.columns} columns"
        out = _fresh(x.columns)
        return self._note(
            (x, gate), out, lambda tape, at: tape.mul_sigmoid(at(x), at(gate), at(out)), in_place=(x,), any_rows=True
        )

    def scale(self, x: Columns, factor: float) -> Columns:
        out = _fresh(x.columns)
        return self._note((x,), out, lambda tape, at: tape.scale(at(x), factor, at(out)), in_place=(x,), any_rows=True)

    def scale_by_position(self, x: Columns, positions: Any, growth: float, length: int) -> Columns:
        assert positions == SymbolicBatch.positions, "rows are scaled by their own positions"
        return self._note((x,), x, lambda tape, at: tape.scale_by_position(at(x), growth, length))

    def clamp(self, x: Columns, most: float) -> Columns:
        out = _fresh(x.columns)
        return self._note((x,), out, lambda tape, at: tape.clamp(at(x), most, at(out)), in_place=(x,), any_rows=True)

    def add(self, x: Columns, y: Columns) -> Columns:
        assert x.columns == y.columns, f"{x.columns} columns and {y.columns}"
        out = _fresh(x.columns)
        return self._note((x, y), out, lambda tape, at: tape.add(at(x), at(y), at(out)), in_place=(x, y), any_rows=True)

    def logits(self, x: Columns, head: PackedWeight, batch: Any, softcap: float = 0.0) -> Logits:
        assert x.columns == head.num_inputs, f"{x.columns} columns and a head of {head.num_inputs} inputs"
        return self._take(x, lambda tape, at: tape.logits(at(x), head.packed, head.bias, softcap), head.num_outputs)

    def rows(self, x: Columns, batch: Any) -> Logits:
        return self._take(x, lambda tape, at: tape.rows(at(x)), x.columns)

    def _take(self, x: Columns, emit: Emit, columns: int) -> Logits:
        assert self.logits_taken is None, "a forward pass takes logits once"
        self._append(Use([x.storage], None, barrier=True), emit)
        self.logits_taken = Logits(columns)
        return self.logits_taken

    def _note(
        self,
        inputs: Sequence[Columns],
        output: Columns,
        emit: Emit,
        *,
        barrier: bool = False,
        in_place: Sequence[Columns] = (),
        any_rows: bool = False,
    ) -> Columns:
        whole = [x.storage for x in in_place if x.columns == x.storage.columns]
        self._append(Use([x.storage for x in inputs], output.storage, barrier, whole, any_rows), emit)
        return output

    def _append(self, use: Use, emit: Emit) -> None:
        self.uses.append(use)
        self.emits.append(emit)


def _given(biases: Float32 | None, heads: int) -> dict[str, Float32]:
    assert biases is None or (biases.shape[0] == heads and biases.shape[1] % 2 == 1 < biases.shape[1]), "other biases"
    return {} if biases is None else {"biases": biases}


def _fresh(columns: int) -> Columns:
    return Columns(Storage(columns), 0, columns)
