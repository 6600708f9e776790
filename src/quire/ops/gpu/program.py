"""A forward pass on the GPU: a step replays a CUDA graph, unless it has so many tokens that launching costs nothing.

There are graphs for steps that only decode and graphs for steps with prompts, each for a list of sizes, and graphs for
chains and trees of drafts where a speculative method makes them. A step is padded to the next larger size. A size that
is slower than a larger one has no graph. The arrays of a step travel in one copy from pinned memory."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.ops.gpu.aligned import round_up, to_device
from quire.ops.gpu.attention.pages import Runs, next_power_of_two
from quire.ops.gpu.attention.paths import Paths, split_trees
from quire.ops.gpu.batch import GpuBatch, TokenIds
from quire.ops.gpu.cache import GpuCache
from quire.ops.gpu.captured_graph import CapturedGraph, WeakTensor
from quire.ops.gpu.chain import DraftChain
from quire.ops.gpu.compile_ahead import compile_ahead
from quire.ops.gpu.graph_inputs import GraphInputs
from quire.ops.gpu.graph_sizes import (
    PREFILL_GRAPH_SIZES,
    chain_graph_sizes,
    decode_graph_sizes,
    drop_slower_sizes,
    lone_tree_graph_sizes,
    tree_graph_sizes,
)
from quire.ops.gpu.hidden_states import GpuHiddenStates
from quire.ops.gpu.sampling.kept_trees import look_up_tokens
from quire.ops.gpu.sampling.sampler import DeviceSampler
from quire.ops.gpu.states.segments import are_independent, has_states, segments_on_device, taps_of, with_segments
from quire.ops.opset import WORD_BITS, Chain, Int32, StepBatch

log = logging.getLogger("quire.gpu")

MAX_DRAFTED_ROWS = 256  # logits of a step with prompts whose drafts are verified, if there are fewer sequences
MANY_ROWS_SIZES = (384, 512)  # tokens: with prompts, and with drafts of so many sequences that there are more logits
MAX_CHAIN_QUERIES = 8  # tokens of a sequence that attention takes as it takes one: more of them fill tiles of prompts
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


def _max_queries(batch: StepBatch) -> int:
    """Tokens of the longest sequence that may be a tree, up to a power of two: kernels are compiled for it."""
    counts = np.diff(batch.seq_starts)
    return next_power_of_two(int(counts[counts <= WORD_BITS].max()))


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
        max_drafts: int = 0,
        agree: Callable[[list[int]], list[int]] = lambda sizes: sizes,  # on sizes that have a graph: of several ranks
    ) -> None:
        self._state_taps = taps_of(cache.spec) if has_states(cache.spec) else None
        self.takes_trees = not cache.spec.latent and self._state_taps is None
        self._last = None if sampler is None else sampler.last
        self._kept_trees = None if sampler is None else sampler.trees
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
        self.step_seconds: dict[int, float] = {}  # by tokens of a step that verifies drafts, with empty contexts
        self._pool: tuple[int, int] | None = None  # memory of the graphs, shared: one is replayed at a time
        self._decode_graphs: dict[bool, dict[int, CapturedGraph]] = {}  # by whether tokens have adapters, then by size
        self._prefill_graphs: dict[int, CapturedGraph] = {}
        self._many_rows_graphs: dict[int, CapturedGraph] = {}
        self._tree_graphs: dict[int, CapturedGraph] = {}
        self._lone_tree_graphs: dict[int, CapturedGraph] = {}  # beside no prompts
        self._tree_nodes = tree_nodes
        self._chain_graphs: dict[int, CapturedGraph] = {}
        has_chain_graphs = max_drafts > 0 and self.takes_trees and not batch_invariant
        self._chain_queries = min(next_power_of_two(1 + max_drafts), MAX_CHAIN_QUERIES) if has_chain_graphs else 1
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
        if self._hidden is not None:
            batch = self._hidden.fetch(batch)
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
        if batch.ancestors is None:
            lone, most = self._chain_graphs, self._chain_queries
            kinds = [self._prefill_graphs, self._many_rows_graphs]
        else:
            lone, most, kinds = self._lone_tree_graphs, self._tree_queries, [self._tree_graphs]
        num_seqs = len(batch.context_lens)
        is_lone = n == rows and int(np.diff(batch.seq_starts).max()) <= most
        for of_kind in [lone, *kinds] if is_lone else kinds:
            for size, graph in of_kind.items():
                if size >= n and graph.inputs.num_seqs >= num_seqs and graph.inputs.num_rows >= rows:
                    return graph
        return None

    def _passes(self, max_rows: int) -> Iterator[Callable[[], object]]:
        """What is captured and warmed up later: all but trees and adapters."""
        for size in [n for n in PREFILL_GRAPH_SIZES if n <= self._max_tokens]:
            inputs = self._prefill_inputs(size, max_rows)
            yield partial(self._forward, self._batch_from(inputs, with_adapters=False))
        for inputs in self._many_rows_inputs(max_rows) + self._chain_inputs(max_rows):
            yield partial(self._forward, self._batch_from(inputs, with_adapters=False))
        for size in decode_graph_sizes(min(max_rows, self._max_tokens)):
            inputs = self._decode_inputs(size)
            yield partial(self._forward, self._batch_from(inputs, with_adapters=False))
        for step in self._prefill_steps(max_rows):
            yield partial(self._forward, self._on_device(step))

    def _prefill_inputs(self, size: int, max_rows: int, num_rows: int = 0) -> GraphInputs:
        num_rows = num_rows or min(size, max(max_rows, MAX_DRAFTED_ROWS))
        num_seqs, taps = min(size, max_rows), self._state_taps
        return GraphInputs(size, num_seqs, self._width, self._device, False, num_rows=num_rows, state_taps=taps)

    def _many_rows_inputs(self, max_rows: int) -> list[GraphInputs]:
        if self._chain_queries == 1:
            return []
        sizes = [n for n in MANY_ROWS_SIZES if max(max_rows, MAX_DRAFTED_ROWS) < n <= self._max_tokens]
        return [self._prefill_inputs(size, max_rows, num_rows=size) for size in sizes]

    def _chain_inputs(self, max_rows: int) -> list[GraphInputs]:
        if self._chain_queries == 1:
            return []
        sizes = chain_graph_sizes(min(max_rows * self._chain_queries, self._max_tokens))
        of_step = self._width, self._device, False, self._chain_queries
        return [GraphInputs(n, min(n, max_rows), *of_step, chains=True, num_rows=n) for n in sizes]

    def _lone_tree_inputs(self, max_rows: int) -> list[GraphInputs]:
        if self._tree_queries == 1:
            return []
        sizes = lone_tree_graph_sizes(self._tree_nodes, self._max_tokens)
        of_step = self._width, self._device, False, min(self._tree_queries, WORD_BITS)
        return [GraphInputs(n, min(n, max_rows), *of_step, chains=True, branches=True, num_rows=n) for n in sizes]

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
        inputs = self._many_rows_inputs(max_rows)[::-1]
        self._many_rows_graphs = self._drop_slower(self._capture(one, with_adapters=False) for one in inputs)
        inputs = self._chain_inputs(max_rows)[::-1]
        self._chain_graphs = self._drop_slower(self._capture(one, with_adapters=False) for one in inputs)
        sizes = tree_graph_sizes(self._tree_nodes, self._max_tokens) if self._tree_queries > 1 else []
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
        inputs = self._lone_tree_inputs(max_rows)[::-1]
        self._lone_tree_graphs = self._drop_slower(self._capture(one, with_adapters=False) for one in inputs)
        sizes = decode_graph_sizes(min(max_rows, self._max_tokens))
        inputs = [self._decode_inputs(size) for size in reversed(sizes)]
        self._decode_graphs[False] = self._drop_slower(self._capture(one, with_adapters=False) for one in inputs)
        if self._adapts:  # steps without adapters have graphs without them
            self._decode_graphs[True] = self._drop_slower(self._capture(one, with_adapters=True) for one in inputs)
        self.step_seconds = self._time_chains()

    def _drop_slower(self, graphs: Iterable[CapturedGraph]) -> dict[int, CapturedGraph]:
        by_size = {graph.inputs.num_tokens: graph for graph in graphs}
        kept = self._agree(drop_slower_sizes({size: graph.milliseconds() for size, graph in by_size.items()}))
        return {size: by_size[size] for size in kept}

    def _time_chains(self) -> dict[int, float]:
        """Where drafts are verified: seconds by tokens of a step, the first of which has no drafts."""
        if not self._chain_graphs:
            return {}
        graphs = {**dict(list(self._decode_graphs[False].items())[:1]), **self._chain_graphs}
        return {size: graph.milliseconds() / 1000 for size, graph in graphs.items()}

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
        outputs = logits.tensor(self._device), None if kept is None else kept.tensor(self._device)
        return CapturedGraph(inputs, graph, *outputs, self._forward)

    def _batch_from(self, inputs: GraphInputs, with_adapters: bool) -> GpuBatch:
        step = inputs.tensors
        ancestors = step.ancestors.view(torch.int64) if inputs.trees else None
        self._look_up_trees(step.ids, step.positions, ancestors)
        return GpuBatch(
            TokenIds(step.ids, self._last),
            step.positions,
            step.slots,
            Runs(step.seq_starts, step.context_lens, step.block_tables),
            step.logit_rows,
            self._cache,
            self._max_model_len,
            decodes=True,
            prefills=not inputs.decodes and not inputs.chains,
            batch_invariant=self._batch_invariant,
            all_logits=inputs.decodes or inputs.chains,
            adapters=step.adapters if with_adapters else None,
            ancestors=ancestors,
            max_queries=inputs.max_queries,
            hidden=self._hidden_of(step.hidden_rows),
            segments=None if inputs.segments is None else inputs.segments.segments,
        )

    def _look_up_trees(self, ids: Tensor, positions: Tensor, words: Tensor | None) -> None:
        """Where only the device knows a tree: before any kernel reads positions."""
        if words is not None and self._kept_trees is not None:
            look_up_tokens(ids, positions, words, self._kept_trees)

    def _hidden_of(self, rows: Tensor) -> Tensor | None:
        return None if self._hidden is None else self._hidden.rows[rows]

    def _on_device(self, batch: StepBatch) -> GpuBatch:
        assert batch.ancestors is None or self.takes_trees, "there is no attention kernel for trees here"
        if batch.ancestors is not None and self._batch_invariant:
            paths, begins, places = split_trees(batch)
            on_device = self._on_device(paths)
            on_device.paths = Paths(*(torch.from_numpy(array).to(self._device) for array in (begins, places)))
            return on_device
        counts = np.diff(batch.seq_starts)
        max_queries = 1 if batch.ancestors is None else _max_queries(batch)
        step = self._arrays_on_device(batch)
        positions, slots = step["positions"], step["slots"]
        ancestors = step["ancestors"].view(torch.int64) if "ancestors" in step else None
        self._look_up_trees(step["ids"], positions, ancestors)
        return GpuBatch(
            TokenIds(step["ids"], self._last),
            positions,
            slots,
            Runs(step["seq_starts"], step["context_lens"], step["block_tables"]),
            step["logit_rows"],
            self._cache,
            self._max_model_len,
            decodes=bool((counts <= max_queries).any()),
            prefills=bool((counts > max_queries).any()),
            batch_invariant=self._batch_invariant,
            adapters=step.get("adapters"),
            ancestors=ancestors,
            max_queries=max_queries,
            hidden=self._hidden_of(step.get("hidden_rows", torch.zeros_like(positions))),
            sources=None if batch.source_lens is None else self._sources(batch, counts, positions, slots),
            segments=None if self._state_taps is None else segments_on_device(batch, self._state_taps, self._device),
        )

    def _arrays_on_device(self, batch: StepBatch) -> dict[str, Tensor]:
        """By name, those that the step has. Tables are as wide as kernels were compiled for, words are pairs."""
        names = ("ids", "positions", "slots", "seq_starts", "context_lens", "logit_rows", "adapters", "hidden_rows")
        arrays: dict[str, Int32] = {name: array for name in names if (array := getattr(batch, name)) is not None}
        num_seqs, width = batch.block_tables.shape
        arrays["block_tables"] = np.zeros((num_seqs, round_up(width)), np.int32)
        arrays["block_tables"][:, :width] = batch.block_tables
        if batch.ancestors is not None:
            arrays["ancestors"] = batch.ancestors.view(np.int32)
        return dict(zip(arrays, to_device(list(arrays.values()), self._device), strict=True))

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
