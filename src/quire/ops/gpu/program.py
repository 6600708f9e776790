"""A forward pass on the GPU: steps replay a CUDA graph, unless they have so many tokens that launching is no burden.

There are graphs for steps that only decode and for steps with prompts, each for a ladder of sizes without those that a
larger one outruns; a step takes the next larger one and pads. The arrays of a step travel in one copy from pinned
memory."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.ops.gpu.attention.pages import Runs
from quire.ops.gpu.batch import GpuBatch, Ids
from quire.ops.gpu.cache import GpuCache
from quire.ops.opset import Int32, StepBatch

MOST_CAPTURED = 512  # sequences: larger steps keep the GPU busy while the next ops are launched
ALIGNED = 16  # numbers: a kernel is compiled again for arrays that begin elsewhere, and for tables of other widths
WITH_PROMPTS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # tokens, likewise
OUTRUN = 1.03  # times what a larger step takes: what differs by less may be chance, and is kept


def ladder(most: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 to 64, of 16 to 256 and of 32: a step pads by few."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MOST_CAPTURED + 1, 32)]
    return sorted({min(size, most) for size in sizes})


def aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


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


def cut(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Arrays of these sizes, each aligned."""
    parts = flat.split([aligned(size) for size in sizes])
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


class Inputs:
    """The arrays of a step of at most T tokens in S sequences: here, on the way, and where the graph reads them. If it
    `decodes`, every sequence has one token.

    Here there are two sets, taken in turn: while one is on the way, the next step is written."""

    def __init__(self, num_tokens: int, num_seqs: int, width: int, device: torch.device, decodes: bool) -> None:
        pinned = device.type == "cuda"
        self._sizes = [*[num_tokens] * 4, *[num_seqs] * 2, num_seqs + 1, num_seqs * width]
        length = sum(map(aligned, self._sizes))
        self._hosts = [torch.zeros(length, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._arrived = [torch.cuda.Event() for _ in self._hosts] if pinned else []
        self.num_tokens, self.num_seqs, self.width, self.decodes = num_tokens, num_seqs, width, decodes
        self._arrays = [[view.numpy() for view in self._views(host)] for host in self._hosts]
        for _, _, slots, adapters, _, logit_rows, seq_starts, _ in self._arrays:  # until one is sent, all is padding
            slots[:], adapters[:] = -1, -1
            if decodes:
                logit_rows[:], seq_starts[:] = np.arange(num_seqs), np.arange(num_seqs + 1)
        self._device = self._hosts[0].to(device)
        self.tensors = self._views(self._device)

    def _views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """ids, positions, slots, adapters [T], context_lens, logit_rows [S], seq_starts [S + 1], block_tables [S, W]"""
        *lines, tables = cut(flat, self._sizes)
        return *lines, tables.view(self.num_seqs, self.width)

    def send(self, batch: StepBatch) -> None:
        for one_of_each in (self._hosts, self._arrays, self._arrived):
            one_of_each.reverse()
        if self._arrived:
            self._arrived[0].synchronize()  # its last use is two steps ago: there is nothing to wait for
        ids, positions, slots, adapters, context_lens, logit_rows, seq_starts, tables = self._arrays[0]
        n, s, r = batch.num_tokens, len(batch.context_lens), len(batch.logit_rows)
        ids[:n], positions[:n], slots[:n], context_lens[:s] = (
            batch.ids,
            batch.positions,
            batch.slots,
            batch.context_lens,
        )
        adapters[:n] = -1 if batch.adapters is None else batch.adapters
        slots[n:], adapters[n:], context_lens[s:] = -1, -1, 0
        if not self.decodes:
            seq_starts[: s + 1], logit_rows[:r] = batch.seq_starts, batch.logit_rows
            seq_starts[s + 1 :], logit_rows[r:] = n, 0
        used = min(batch.block_tables.shape[1], self.width)
        tables[:s, :used] = batch.block_tables[:, :used]
        self._device.copy_(self._hosts[0], non_blocking=True)
        if self._arrived:
            self._arrived[0].record()


class Borrowed:
    """A tensor's memory, not held: what is captured next may use it too. Good until another graph is replayed."""

    def __init__(self, tensor: Tensor) -> None:
        self._dtype = tensor.dtype
        kind = {2: "<i2", 4: "<i4"}[tensor.element_size()]
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "typestr": kind,
            "version": 2,
        }

    def tensor(self, device: torch.device) -> Tensor:
        return torch.as_tensor(self, device=device).view(self._dtype)


@dataclass(frozen=True, slots=True)
class Captured:
    inputs: Inputs
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # valid until another graph is replayed

    def milliseconds(self) -> float:
        """Of a step with as many tokens and no context."""
        times: list[float] = []
        for _ in range(3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return min(times)


def without_outrun(times: dict[int, float]) -> list[int]:
    """The sizes, ascending, that no larger one outruns: a library may take longer for 448 rows than for 512."""
    kept, best = [], math.inf
    for size in sorted(times, reverse=True):
        if times[size] < OUTRUN * best:
            kept.append(size)
        best = min(best, times[size])
    return kept[::-1]


class GpuProgram:
    def __init__(
        self,
        forward: Callable[[GpuBatch], Tensor],
        cache: GpuCache,
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
        self._width = aligned(-(-max_model_len // cache.spec.block_size))
        self._pool: tuple[int, int] | None = None  # of the graphs' memory, which all share: one is replayed at a time
        self._decoding: dict[bool, dict[int, Captured]] = {}  # with adapters or not, by size
        self._with_prompts: dict[int, Captured] = {}
        self._adapts = False  # whether the forward pass asks for adapters
        if graphs and self._device.type == "cuda":
            with torch.inference_mode():
                self._capture_all(max_rows)
                self._try_prompts(max_rows)

    def run(self, batch: StepBatch) -> Tensor:
        """-> logits [R, vocab], valid until the next run."""
        with torch.inference_mode():
            return self._run(batch)

    def _run(self, batch: StepBatch) -> Tensor:
        n = batch.num_tokens
        assert n <= self._max_tokens, f"{n} tokens, compiled for {self._max_tokens}"
        if captured := self._captured(batch):
            captured.inputs.send(batch)
            captured.graph.replay()
            return captured.logits[: len(batch.logit_rows)]
        return self._forward(self._on_device(batch))

    def _captured(self, batch: StepBatch) -> Captured | None:
        """The smallest graph for such a step, if there is one."""
        n, rows = batch.num_tokens, len(batch.logit_rows)
        if len(batch.context_lens) == n == rows:
            graphs = self._decoding.get(batch.adapters is not None, {})
            return next((found for size, found in graphs.items() if size >= n), None)
        if batch.adapters is not None or batch.source_lens is not None:
            return None
        fitting = (found for size, found in self._with_prompts.items() if size >= n)
        return next((found for found in fitting if found.inputs.num_seqs >= rows), None)

    def _try_prompts(self, max_rows: int) -> None:
        """Compiles what steps with prompts take, which would otherwise stop the first of them for seconds."""
        others = min(TOKENS_BESIDE_A_PROMPT, max_rows - 1, self._max_tokens // 2)
        prompt = min(self._max_tokens - others, self._max_model_len)
        for lengths in ([prompt], [prompt] + [1] * others):
            step = written_nowhere(lengths, self._cache.spec.block_size)
            self._forward(self._on_device(step))
            if self._adapts:
                self._forward(self._on_device(replace(step, adapters=np.zeros_like(step.ids))))

    def _capture_all(self, max_rows: int) -> None:
        """The largest first: the others fit into its memory."""
        sizes = [n for n in WITH_PROMPTS if n <= self._max_tokens]
        self._with_prompts = self._quick(
            self._capture(Inputs(size, min(size, max_rows), self._width, self._device, decodes=False), adapted=False)
            for size in reversed(sizes)
        )
        sizes = ladder(min(max_rows, self._max_tokens))
        inputs = [Inputs(size, size, self._width, self._device, decodes=True) for size in reversed(sizes)]
        self._decoding[False] = self._quick(self._capture(one, adapted=False) for one in inputs)
        if self._adapts:  # steps in which nobody has one do without
            self._decoding[True] = self._quick(self._capture(one, adapted=True) for one in inputs)

    def _quick(self, graphs: Iterable[Captured]) -> dict[int, Captured]:
        found = {one.inputs.num_tokens: one for one in graphs}
        kept = without_outrun({size: one.milliseconds() for size, one in found.items()})
        return {size: found[size] for size in kept}

    def _capture(self, inputs: Inputs, adapted: bool) -> Captured:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            batch = self._read_from(inputs, adapted)
            self._forward(batch)  # compiles, and lets libraries allocate
            self._adapts = batch.adapts
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = Borrowed(self._forward(self._read_from(inputs, adapted)))
        self._pool = graph.pool()
        return Captured(inputs, graph, logits.tensor(self._device))

    def _read_from(self, inputs: Inputs, adapted: bool) -> GpuBatch:
        ids, positions, slots, adapters, context_lens, logit_rows, seq_starts, tables = inputs.tensors
        return GpuBatch(
            Ids(ids, self._last),
            positions,
            slots,
            Runs(seq_starts, context_lens, tables),
            logit_rows,
            self._cache,
            self._max_model_len,
            decodes=True,
            prefills=not inputs.decodes,
            batch_invariant=self._batch_invariant,
            all_logits=inputs.decodes,
            adapters=adapters if adapted else None,
        )

    def _on_device(self, batch: StepBatch) -> GpuBatch:
        counts = np.diff(batch.seq_starts)
        num_seqs, width = batch.block_tables.shape
        tables = np.zeros((num_seqs, aligned(width)), np.int32)
        tables[:, :width] = batch.block_tables
        names = ("ids", "positions", "slots", "seq_starts", "context_lens", "logit_rows")
        arrays: list[Int32] = [*(getattr(batch, name) for name in names), tables]
        arrays += [] if batch.adapters is None else [batch.adapters]
        sizes = [array.size for array in arrays]
        flat = torch.empty(sum(map(aligned, sizes)), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        for part, array in zip(cut(flat, sizes), arrays, strict=True):
            part.numpy()[:] = array.ravel()
        parts = cut(flat.to(self._device, non_blocking=True), sizes)
        ids, positions, slots, seq_starts, context_lens, logit_rows, table, *adapters = parts
        runs = Runs(seq_starts, context_lens, table.view(tables.shape))
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
            batch_invariant=self._batch_invariant,
        )
