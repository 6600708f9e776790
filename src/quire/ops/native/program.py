"""A recorded forward pass, compiled to a native tape that runs once a step."""

from collections.abc import Callable
from typing import Any

import numpy as np

from quire.ops.compiled import native
from quire.ops.native.cache import NativeCache
from quire.ops.native.liveness import assign_offsets, needed_for_logits
from quire.ops.native.recorder import RecordedColumns, RecordedLogits, Recorder, SymbolicBatch
from quire.ops.opset import Float32, StepBatch

OPTIONAL = ("adapters", "source_lens", "source_tables")  # fields of a StepBatch that may be None


class NativeProgram:
    def __init__(
        self, forward: Callable[[Any, Any], Any], cache: NativeCache, max_tokens: int, num_threads: int
    ) -> None:
        spec, conv = cache.spec, cache.spec.conv
        recorder = Recorder(spec)
        logits = forward(recorder, SymbolicBatch())
        assert isinstance(logits, RecordedLogits) and logits is recorder.logits_taken, (
            "a forward pass returns its logits"
        )
        logits_only = needed_for_logits(recorder.uses)
        offsets, arena_size = assign_offsets(recorder.uses, max_tokens, logits_only)

        def view(x: RecordedColumns) -> Any:
            return native.View(offsets[x.storage] + x.first, x.storage.columns, x.columns, x.storage in logits_only)

        self._tape = native.Tape(
            cache.pages,
            num_blocks=cache.num_blocks,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=spec.block_size,
            dtype=spec.dtype,
            latent=spec.latent,
            conv_layers=conv.num_layers if conv else 0,
            conv_rows=conv.taps - 1 if conv else 0,
            conv_channels=conv.channels if conv else 0,
            max_tokens=max_tokens,
            arena_size=arena_size,
            num_threads=num_threads,
        )
        for emit in recorder.emits:
            emit(self._tape, view)
        self._held = (recorder.emits, cache)  # the tape points into their weights and pages
        self._logits: Float32 = np.empty((1, logits.vocab_size), dtype=np.float32)
        self.arena_bytes = 4 * arena_size

    def run(self, batch: StepBatch) -> Float32:
        """-> logits [R, vocab], valid until the next run."""
        num_rows = len(batch.logit_rows)
        if num_rows > len(self._logits):
            self._logits = np.empty((max(num_rows, 2 * len(self._logits)), self._logits.shape[1]), dtype=np.float32)
        given = {name: getattr(batch, name) for name in OPTIONAL}
        optional = {name: array for name, array in given.items() if array is not None}
        self._tape.run(
            batch.ids,
            batch.positions,
            batch.slots,
            batch.seq_starts,
            batch.context_lens,
            batch.block_tables,
            batch.logit_rows,
            self._logits,
            **optional,
        )
        return self._logits[:num_rows]
