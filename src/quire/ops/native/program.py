"""A recorded forward pass, compiled to a native tape that runs once a step."""

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.ops.compiled import native
from quire.ops.native.cache import NativeCache
from quire.ops.native.hidden_states import NativeHiddenStates
from quire.ops.native.liveness import assign_offsets, needed_for_logits
from quire.ops.native.rank_recorder import RankRecorder
from quire.ops.native.recorder import RecordedLogits, SymbolicBatch
from quire.ops.native.scan_recorder import RecordedColumns
from quire.ops.native.shared_values import own_uses, shared_uses
from quire.ops.opset import Chain, Float32, StepBatch

if TYPE_CHECKING:
    from quire.ops.ranks.group import RankGroup

# Fields of a StepBatch that may be None.
OPTIONAL = ("adapters", "source_lens", "source_tables", "ancestors", "hidden_rows", "states")


SLACK = 64  # floats that kernels may read past the last value


class NativeProgram:
    def __init__(
        self,
        forward: Callable[[Any, Any], Any],
        cache: NativeCache,
        max_tokens: int,
        num_threads: int,
        hidden: NativeHiddenStates | None = None,
        group: "RankGroup | None" = None,
    ) -> None:
        recorder = RankRecorder(cache.spec, max_tokens, hidden)
        logits = forward(recorder, SymbolicBatch())
        assert isinstance(logits, RecordedLogits) and logits is recorder.logits_taken, (
            "a forward pass returns its logits"
        )
        logits_only = needed_for_logits(recorder.uses)
        shared = recorder.shared
        in_place = shared.written_in_place
        for storage, (target, _) in list(in_place.items()):
            if (storage in logits_only) != (target in logits_only):  # they have different rows
                del in_place[storage]
        offsets, arena_size = assign_offsets(own_uses(recorder.uses, shared), max_tokens, logits_only)
        shared_offsets, shared_size = assign_offsets(shared_uses(recorder.uses, shared), max_tokens)
        assert group is not None or not shared.storages, "values of ranks, in a process that has none"

        def view(x: RecordedColumns) -> Any:
            target, first = in_place.get(x.storage, (x.storage, 0))
            is_shared = target in shared.storages
            offset = (shared_offsets if is_shared else offsets)[target] + first + x.first
            return native.View(offset, target.columns, x.columns, x.storage in logits_only, is_shared)

        arena = group.allocate(4 * (shared_size + SLACK)) if group else None
        widest = native.Tape.quantized_bytes(max_tokens, shared.widest_input)
        quantized = group.allocate(2 * widest)[: 2 * widest] if group and widest else None
        self._cache = cache
        self._tape = _new_tape(
            cache,
            max_tokens=max_tokens,
            arena_size=arena_size,
            num_threads=num_threads,
            group=group.native if group else None,
            shared=arena,
            shared_groups=quantized,
        )
        self.takes_trees = cache.spec.takes_trees
        self.chain: Chain | None = None
        for emit in recorder.emits:
            emit(self._tape, view)
        self._held = (recorder.emits, cache, group, arena, quantized)  # the tape points into their weights and pages
        self._logits: Float32 = np.empty((1, logits.vocab_size), dtype=np.float32)
        self._vocabulary = logits.vocabulary
        self._all_tokens: Float32 | None = None  # logits of the whole vocabulary, where the head has a part of it
        self.kept = recorder.kept
        if group is not None and shared.logits:
            rows = group.allocate(4 * max_tokens * logits.vocab_size).view(np.float32)
            self._logits = rows[: max_tokens * logits.vocab_size].reshape(max_tokens, logits.vocab_size)
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
            **(self._cache.find_pages(batch) if self._cache.spec.windows else {}),
        )
        return self._logits[:num_rows] if self._vocabulary is None else self._with_all_tokens(num_rows)

    def _with_all_tokens(self, num_rows: int) -> Float32:
        assert self._vocabulary is not None
        if self._all_tokens is None or len(self._all_tokens) < num_rows:
            self._all_tokens = self._vocabulary.new_lines(num_rows)
        self._vocabulary.write(self._logits[:num_rows], self._all_tokens[:num_rows])
        return self._all_tokens[:num_rows]


def _new_tape(cache: NativeCache, **sizes: Any) -> Any:
    """An empty tape that works on the pages, states and index keys of a cache."""
    spec, conv = cache.spec, cache.spec.conv
    tape = native.Tape(
        cache.pages,
        num_blocks=cache.num_blocks,
        num_layers=spec.block_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        dtype=spec.dtype,
        latent=spec.latent,
        conv_layers=conv.num_layers if conv else 0,
        conv_rows=conv.taps - 1 if conv else 0,
        conv_channels=conv.channels if conv else 0,
        **sizes,
    )
    if (windows := spec.windows) is not None:
        pages = cache.window_pages
        tape.use_window_pages(
            pages, num_pages=windows.num_pages, num_layers=0 if spec.compressed else len(windows.layers)
        )
    if (states := spec.states) is not None:
        assert states.num_slots > 0, "the cache has no state slots"
        tape.use_states(
            cache.slots,
            num_slots=states.num_slots,
            num_layers=states.num_layers,
            conv_rows=states.conv_taps - 1,
            conv_channels=states.conv_channels,
            size=prod(states.shape),
        )
    if spec.compressed is not None:
        layers = [(one.columns, one.group, *one.parts, *(0, 0)[len(one.parts) :]) for one in spec.compressed.layers]
        tape.use_compressed(layers, cache.pages, cache.window_pages if spec.windows else None)
    if spec.index is not None:
        tape.use_index(cache.index_keys, spec.index.columns)
    return tape
