"""Encodes texts, as many at a time as a step takes. Nothing is kept between steps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from quire.core.encode_request import EncodeInput
from quire.models.config import EncoderConfig, ModelConfig
from quire.models.loading import LoadedModel
from quire.ops.kv_spec import KVSpec
from quire.ops.opset import Float32, OpSet, ProgramSpec, StepBatch
from quire.runtime.kv import kv_spec

BLOCK_SIZE = 16

Wanted = Literal["first", "last", "all"]  # tokens of a text


def encoder_spec(config: ModelConfig, kv_dtype: str = "auto") -> KVSpec:
    """The KV cache of a decoder that encodes; a bidirectional model has no pages."""
    layers = 0 if config.bidirectional else config.kv_layers
    spec = replace(kv_spec(config, BLOCK_SIZE, kv_dtype), num_layers=layers)
    if spec.states:  # every text starts without one, and none goes on from what it leaves
        spec = replace(spec, states=replace(spec.states, num_slots=1))
    return spec


class EncoderRunner:
    """One model on one device: an encoder, or a decoder whose KV pages each step overwrites."""

    def __init__(
        self,
        ops: OpSet,
        model: LoadedModel,
        *,
        max_tokens: int,  # of a step; a longer text has a step of its own
        max_rows: int,  # texts of a step
        max_model_len: int,  # tokens of a text
        kv_dtype: str = "auto",
    ) -> None:
        config = model.config
        self._step_tokens, self._max_rows, self._max_model_len = max_tokens, max_rows, max_model_len
        self._kinds = config.segments if isinstance(config, EncoderConfig) else 1
        self._max_position = config.max_position
        step_tokens = max(max_tokens, max_model_len)
        spec = encoder_spec(config, kv_dtype)
        self._has_slots = spec.states is not None
        cache = ops.new_cache(spec, -(-step_tokens // BLOCK_SIZE) + max_rows)
        self._program = ops.compile(model.forward, cache, ProgramSpec(step_tokens, max_rows, max_model_len))

    def run(self, texts: Sequence[EncodeInput], wanted: Wanted, take: Callable[[Float32], Any]) -> list[Any]:
        """take(rows) of every text: the hidden states [n, columns] of the wanted tokens."""
        return [taken for step in self._steps(texts) for taken in self._run(step, wanted, take)]

    def _steps(self, texts: Sequence[EncodeInput]) -> Iterator[Sequence[EncodeInput]]:
        """Texts by step, in the given order: without padding, sorting by length gains nothing."""
        first, num_tokens = 0, 0
        for index, text in enumerate(texts):
            assert 0 < len(text.ids) <= self._max_model_len, f"{len(text.ids)} tokens"
            if index - first == self._max_rows or (index > first and num_tokens + len(text.ids) > self._step_tokens):
                yield texts[first:index]
                first, num_tokens = index, 0
            num_tokens += len(text.ids)
        if first < len(texts):
            yield texts[first:]

    def _run(self, texts: Sequence[EncodeInput], wanted: Wanted, take: Callable[[Float32], Any]) -> list[Any]:
        batch = self._batch(texts, wanted)
        rows = _on_host(self._program.run(batch))
        if wanted != "all":
            return [take(rows[i : i + 1]) for i in range(len(texts))]
        return [take(rows[a:b]) for a, b in zip(batch.seq_starts, batch.seq_starts[1:], strict=False)]

    def _batch(self, texts: Sequence[EncodeInput], wanted: Wanted) -> StepBatch:
        lengths = np.array([len(text.ids) for text in texts], np.int32)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        places = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
        blocks = -(-lengths // BLOCK_SIZE)
        first_blocks = np.concatenate([[0], np.cumsum(blocks)[:-1]]).astype(np.int32)
        rows = {"first": starts[:-1], "last": starts[1:] - 1, "all": np.arange(starts[-1], dtype=np.int32)}
        return StepBatch(
            ids=np.concatenate([np.asarray(text.ids, np.int32) for text in texts]),
            positions=places + self._segment_offsets(texts),
            slots=np.repeat(first_blocks * BLOCK_SIZE, lengths) + places,
            seq_starts=starts,
            context_lens=lengths,
            block_tables=first_blocks[:, None] + np.arange(blocks.max(), dtype=np.int32),
            logit_rows=np.ascontiguousarray(rows[wanted]),
            states=np.array([(end, -1, 0) for end in starts[1:].tolist()], np.int32) if self._has_slots else None,
        )

    def _segment_offsets(self, texts: Sequence[EncodeInput]) -> Any:
        """What is added to positions for the kind of segment that a token is in: see EncoderConfig."""
        if self._kinds == 1 or all(text.segments is None for text in texts):
            return np.int32(0)
        segments = [np.zeros(len(t.ids), np.int32) if t.segments is None else np.asarray(t.segments) for t in texts]
        return np.concatenate(segments).astype(np.int32) * np.int32(self._max_position)


def _on_host(rows: Any) -> Float32:
    """Tensors may be on a device, in 16 bits."""
    return np.asarray(rows.float().cpu() if hasattr(rows, "cpu") else rows)
