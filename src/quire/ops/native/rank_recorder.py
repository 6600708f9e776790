"""The recorder of a process that may be one of several ranks: values that ranks have in common, and where they wait."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.ops.kv_spec import KVSpec
from quire.ops.native.hidden_states import DraftVocabulary, NativeHiddenStates
from quire.ops.native.liveness import Use
from quire.ops.native.recorder import RecordedLogits, RecordedTable, Recorder, SymbolicBatch
from quire.ops.native.scan_recorder import Emit, RecordedColumns, ViewOf, new_value
from quire.ops.native.shared_values import SharedValues
from quire.ops.opset import Activation, Float32, Routing
from quire.ops.ranks.cuts import Cut, whole
from quire.ops.tensors import PackedExperts, PackedWeight


class RankRecorder(Recorder):
    """`cut` of an op: the part that this rank has."""

    def __init__(self, spec: KVSpec, max_tokens: int = 0, hidden: NativeHiddenStates | None = None) -> None:
        super().__init__(spec, max_tokens, hidden)
        self.shared = SharedValues()

    def embedding(self, ids: Any, table: RecordedTable, cut: Cut | None = None) -> RecordedColumns:
        if cut is None:
            return super().embedding(ids, table)
        assert ids == SymbolicBatch.ids, "tables of positions are not divided"
        out = new_value(table.columns)
        self.shared.storages.add(out.storage)
        arguments = False, table.storage, table.data, table.row_order
        rows = {"first_row": cut.first, "total_rows": cut.total}
        self._record((), out, lambda tape, view: tape.embedding(*arguments, view(out), **rows))
        self._at_barrier(Use([out.storage], None, barrier=True), lambda tape, view: tape.rank_barrier())
        return out

    def all_gather(self, x: RecordedColumns, cuts: Sequence[Cut]) -> RecordedColumns:
        assert x.columns == sum(cut.count for cut in cuts), f"{x.columns} columns of {cuts}"
        out = new_value(sum(cut.total for cut in cuts))
        self.shared.storages.add(out.storage)
        if len(cuts) == 1 and x.columns == x.storage.columns:
            self.shared.written_in_place.setdefault(x.storage, (out.storage, cuts[0].first))
        own = self.split(x, [cut.count for cut in cuts])
        starts = np.cumsum([0, *(cut.total for cut in cuts)]).tolist()
        places = [
            RecordedColumns(out.storage, start + cut.first, cut.count) for start, cut in zip(starts, cuts, strict=False)
        ]

        def emit(tape: Any, view: ViewOf) -> None:
            for columns, place in zip(own, places, strict=True):
                if self.shared.written_in_place.get(columns.storage, (None,))[0] is not out.storage:
                    tape.copy_columns(view(columns), view(place))
            tape.rank_barrier()

        self._at_barrier(Use([x.storage], out.storage, barrier=True, any_rows=True), emit)
        return out

    def linear(self, x: RecordedColumns, w: PackedWeight) -> RecordedColumns:
        self.shared.widest_input = max(self.shared.widest_input, w.num_inputs)
        return super().linear(x, w)

    def moe(
        self, x: RecordedColumns, router_logits: RecordedColumns, gate_up: PackedExperts, down: PackedExperts,
        routing: Routing, kind: Activation, correction: Float32 | None = None,
        chosen: RecordedColumns | None = None, cut: Cut | None = None, experts: Cut | None = None,
    ) -> RecordedColumns:  # fmt: skip
        args = x, router_logits, gate_up, down, routing, kind, correction
        if experts is not None:
            assert gate_up.num_experts == down.num_experts == experts.count
            assert router_logits.columns == experts.total + routing.num_zero
            outputs = new_value(routing.top_k * down.num_outputs)
            self.shared.storages.add(outputs.storage)
            return self._moe(*args, outputs=outputs, first_expert=experts.first, chosen=chosen)
        if cut is None:
            return super().moe(*args, chosen)
        assert gate_up.num_outputs == 2 * cut.count and down.num_inputs == cut.total
        hidden = new_value(routing.top_k * cut.total)
        self.shared.storages.add(hidden.storage)
        return self._moe(*args, hidden, cut.first, chosen=chosen)

    def logits(
        self,
        x: RecordedColumns,
        head: PackedWeight,
        batch: Any,
        softcap: float = 0.0,
        vocabulary: DraftVocabulary | None = None,
        cut: Cut | None = None,
    ) -> RecordedLogits:
        if cut is None and not self.shared.storages:
            return super().logits(x, head, batch, softcap, vocabulary)
        assert x.columns == head.num_inputs, f"{x.columns} columns and a head of {head.num_inputs} inputs"

        own = cut or whole(head.num_outputs)
        self.shared.logits = cut is not None
        return self._end_together(
            x,
            lambda tape, view: tape.logits(
                view(x), head.packed, head.bias, softcap, first_column=own.first, num_columns=own.total
            ),
            RecordedLogits(own.total, vocabulary),
        )

    def rows(self, x: RecordedColumns, batch: Any) -> RecordedLogits:
        if not self.shared.storages:
            return super().rows(x, batch)

        return self._end_together(x, lambda tape, view: tape.rows(view(x)), RecordedLogits(x.columns))

    def _end_together(self, x: RecordedColumns, emit_last: Emit, taken: RecordedLogits) -> RecordedLogits:
        """Ranks meet at the end of a step, before one of them writes shared values of the next."""

        def emit(tape: Any, view: ViewOf) -> None:
            emit_last(tape, view)
            tape.rank_barrier()

        self.shared.barriers.add(len(self.uses))
        return self._take(x, emit, taken)

    def _at_barrier(self, use: Use, emit: Emit) -> None:
        self.shared.barriers.add(len(self.uses))
        self._append(use, emit)
