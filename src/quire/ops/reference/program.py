"""A forward pass that runs eagerly, and the batch that its ops take."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.ops.opset import Chain, Float32, Int32, Program, StepBatch
from quire.ops.reference.cache import TorchCache
from quire.ops.reference.sampler import TorchSampler
from quire.ops.reference.states import TorchStates


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """A `StepBatch` on the device, with the cache that it reads and writes."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    seq_starts: list[int]
    context_lens: list[int]
    block_tables: Tensor
    logit_rows: Tensor
    cache: TorchCache
    source_lens: list[int]
    source_tables: Tensor | None
    adapters: Tensor | None = None
    ancestors: list[int] | None = None
    hidden: Tensor | None = None  # [T, columns] rows that `hidden_states` reads
    kept: list[Tensor] = field(default_factory=list)
    states: list[list[int]] = field(default_factory=list)  # segments: (end, source, target)

    @property
    def trees(self) -> dict[str, Any]:
        """The arguments that attention takes where drafts are trees."""
        return {} if self.ancestors is None else {"ancestors": self.ancestors, "positions": self.positions.tolist()}

    @property
    def slots_of_states(self) -> TorchStates:
        assert self.cache.slots is not None, "the cache has no state slots"
        return self.cache.slots


@dataclass(frozen=True, slots=True, eq=False)
class TorchHiddenStates:
    rows: Tensor  # [num_rows, columns]

    def put(self, rows: Int32, program: Program, lines: Int32) -> None:
        assert program.kept is not None, "the program keeps no hidden states"
        self.rows[torch.from_numpy(rows).long()] = program.kept[torch.from_numpy(lines).long()]

    def load(self, values: Float32) -> None:
        self.rows[: len(values)] = torch.from_numpy(values).to(self.rows.device)


class TorchProgram:
    """Runs the forward pass eagerly, every step."""

    def __init__(
        self,
        device: str,
        forward: Callable[[Any], Tensor],
        cache: TorchCache,
        max_tokens: int,
        sampler: TorchSampler | None,
        hidden: TorchHiddenStates | None,
    ) -> None:
        self._device, self._forward, self._cache = device, forward, cache
        self._max_tokens, self._sampler, self._hidden = max_tokens, sampler, hidden
        self.kept: Tensor | None = None
        self.takes_trees = cache.spec.takes_trees
        self.chain: Chain | None = None

    def run(self, batch: StepBatch) -> Tensor:
        assert batch.num_tokens <= self._max_tokens, f"{batch.num_tokens} tokens, compiled for {self._max_tokens}"
        step = self._on_device(batch)
        logits = self._forward(step)
        self.kept = step.kept[0] if step.kept else None
        return logits

    def _resolve_ids(self, ids: Int32) -> Int32:
        if self._sampler is None or min(ids) >= 0:
            return ids
        return np.array([token if token >= 0 else self._sampler.last(~token) for token in ids], np.int32)

    def _on_device(self, batch: StepBatch) -> TorchBatch:
        def index(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(self._device)

        hidden = None
        if batch.hidden_rows is not None and self._hidden is not None:
            hidden = self._hidden.rows[index(batch.hidden_rows)]
        return TorchBatch(
            ids=index(self._resolve_ids(batch.ids)),
            positions=index(batch.positions),
            slots=index(batch.slots),
            seq_starts=batch.seq_starts.tolist(),
            context_lens=batch.context_lens.tolist(),
            block_tables=index(batch.block_tables),
            logit_rows=index(batch.logit_rows),
            cache=self._cache,
            source_lens=[] if batch.source_lens is None else batch.source_lens.tolist(),
            source_tables=None if batch.source_tables is None else index(batch.source_tables),
            adapters=None if batch.adapters is None else index(batch.adapters),
            ancestors=None if batch.ancestors is None else batch.ancestors.tolist(),
            hidden=hidden,
            states=[] if batch.states is None else batch.states.tolist(),
        )
