"""A forward pass on the GPU: a step replays a CUDA graph, unless it has so many tokens that launching costs nothing.

There are graphs for steps that only decode and graphs for steps with prompts, each for a list of sizes, and graphs for
trees of drafts where a speculative method makes them. A step is padded to the next larger size. A size that is slower
than a larger one has no graph. The arrays of a step travel in one copy from pinned memory."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.ops.gpu.attention.pages import Runs, next_power_of_two
from quire.ops.gpu.attention.paths import Paths, split_trees
from quire.ops.gpu.batch import GpuBatch, TokenIds
from quire.ops.gpu.cache import GpuCache
from quire.ops.gpu.chain import DraftChain
from quire.ops.gpu.compile_ahead import compile_ahead
from quire.ops.gpu.hidden_states import GpuHiddenStates
from quire.ops.gpu.sampling.sampler import DeviceSampler
from quire.ops.gpu.states.segments import (
    SegmentInputs,
    are_independent,
    has_states,
    segments_on_device,
    taps_of,
    with_segments,
)
from quire.ops.opset import WORD_BITS, Chain, Int32, StepBatch

log = logging.getLogger("quire.gpu")

MAX_CAPTURED_SEQS = 512  # larger steps keep the GPU busy while the next ops are launched
ALIGNMENT = 16  # int32: a kernel is compiled again for arrays that begin elsewhere, and for tables of other widths
PREFILL_GRAPH_SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # tokens
TREE_GRAPH_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)  # tokens
MAX_DRAFTED_ROWS = 256  # logits of a step whose drafts are verified by a graph, if there are fewer sequences
MAX_SLOWDOWN = 1.03  # times the milliseconds of a larger size: a size within it keeps its graph, as times vary


def decode_graph_sizes(max_size: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 64, every 16 up to 256, every 32: a step is padded by little."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MAX_CAPTURED_SEQS + 1, 32)]
    return sorted({min(size, max_size) for size in sizes})


def round_up(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


WARMUP_DECODE_TOKENS = 128  # beside a prompt


def dry_run_batch(lengths: Sequence[int], block_size: int, sources: bool = False) -> StepBatch:
    """A step of prompts of these lengths that writes no page: to measure its memory, or to compile its kernels."""
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


def split_aligned(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Consecutive arrays of these sizes, each aligned."""
    parts = flat.split([round_up(size) for size in sizes])
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


