"""The recorder: the ops of a forward pass, recorded and not computed.

Those that read or write the KV cache are in attention_recorder.py, those that keep states in scan_recorder.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.ops.kv_spec import KVSpec
from quire.ops.native.attention_recorder import AttentionRecorder
from quire.ops.native.hidden_states import DraftVocabulary, NativeHiddenStates
from quire.ops.native.liveness import Use
from quire.ops.native.lora import NativeLoraSlots
from quire.ops.native.scan_recorder import Emit, RecordedColumns, new_value
from quire.ops.opset import Activation, Float32, Routing
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight

SCORINGS = ("softmax", "sigmoid", "sqrt softplus")  # in the order of the kernels


@dataclass(frozen=True, slots=True)
class RecordedLogits:
    """The result of a recorded forward pass."""

    vocab_size: int
    vocabulary: DraftVocabulary | None = None  # of a head that has logits for some tokens only


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTable:
    """An embedding table, row by row as the checkpoint stores it."""

    storage: str
    data: NDArray[np.uint8]  # [rows, row_bytes]
    row_order: NDArray[np.int32] | None
    columns: int


@dataclass(frozen=True, slots=True, eq=False)
class RecordedFrequencies:
    inv_freq: Float32  # [rotary_dim / 2]
    scale: float


class SymbolicBatch:
    """Stands for a `StepBatch` in a recording. Ops compare its fields by name."""

    ids, positions, slots = "ids", "positions", "slots"
    seq_starts, context_lens, block_tables = "seq_starts", "context_lens", "block_tables"
    logit_rows, hidden_rows = "logit_rows", "hidden_rows"


class Recorder(AttentionRecorder):
    """The ops of a forward pass. `OpSet` describes them."""

    def __init__(self, spec: KVSpec, max_tokens: int = 0, hidden: NativeHiddenStates | None = None) -> None:
        super().__init__(spec)
        self.logits_taken: RecordedLogits | None = None
        self.kept: Float32 | None = None  # [max_tokens, columns], written in every step
        self._max_tokens, self._hidden = max_tokens, hidden

    def embedding(self, ids: Any, table: RecordedTable) -> RecordedColumns:
        assert ids in (SymbolicBatch.ids, SymbolicBatch.positions), (
            "only ids or positions of the batch can be looked up"
        )
        out, of_positions = new_value(table.columns), ids == SymbolicBatch.positions
        return self._record(
            (),
            out,
            lambda tape, view: tape.embedding(of_positions, table.storage, table.data, table.row_order, view(out)),
        )

    def rms_norm(self, x: RecordedColumns, weight: Float32, eps: float, groups: int = 1) -> RecordedColumns:
        assert x.columns % len(weight) == 0 == len(weight) % groups, (
            f"{x.columns} columns and a norm weight of {weight.shape} in {groups} groups"
        )
        out = new_value(x.columns)
        return self._record(
            (x,),
            out,
            lambda tape, view: tape.rms_norm(view(x), weight, eps, view(out), groups),
            in_place=(x,),
            any_rows=True,
        )

    def layer_norm(
        self, x: RecordedColumns, weight: Float32 | None, bias: Float32 | None, eps: float, groups: int = 1
    ) -> RecordedColumns:
        sizes = (x.columns, x.columns // groups)
        assert x.columns % groups == 0 and all(v is None or len(v) in sizes for v in (weight, bias))
        out = new_value(x.columns)
        return self._record(
            (x,),
            out,
            lambda tape, view: tape.layer_norm(view(x), weight, bias, eps, groups, view(out)),
            in_place=(x,),
            any_rows=True,
        )

    def linear(self, x: RecordedColumns, w: PackedWeight) -> RecordedColumns:
        assert x.columns == w.num_inputs, f"{x.columns} columns and a matrix of {w.num_inputs} inputs"
        out = new_value(w.num_outputs)
        return self._record(
            (x,), out, lambda tape, view: tape.linear(view(x), w.packed, w.bias, view(out)), barrier=True, any_rows=True
        )

    def adapt(self, y: RecordedColumns, x: RecordedColumns, slots: NativeLoraSlots, batch: Any) -> RecordedColumns:
        sizes = (x.columns, y.columns)
        assert sizes == (slots.num_inputs, slots.num_outputs), (
            f"{sizes} columns and adapters of {slots.num_inputs}, {slots.num_outputs}"
        )
        return self._record(
            (x, y), y, lambda tape, view: tape.adapt(view(y), view(x), slots.native), barrier=True, any_rows=True
        )

    def linear_heads(self, x: RecordedColumns, w: PackedHeads) -> RecordedColumns:
        assert x.columns == w.num_heads * w.num_inputs, f"{x.columns} columns and heads of {w.num_inputs} inputs"
        out = new_value(w.num_heads * w.num_outputs)
        return self._record(
            (x,), out, lambda tape, view: tape.linear_heads(view(x), w.packed, view(out)), barrier=True, any_rows=True
        )

    def split(self, x: RecordedColumns, sizes: Sequence[int]) -> tuple[RecordedColumns, ...]:
        assert sum(sizes) == x.columns, f"{x.columns} columns split into {sizes}"
        firsts = np.cumsum([x.first, *sizes]).tolist()
        return tuple(RecordedColumns(x.storage, first, size) for first, size in zip(firsts, sizes, strict=False))

    def rope_angles(self, positions: Any, frequencies: RecordedFrequencies, group: int = 1) -> RecordedColumns:
        assert positions == SymbolicBatch.positions, "only positions of the batch can be rotated by"
        out, inv_freq, scale = new_value(2 * len(frequencies.inv_freq)), frequencies.inv_freq, frequencies.scale
        return self._record((), out, lambda tape, view: tape.rope_angles(inv_freq, scale, view(out), group))

    def rope(self, x: RecordedColumns, angles: RecordedColumns, head_dim: int) -> RecordedColumns:
        assert x.columns % head_dim == 0, f"{x.columns} columns in heads of {head_dim}"
        assert angles.columns <= head_dim, f"{angles.columns} rotated columns in heads of {head_dim}"
        return self._record((x, angles), x, lambda tape, view: tape.rope(view(x), view(angles), head_dim))

    def activate(self, x: RecordedColumns, kind: Activation) -> RecordedColumns:
        out = new_value(x.columns)
        return self._record(
            (x,), out, lambda tape, view: tape.activate(view(x), int(kind), view(out)), in_place=(x,), any_rows=True
        )

    def activate_and_mul(self, x: RecordedColumns, kind: Activation) -> RecordedColumns:
        assert x.columns % 2 == 0, f"{x.columns} columns: gate and up differ"
        out = new_value(x.columns // 2)
        return self._record(
            (x,), out, lambda tape, view: tape.activate_and_mul(view(x), int(kind), view(out)), any_rows=True
        )

    def moe(
        self,
        x: RecordedColumns,
        router_logits: RecordedColumns,
        gate_up: PackedExperts,
        down: PackedExperts,
        routing: Routing,
        kind: Activation,
        correction: Float32 | None = None,
        chosen: RecordedColumns | None = None,
    ) -> RecordedColumns:
        assert gate_up.num_outputs in (down.num_inputs, 2 * down.num_inputs)
        return self._moe(x, router_logits, gate_up, down, routing, kind, correction, chosen=chosen)

    def _moe(
        self,
        x: RecordedColumns,
        router_logits: RecordedColumns,
        gate_up: PackedExperts,
        down: PackedExperts,
        routing: Routing,
        kind: Activation,
        correction: Float32 | None,
        hidden: RecordedColumns | None = None,
        first_hidden: int = 0,
        outputs: RecordedColumns | None = None,
        first_expert: int = 0,
        chosen: RecordedColumns | None = None,
    ) -> RecordedColumns:
        """`hidden`: where ranks write hidden values, this one from column `first_hidden` of each route on. `outputs`:
        where ranks write the outputs of their experts, this one of those from `first_expert` on."""
        assert x.columns == gate_up.num_inputs, f"{x.columns} columns and experts of {gate_up.num_inputs} inputs"
        assert router_logits.columns == gate_up.num_experts + routing.num_zero or outputs
        assert not routing.num_zero or (x.columns == down.num_outputs and not routing.weigh_inputs)
        assert correction is None or correction.shape == (router_logits.columns,)
        assert chosen is None or (chosen.columns == routing.top_k and not routing.sparsemixer_threshold)
        routing.check(router_logits.columns)
        out = new_value(down.num_outputs)
        return self._record(
            (x, router_logits, *(shared for shared in (hidden, outputs, chosen) if shared)),
            out,
            lambda tape, view: tape.moe(
                view(x),
                view(router_logits),
                gate_up.packed,
                down.packed,
                gate_up_biases=gate_up.biases,
                down_biases=down.biases,
                top_k=routing.top_k,
                scoring=SCORINGS.index(routing.scoring),
                renormalize=routing.renormalize,
                scale=routing.scale,
                num_groups=routing.num_groups,
                top_groups=routing.top_groups,
                group_best=2 if routing.group_score == "best two" else 1,
                near=routing.sparsemixer_threshold,
                weigh_inputs=routing.weigh_inputs,
                correction=correction,
                kind=int(kind),
                out=view(out),
                hidden=view(hidden) if hidden else None,
                first_hidden=first_hidden,
                outputs=view(outputs) if outputs else None,
                first_expert=first_expert,
                num_zero=routing.num_zero,
                limit=routing.limit,
                gate_limit=routing.gate_limit,
                chosen=view(chosen) if chosen else None,
            ),
            barrier=True,
            any_rows=True,
        )

    def mul_sigmoid(self, x: RecordedColumns, gate: RecordedColumns) -> RecordedColumns:
        assert gate.columns == 1, f"a gate of {gate.columns} columns"
        out = new_value(x.columns)
        return self._record(
            (x, gate),
            out,
            lambda tape, view: tape.mul_sigmoid(view(x), view(gate), view(out)),
            in_place=(x,),
            any_rows=True,
        )

    def scale(self, x: RecordedColumns, factor: float) -> RecordedColumns:
        out = new_value(x.columns)
        return self._record(
            (x,), out, lambda tape, view: tape.scale(view(x), factor, view(out)), in_place=(x,), any_rows=True
        )

    def scale_by_position(
        self, x: RecordedColumns, positions: Any, growth: float, length: int, offset: int = 0
    ) -> RecordedColumns:
        assert positions == SymbolicBatch.positions, "rows are scaled by their own positions"
        return self._record((x,), x, lambda tape, view: tape.scale_by_position(view(x), growth, length, offset))

    def clamp(self, x: RecordedColumns, limit: float) -> RecordedColumns:
        out = new_value(x.columns)
        return self._record(
            (x,), out, lambda tape, view: tape.clamp(view(x), limit, view(out)), in_place=(x,), any_rows=True
        )

    def add(self, x: RecordedColumns, y: RecordedColumns) -> RecordedColumns:
        assert x.columns == y.columns, f"{x.columns} columns and {y.columns}"
        out = new_value(x.columns)
        return self._record(
            (x, y), out, lambda tape, view: tape.add(view(x), view(y), view(out)), in_place=(x, y), any_rows=True
        )

    def mul(self, x: RecordedColumns, y: RecordedColumns) -> RecordedColumns:
        assert x.columns == y.columns, f"{x.columns} columns and {y.columns}"
        out = new_value(x.columns)
        return self._record(
            (x, y), out, lambda tape, view: tape.mul(view(x), view(y), view(out)), in_place=(x, y), any_rows=True
        )

    def bounded_decay(self, x: RecordedColumns, bias: Float32, rate: Float32, bound: float) -> RecordedColumns:
        """By other ops: the layer norm of zeros is its bias, and exp(y) of y below 0 is ELU(y) + 1."""
        assert bias.shape == rate.shape == (x.columns,), f"{bias.shape} and {rate.shape} for {x.columns} columns"
        zeros = self.scale(x, 0.0)
        biases, rates, ones = (self.layer_norm(zeros, None, v, 1.0) for v in (bias, rate, np.ones_like(bias)))
        share = self.activate(self.mul(self.add(x, biases), rates), Activation.SIGMOID)
        return self.add(self.activate(self.scale(share, bound), Activation.ELU), ones)

    def concat(self, parts: Sequence[RecordedColumns]) -> RecordedColumns:
        whole = new_value(sum(part.columns for part in parts))
        for part, place in zip(parts, self.split(whole, [part.columns for part in parts]), strict=True):
            self._record((part,), place, _copy(part, place), any_rows=True)
        return whole

    def tap(self, x: RecordedColumns, index: int) -> None: ...

    def keep(self, x: RecordedColumns, batch: Any) -> None:
        assert self.kept is None and self.logits_taken is None, "hidden states are kept once, before logits"
        kept = self.kept = np.zeros((self._max_tokens, x.columns), np.float32)
        self._append(Use([x.storage], None, barrier=False), lambda tape, view: tape.keep(view(x), kept))

    def hidden_states(self, batch: Any) -> RecordedColumns:
        assert self._hidden is not None, "the program was compiled without hidden states"
        rows, out = self._hidden.rows, new_value(self._hidden.rows.shape[1])
        return self._record((), out, lambda tape, view: tape.hidden_rows(rows, view(out)))

    def logits(
        self,
        x: RecordedColumns,
        head: PackedWeight,
        batch: Any,
        softcap: float = 0.0,
        vocabulary: DraftVocabulary | None = None,
    ) -> RecordedLogits:
        assert x.columns == head.num_inputs, f"{x.columns} columns and a head of {head.num_inputs} inputs"
        assert vocabulary is None or len(vocabulary.tokens) == head.num_outputs
        taken = RecordedLogits(head.num_outputs, vocabulary)
        return self._take(x, lambda tape, view: tape.logits(view(x), head.packed, head.bias, softcap), taken)

    def rows(self, x: RecordedColumns, batch: Any) -> RecordedLogits:
        return self._take(x, lambda tape, view: tape.rows(view(x)), RecordedLogits(x.columns))

    def _take(self, x: RecordedColumns, emit: Emit, taken: RecordedLogits) -> RecordedLogits:
        assert self.logits_taken is None, "a forward pass takes logits once"
        self._append(Use([x.storage], None, barrier=True), emit)
        self.logits_taken = taken
        return taken


def _copy(x: RecordedColumns, out: RecordedColumns) -> Emit:
    return lambda tape, view: tape.scale(view(x), 1.0, view(out))
