"""A forward pass on the GPU: steps that only decode replay a CUDA graph, others are launched op by op.

A graph is captured for each of a ladder of batch sizes; a step takes the next larger one and pads. The arrays of a step
travel in one copy from pinned memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.ops.opset import Int32, StepBatch
from quire.ops.torch.cache import TorchCache
from quire.ops.torch.gpu_batch import GpuBatch, Ids
from quire.ops.torch.kernels.attention_pages import Runs

MOST_CAPTURED = 512  # sequences: larger steps keep the GPU busy while the next ops are launched


def ladder(most: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 to 64, of 16 to 256 and of 32: a step pads by few."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MOST_CAPTURED + 1, 32)]
    return sorted({min(size, most) for size in sizes})


TOKENS_BESIDE_A_PROMPT = 128  # of other sequences, in the step that is tried out


def written_nowhere(lengths: Sequence[int], block_size: int, sources: bool = False) -> StepBatch:
    """A step of prompts of these lengths: to see how much memory it takes, or to have its kernels compiled."""
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    return StepBatch(
        ids=np.zeros(starts[-1], np.int32),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        slots=np.full(starts[-1], -1, np.int32),
        seq_starts=starts,
        context_lens=np.array(lengths, np.int32),
        block_tables=np.zeros((len(lengths), -(-max(lengths) // block_size)), np.int32),
        logit_rows=starts[1:] - 1,
        source_lens=np.ones(len(lengths), np.int32) if sources else None,
        source_tables=np.zeros((len(lengths), 1), np.int32) if sources else None,
    )


class Inputs:
    """The arrays of a step of S decoding sequences: here, on the way, and where the graph reads them.

    Here there are two sets, taken in turn: while one is on the way, the next step is written."""

    def __init__(self, size: int, width: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(size * (5 + width), dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._device = torch.zeros_like(self._hosts[0], device=device)
        self._arrived = [torch.cuda.Event() for _ in self._hosts] if pinned else []
        self.size, self.width = size, width
        self.tensors = self._views(self._device)
        for slots in (self.tensors[2], self.tensors[4]):  # until a step is sent, all of it is padding
            slots.fill_(-1)
        self.seq_starts = torch.arange(size + 1, dtype=torch.int32, device=device)

    def _views(self, flat: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
        """ids, positions, slots, context_lens, adapters [S], block_tables [S, W]"""
        n = self.size
        lines = flat[: 5 * n].reshape(5, n)
        return lines[0], lines[1], lines[2], lines[3], lines[4], flat[5 * n :].reshape(n, self.width)

    def send(self, batch: StepBatch) -> None:
        self._hosts.reverse()
        self._arrived.reverse()
        host, n = self._hosts[0], batch.num_tokens
        if self._arrived:
            self._arrived[0].synchronize()  # its last use is two steps ago: there is nothing to wait for
        ids, positions, slots, context_lens, adapters, tables = self._views(host.numpy())
        ids[:n], positions[:n], slots[:n], context_lens[:n] = (
            batch.ids,
            batch.positions,
            batch.slots,
            batch.context_lens,
        )
        adapters[:n] = -1 if batch.adapters is None else batch.adapters
        slots[n:], context_lens[n:], adapters[n:] = -1, 0, -1
        used = min(batch.block_tables.shape[1], self.width)
        tables[:n, :used] = batch.block_tables[:, :used]
        self._device.copy_(host, non_blocking=True)
        if self._arrived:
            self._arrived[0].record()


class GpuProgram:
    def __init__(
        self,
        forward: Callable[[GpuBatch], Tensor],
        cache: TorchCache,
        max_tokens: int,
        max_rows: int,
        max_model_len: int,
        *,
        last: Tensor | None = None,  # what each row has drawn last, for ids below zero
        graphs: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self._last, self._batch_invariant = last, batch_invariant
        self._forward, self._cache, self._max_tokens = forward, cache, max_tokens
        self._device = cache.k.device
        self._max_model_len = max_model_len
        self._width = -(-max_model_len // cache.spec.block_size)
        self._sizes = ladder(min(max_rows, max_tokens)) if graphs and self._device.type == "cuda" else []
        self._inputs: dict[int, Inputs] = {}
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # by size, and with adapters
        self._adapts = False  # whether the forward pass asks for adapters
        with torch.inference_mode():
            for size in reversed(self._sizes):  # the largest first: the others fit into its memory
                self._inputs[size] = Inputs(size, self._width, self._device)
                self._capture(size, adapted=False)
                if self._adapts:  # steps in which nobody has one do without
                    self._capture(size, adapted=True)
            if self._sizes:
                self._try_prompts(max_rows)

    def run(self, batch: StepBatch) -> Tensor:
        """-> logits [R, vocab], valid until the next run."""
        with torch.inference_mode():
            return self._run(batch)

    def _run(self, batch: StepBatch) -> Tensor:
        n = batch.num_tokens
        assert n <= self._max_tokens, f"{n} tokens, compiled for {self._max_tokens}"
        only_decodes = len(batch.context_lens) == n == len(batch.logit_rows)
        if only_decodes and self._sizes and n <= self._sizes[-1]:
            size = next(size for size in self._sizes if size >= n)
            graph, logits = self._graphs[size, batch.adapters is not None]
            self._inputs[size].send(batch)
            graph.replay()
            return logits[:n]
        return self._forward(self._on_device(batch))

    def _try_prompts(self, max_rows: int) -> None:
        """Compiles what steps with prompts take, which would otherwise stop the first of them for seconds."""
        others = min(TOKENS_BESIDE_A_PROMPT, max_rows - 1, self._max_tokens // 2)
        prompt = min(self._max_tokens - others, self._max_model_len)
        for lengths in ([prompt], [prompt] + [1] * others):
            step = written_nowhere(lengths, self._cache.spec.block_size)
            self._forward(self._on_device(step))
            if self._adapts:
                self._forward(self._on_device(replace(step, adapters=np.zeros_like(step.ids))))

    def _capture(self, size: int, adapted: bool) -> None:
        inputs = self._inputs[size]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            batch = self._decoding(inputs, adapted)
            self._forward(batch)  # compiles, and lets libraries allocate
            self._adapts = batch.adapts
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            logits = self._forward(self._decoding(inputs, adapted))
            if adapted:  # where those without are: logits are large, and there are many graphs
                logits = self._graphs[size, False][1].copy_(logits)
        self._graphs[size, adapted] = (graph, logits)

    def _decoding(self, inputs: Inputs, adapted: bool) -> GpuBatch:
        ids, positions, slots, context_lens, adapters, tables = inputs.tensors
        runs = Runs(inputs.seq_starts, context_lens, tables)
        rows = inputs.seq_starts[:-1]
        return GpuBatch(
            Ids(ids, self._last),
            positions,
            slots,
            runs,
            rows,
            self._cache,
            self._max_model_len,
            decodes=True,
            prefills=False,
            batch_invariant=self._batch_invariant,
            all_logits=True,
            adapters=adapters if adapted else None,
        )

    def _on_device(self, batch: StepBatch) -> GpuBatch:
        counts = np.diff(batch.seq_starts)
        names = ("ids", "positions", "slots", "seq_starts", "context_lens", "logit_rows", "block_tables")
        arrays: list[Int32] = [getattr(batch, name) for name in names]
        arrays += [] if batch.adapters is None else [batch.adapters]
        flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
        if self._device.type == "cuda":
            flat = flat.pin_memory()
        parts = flat.to(self._device, non_blocking=True).split([array.size for array in arrays])
        ids, positions, slots, seq_starts, context_lens, logit_rows, tables, *adapters = parts
        runs = Runs(seq_starts, context_lens, tables.view(batch.block_tables.shape))
        return GpuBatch(
            Ids(ids, self._last),
            positions,
            slots,
            runs,
            logit_rows,
            self._cache,
            self._max_model_len,
            decodes=bool((counts == 1).any()),
            prefills=bool((counts > 1).any()),
            host_starts=batch.seq_starts if (counts > 1).any() else None,
            batch_invariant=self._batch_invariant,
            adapters=adapters[0] if adapters else None,
            sources=None if batch.source_lens is None else self._sources(batch, counts, positions, slots),
        )

    def _sources(self, batch: StepBatch, counts: Int32, positions: Tensor, slots: Tensor) -> GpuBatch:
        """What tokens attend to of sources: each for itself, as if it were the next token behind the source."""
        assert batch.source_lens is not None and batch.source_tables is not None
        starts = np.arange(batch.num_tokens + 1, dtype=np.int32)
        arrays = starts, np.repeat(batch.source_lens, counts), np.repeat(batch.source_tables, counts, axis=0)
        runs = Runs(*(torch.from_numpy(array).to(self._device, non_blocking=True) for array in arrays))
        return GpuBatch(
            Ids(positions, None),
            positions,
            slots,
            runs,
            positions,
            self._cache,
            self._max_model_len,
            decodes=True,
            prefills=False,
            host_starts=starts,
            batch_invariant=self._batch_invariant,
        )