class GraphInputs:
    """The arrays of a step of at most T tokens in S sequences, R of which have logits: in pinned memory, and on the
    device where the graph reads them. If it `decodes`, every sequence has one token. With `max_queries` above 1, drafts
    may be trees, and a sequence that has one has at most that many tokens.

    The host has two sets, used in turn: while one is being copied, the next step is written into the other."""

    def __init__(
        self,
        num_tokens: int,
        num_seqs: int,
        width: int,
        device: torch.device,
        decodes: bool,
        max_queries: int = 1,
        num_rows: int | None = None,  # as many as sequences
        state_taps: int | None = None,
    ) -> None:
        pinned = device.type == "cuda"
        self.max_queries, self.num_rows = max_queries, num_rows or num_seqs
        self.segments: SegmentInputs | None = None
        if state_taps is not None:
            self.segments = SegmentInputs(num_tokens, num_seqs, state_taps, device, decodes)
        num_words = num_tokens if max_queries > 1 else 0
        self._sizes = [2 * num_words, *[num_tokens] * 5, num_seqs, self.num_rows, num_seqs + 1, num_seqs * width]
        length = sum(map(round_up, self._sizes))
        self._hosts = [torch.zeros(length, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._hosts] if pinned else []
        self.num_tokens, self.num_seqs, self.width, self.decodes = num_tokens, num_seqs, width, decodes
        self._arrays = [[view.numpy() for view in self._views(host)] for host in self._hosts]
        for (
            _,
            _,
            _,
            slots,
            adapters,
            _,
            _,
            logit_rows,
            seq_starts,
            _,
        ) in self._arrays:  # until a step is sent, all is padding
            slots[:], adapters[:] = -1, -1
            if decodes:
                logit_rows[:], seq_starts[:] = np.arange(num_seqs), np.arange(num_seqs + 1)
        self._device = self._hosts[0].to(device)
        self.tensors = self._views(self._device)

    def _views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """ancestors [T] int64 (of trees), ids, positions, slots, adapters, hidden_rows [T], context_lens [S],
        logit_rows [R], seq_starts [S + 1], block_tables [S, W]"""
        words, *lines, tables = split_aligned(flat, self._sizes)
        return words.view(torch.int64), *lines, tables.view(self.num_seqs, self.width)

    def send(self, batch: StepBatch) -> None:
        for pair in (self._hosts, self._arrays, self._sent):
            pair.reverse()
        if self._sent:
            self._sent[0].synchronize()  # its last use is two steps ago: there is nothing to wait for
        words, ids, positions, slots, adapters, hidden_rows, context_lens, logit_rows, seq_starts, tables = (
            self._arrays[0]
        )
        n, s, r = batch.num_tokens, len(batch.context_lens), len(batch.logit_rows)
        ids[:n], positions[:n], slots[:n], context_lens[:s] = (
            batch.ids,
            batch.positions,
            batch.slots,
            batch.context_lens,
        )
        adapters[:n] = -1 if batch.adapters is None else batch.adapters
        hidden_rows[:n] = 0 if batch.hidden_rows is None else batch.hidden_rows
        slots[n:], adapters[n:], hidden_rows[n:], context_lens[s:] = -1, -1, 0, 0
        if batch.ancestors is not None:
            words[:n] = batch.ancestors
        if not self.decodes:
            seq_starts[: s + 1], logit_rows[:r] = batch.seq_starts, batch.logit_rows
            seq_starts[s + 1 :], logit_rows[r:] = n, 0
        used = min(batch.block_tables.shape[1], self.width)
        tables[:s, :used] = batch.block_tables[:, :used]
        self._device.copy_(self._hosts[0], non_blocking=True)
        if self._sent:
            self._sent[0].record()
        if self.segments is not None:
            self.segments.send(batch)


def _max_queries(batch: StepBatch) -> int:
    """Tokens of the longest sequence that may be a tree, up to a power of two: kernels are compiled for it."""
    counts = np.diff(batch.seq_starts)
    return next_power_of_two(int(counts[counts <= WORD_BITS].max()))


class WeakTensor:
    """A tensor whose memory is not held: graphs captured later may use it. Valid until another graph is replayed."""

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
class CapturedGraph:
    inputs: GraphInputs
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # valid until another graph is replayed
    kept: Tensor | None  # the same, of all tokens

    def milliseconds(self) -> float:
        """The time of a step of this size with empty contexts."""
        times: list[float] = []
        for _ in range(3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return min(times)


def drop_slower_sizes(times: dict[int, float]) -> list[int]:
    """The sizes, ascending, that are not slower than a larger one. (cuBLAS may take longer for 448 rows than for
    512.)"""
    kept, best = [], math.inf
    for size in sorted(times, reverse=True):
        if times[size] < MAX_SLOWDOWN * best:
            kept.append(size)
        best = min(best, times[size])
    return kept[::-1]


class GpuProgram:
    """MLA has no kernel for trees of drafts. Where rows must not depend on the batch (`batch_invariant`), no graph has
    them."""

    def __init__(
        self,
        forward: Callable[[GpuBatch], Tensor],
        cache: GpuCache,
        max_tokens: int,
        max_rows: int,
        max_model_len: int,
        *,
        sampler: DeviceSampler | None = None,  # ids below zero are the tokens that it has sampled last
        graphs: bool = False,
        batch_invariant: bool = False,
        hidden: GpuHiddenStates | None = None,
        tree_nodes: int = 0,
        agree: Callable[[list[int]], list[int]] = lambda sizes: sizes,  # on sizes that have a graph: of several ranks
    ) -> None:
        self._state_taps = taps_of(cache.spec) if has_states(cache.spec) else None
        self.takes_trees = not cache.spec.latent and self._state_taps is None
        self._last = None if sampler is None else sampler.last
        self._batch_invariant, self._hidden = batch_invariant, hidden
        self._agree = agree
        self.kept: Tensor | None = None
        self._forward, self._cache, self._max_tokens = forward, cache, max_tokens
        self._device = cache.k.device
        self._max_model_len = max_model_len
        self._width = round_up(-(-max_model_len // cache.spec.block_size))
        self.chain: Chain | None = None
        if sampler is not None and hidden is not None:
            limits = max_model_len, self._width, batch_invariant
            self.chain = DraftChain(forward, cache, sampler, hidden, *limits)
        self._pool: tuple[int, int] | None = None  # memory of the graphs, shared: one is replayed at a time
        self._decode_graphs: dict[bool, dict[int, CapturedGraph]] = {}  # by whether tokens have adapters, then by size
        self._prefill_graphs: dict[int, CapturedGraph] = {}
        self._tree_graphs: dict[int, CapturedGraph] = {}
        has_tree_graphs = tree_nodes > 0 and self.takes_trees and not batch_invariant
        self._tree_queries = next_power_of_two(1 + tree_nodes) if has_tree_graphs else 1
        self._adapts = False  # whether the forward pass asks for adapters
        if graphs and self._device.type == "cuda":
            with torch.inference_mode():
                compile_ahead(self._passes(max_rows))
                began = time.monotonic()
                self._capture_all(max_rows)
                self._warm_up_prefill(max_rows)
                log.info("CUDA graphs captured in %.1f s", time.monotonic() - began)

    def run(self, batch: StepBatch) -> Tensor:
        """-> logits [R, vocab], valid until the next run."""
        with torch.inference_mode():
            return self._run(batch)

    def _run(self, batch: StepBatch) -> Tensor:
        n = batch.num_tokens
        assert n <= self._max_tokens, f"{n} tokens, compiled for {self._max_tokens}"
        if self._state_taps is not None:
            batch = with_segments(batch, self._cache.spec)
        if captured := self._graph_for(batch):
            captured.inputs.send(batch)
            captured.graph.replay()
            self.kept = captured.kept
            return captured.logits[: len(batch.logit_rows)]
        step = self._on_device(batch)
        logits = self._forward(step)
        self.kept = step.kept
        return logits

    def _graph_for(self, batch: StepBatch) -> CapturedGraph | None:
        """The smallest graph that holds the step, if there is one."""
        n, rows = batch.num_tokens, len(batch.logit_rows)
        is_decode = len(batch.context_lens) == n == rows and batch.ancestors is None
        if is_decode and (batch.states is None or are_independent(batch.states)):
            graphs = self._decode_graphs.get(batch.adapters is not None, {})
            return next((graph for size, graph in graphs.items() if size >= n), None)
        if batch.adapters is not None or batch.source_lens is not None:
            return None
        if batch.ancestors is not None and _max_queries(batch) > self._tree_queries:
            return None
        graphs = self._prefill_graphs if batch.ancestors is None else self._tree_graphs
        fitting = (graph for size, graph in graphs.items() if size >= n)
        num_seqs = len(batch.context_lens)
        return next(
            (graph for graph in fitting if graph.inputs.num_seqs >= num_seqs and graph.inputs.num_rows >= rows), None
        )

    def _passes(self, max_rows: int) -> Iterator[Callable[[], object]]:
        """What is captured and warmed up later: all but trees and adapters."""
        for size in [n for n in PREFILL_GRAPH_SIZES if n <= self._max_tokens]:
            inputs = self._prefill_inputs(size, max_rows)
            yield partial(self._forward, self._batch_from(inputs, with_adapters=False))
        for size in decode_graph_sizes(min(max_rows, self._max_tokens)):
            inputs = self._decode_inputs(size)
            yield partial(self._forward, self._batch_from(inputs, with_adapters=False))
        for step in self._prefill_steps(max_rows):
            yield partial(self._forward, self._on_device(step))

    def _prefill_inputs(self, size: int, max_rows: int) -> GraphInputs:
        num_rows = min(size, max(max_rows, MAX_DRAFTED_ROWS))
        num_seqs, taps = min(size, max_rows), self._state_taps
        return GraphInputs(size, num_seqs, self._width, self._device, False, num_rows=num_rows, state_taps=taps)

    def _decode_inputs(self, size: int) -> GraphInputs:
        return GraphInputs(size, size, self._width, self._device, decodes=True, state_taps=self._state_taps)

    def _prefill_steps(self, max_rows: int) -> list[StepBatch]:
        others = min(WARMUP_DECODE_TOKENS, max_rows - 1, self._max_tokens // 2)
        prompt = min(self._max_tokens - others, self._max_model_len)
        steps = [dry_run_batch(lengths, self._cache.spec.block_size) for lengths in ([prompt], [prompt] + [1] * others)]
        return steps if self._state_taps is None else [with_segments(step, self._cache.spec) for step in steps]

    def _warm_up_prefill(self, max_rows: int) -> None:
        """Compile the kernels of steps with prompts, so that the first prompt does not wait seconds for them."""
        for step in self._prefill_steps(max_rows):
            self._forward(self._on_device(step))
            if self._adapts:
                self._forward(self._on_device(replace(step, adapters=np.zeros_like(step.ids))))

    def _capture_all(self, max_rows: int) -> None:
        """The largest first: the others fit into its memory."""
        sizes = [n for n in PREFILL_GRAPH_SIZES if n <= self._max_tokens]
        self._prefill_graphs = self._drop_slower(
            self._capture(self._prefill_inputs(size, max_rows), with_adapters=False) for size in reversed(sizes)
        )
        sizes = [n for n in TREE_GRAPH_SIZES if n <= self._max_tokens and self._tree_queries > 1]
        self._tree_graphs = self._drop_slower(
            self._capture(
                GraphInputs(
                    size,
                    min(size, max_rows),
                    self._width,
                    self._device,
                    decodes=False,
                    max_queries=min(self._tree_queries, WORD_BITS),
                    num_rows=size,
                ),
                with_adapters=False,
            )
            for size in reversed(sizes)
        )
        sizes = decode_graph_sizes(min(max_rows, self._max_tokens))
        inputs = [self._decode_inputs(size) for size in reversed(sizes)]
        self._decode_graphs[False] = self._drop_slower(self._capture(one, with_adapters=False) for one in inputs)
        if self._adapts:  # steps without adapters have graphs without them
            self._decode_graphs[True] = self._drop_slower(self._capture(one, with_adapters=True) for one in inputs)

    def _drop_slower(self, graphs: Iterable[CapturedGraph]) -> dict[int, CapturedGraph]:
        by_size = {graph.inputs.num_tokens: graph for graph in graphs}
        kept = self._agree(drop_slower_sizes({size: graph.milliseconds() for size, graph in by_size.items()}))
        return {size: by_size[size] for size in kept}

    def _capture(self, inputs: GraphInputs, with_adapters: bool) -> CapturedGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            batch = self._batch_from(inputs, with_adapters)
            self._forward(batch)  # kernels are compiled, and libraries allocate
            self._adapts = batch.adapts
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            batch = self._batch_from(inputs, with_adapters)
            logits = WeakTensor(self._forward(batch))
            kept = None if batch.kept is None else WeakTensor(batch.kept)
        del batch
        self._pool = graph.pool()
        return CapturedGraph(
            inputs, graph, logits.tensor(self._device), None if kept is None else kept.tensor(self._device)
        )

    def _batch_from(self, inputs: GraphInputs, with_adapters: bool) -> GpuBatch:
        words, ids, positions, slots, adapters, hidden_rows, context_lens, logit_rows, seq_starts, tables = (
            inputs.tensors
        )
        return GpuBatch(
            TokenIds(ids, self._last),
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
            adapters=adapters if with_adapters else None,
            ancestors=words if inputs.max_queries > 1 else None,
            max_queries=inputs.max_queries,
            hidden=None if self._hidden is None else self._hidden.rows[hidden_rows],
            segments=None if inputs.segments is None else inputs.segments.segments,
        )

    def _on_device(self, batch: StepBatch) -> GpuBatch:
        assert batch.ancestors is None or self.takes_trees, "there is no attention kernel for trees here"
        if batch.ancestors is not None and self._batch_invariant:
            step, begins, places = split_trees(batch)
            on_device = self._on_device(step)
            on_device.paths = Paths(*(torch.from_numpy(array).to(self._device) for array in (begins, places)))
            return on_device
        counts = np.diff(batch.seq_starts)
        num_seqs, width = batch.block_tables.shape
        tables = np.zeros((num_seqs, round_up(width)), np.int32)
        tables[:, :width] = batch.block_tables
        names = ("ids", "positions", "slots", "seq_starts", "context_lens", "logit_rows")
        arrays: list[Int32] = [*(getattr(batch, name) for name in names), tables]
        arrays += [array for array in (batch.adapters, batch.hidden_rows) if array is not None]
        max_queries = 1
        if batch.ancestors is not None:
            arrays.append(batch.ancestors.view(np.int32))
            max_queries = _max_queries(batch)
        sizes = [array.size for array in arrays]
        flat = torch.empty(sum(map(round_up, sizes)), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        for part, array in zip(split_aligned(flat, sizes), arrays, strict=True):
            part.numpy()[:] = array.ravel()
        parts = split_aligned(flat.to(self._device, non_blocking=True), sizes)
        words = None if batch.ancestors is None else parts.pop().view(torch.int64)
        ids, positions, slots, seq_starts, context_lens, logit_rows, table, *optional = parts
        hidden_rows = optional.pop() if batch.hidden_rows is not None else torch.zeros_like(positions)
        runs = Runs(seq_starts, context_lens, table.view(tables.shape))
        return GpuBatch(
            TokenIds(ids, self._last),
            positions,
            slots,
            runs,
            logit_rows,
            self._cache,
            self._max_model_len,
            decodes=bool((counts <= max_queries).any()),
            prefills=bool((counts > max_queries).any()),
            batch_invariant=self._batch_invariant,
            adapters=optional[0] if optional else None,
            ancestors=words,
            max_queries=max_queries,
            hidden=None if self._hidden is None else self._hidden.rows[hidden_rows],
            sources=None if batch.source_lens is None else self._sources(batch, counts, positions, slots),
            segments=None if self._state_taps is None else segments_on_device(batch, self._state_taps, self._device),
        )

    def _sources(self, batch: StepBatch, counts: Int32, positions: Tensor, slots: Tensor) -> GpuBatch:
        """For cross-attention: every token is a sequence of its own, as if it were the next token after its source."""
        assert batch.source_lens is not None and batch.source_tables is not None
        starts = np.arange(batch.num_tokens + 1, dtype=np.int32)
        arrays = starts, np.repeat(batch.source_lens, counts), np.repeat(batch.source_tables, counts, axis=0)
        runs = Runs(*(torch.from_numpy(array).to(self._device, non_blocking=True) for array in arrays))
        return GpuBatch(
            TokenIds(positions, None),
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
