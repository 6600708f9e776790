"""Trees of drafts that grow without the host: each step computes the likeliest nodes of the level before. All levels
are one CUDA graph, and one copy brings what was found."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.ops.gpu.aligned import pack, views
from quire.ops.gpu.attention.pages import Runs, next_power_of_two
from quire.ops.gpu.batch import GpuBatch, TokenIds
from quire.ops.gpu.cache import GpuCache
from quire.ops.gpu.sampling.graphs import LaunchGraphs
from quire.ops.gpu.sampling.logprobs import to_host
from quire.ops.gpu.sampling.sampler import padded
from quire.ops.gpu.tree_nodes import NextStep, find_children, likeliest, new_ranked, rank_level
from quire.ops.opset import GrownTree, Int32, TreeKeeper, TreeRoots, TreeShape


class TreeSteps:
    """`width`: blocks of a table."""

    def __init__(
        self, forward: Callable[[GpuBatch], Tensor], cache: GpuCache, dtype: torch.dtype, max_model_len: int, width: int
    ) -> None:
        """`dtype`: of the hidden states that are read"""
        self._forward, self._cache, self._dtype = forward, cache, dtype
        self._max_model_len, self._width = max_model_len, width
        self._graphs = LaunchGraphs(cache.k.device)

    def run(
        self, logits: Tensor, kept: Tensor, roots: TreeRoots, shape: TreeShape, keeper: TreeKeeper | None = None
    ) -> Callable[[], list[GrownTree]]:
        """logits [S, vocab] and kept [T, columns] of the roots' step -> see `Chain.grow`"""
        num_seqs = len(roots.positions)
        arrays = [*([padded_rows(keeper.rows)] if keeper else []), *self.arrays(roots, shape)]
        shapes = [array.shape for array in arrays]

        def launch(on_device: Tensor) -> Tensor:
            of_trees = views(on_device, shapes)
            if keeper is None:
                return self.levels(logits, kept, of_trees, shape)
            rows, *of_trees = of_trees
            found = self.levels(logits, kept, of_trees, shape)
            keeper.sampler.keep_trees(found, rows, shape.num_levels)
            return found

        of_roots = tuple((x.data_ptr(), x.stride(0), x.dtype, len(x)) for x in (logits, kept))
        key = of_roots, padded(num_seqs), shape, keeper is not None
        with torch.inference_mode():
            return grown(self._graphs.run(key, pack(arrays).numpy(), launch)[:num_seqs], keeper is not None)

    def arrays(self, roots: TreeRoots, shape: TreeShape) -> list[Int32]:
        """temperatures (their bits) [S], keys [levels, 2, S], lines of the roots [S], numbers of lines [S * top_k],
        seq_starts [S + 1], block_tables [S, W]; for every step context_lens [S], then positions, then slots
        [S * top_k]. S is padded: slot -1 and an empty context."""
        n, s = len(roots.positions), padded(len(roots.positions))
        num_steps, top_k = shape.num_levels - 1, shape.top_k
        of_seqs = np.zeros((2, s), np.int32)
        of_seqs[:, :n] = roots.temperatures.astype(np.float32).view(np.int32), roots.lines
        keys = np.zeros((num_steps + 1, 2, s), np.int32)
        keys[:, :, :n] = roots.keys.astype(np.uint32).view(np.int32).transpose(1, 2, 0)
        steps = np.arange(num_steps, dtype=np.int32)[:, None]
        contexts = np.zeros((num_steps, s), np.int32)
        contexts[:, :n] = roots.positions + top_k * (1 + steps)
        positions = np.zeros((num_steps, s, top_k), np.int32)
        positions[:, :n] = (roots.positions + steps)[:, :, None]
        places = roots.positions[:, None] + np.arange(num_steps * top_k, dtype=np.int32)  # [n, nodes]
        size = self._cache.spec.block_size
        of_places = roots.block_tables[np.arange(n)[:, None], places // size] * size + places % size
        slots = np.full((num_steps, s, top_k), -1, np.int32)
        slots[:, :n] = of_places.reshape(n, num_steps, top_k).swapaxes(0, 1)
        tables = np.zeros((s, self._width), np.int32)
        used = min(roots.block_tables.shape[1], self._width)
        tables[:n, :used] = roots.block_tables[:, :used]
        numbers, starts = np.arange(s * top_k, dtype=np.int32), top_k * np.arange(s + 1, dtype=np.int32)
        of_steps = [*contexts, *positions.reshape(num_steps, s * top_k), *slots.reshape(num_steps, s * top_k)]
        return [of_seqs[0], keys, of_seqs[1], numbers, starts, tables, *of_steps]

    def levels(self, logits: Tensor, kept: Tensor, arrays: Sequence[Tensor], shape: TreeShape) -> Tensor:
        """-> [S, 3, nodes]: tokens, parents (a node before, or -1), and the bits of probabilities; see `likeliest`"""
        temperatures, keys, rows, numbers, starts, tables, *of_steps = arrays
        num_seqs, num_steps, top_k = len(temperatures), shape.num_levels - 1, shape.top_k
        contexts, positions, slots = (of_steps[n * num_steps : (n + 1) * num_steps] for n in range(3))
        ranked = new_ranked(num_seqs, shape, logits.device)
        words = torch.zeros(num_seqs, dtype=torch.int64, device=logits.device)
        for number in range(shape.num_levels):
            level = find_children(logits, len(rows), temperatures, keys[number], shape)
            nodes = rank_level(number, level, ranked, rows, words, top_k)
            if number == num_steps:
                break
            runs = Runs(starts, contexts[number], tables)
            step = self._step(nodes, positions[number], slots[number], runs, numbers, kept, top_k)
            logits, rows, words = self._forward(step), numbers, nodes.words
            assert step.kept is not None, "the program keeps no hidden states"
            kept = step.kept
        return likeliest(ranked, shape)

    def _step(
        self, nodes: NextStep, positions: Tensor, slots: Tensor, runs: Runs, numbers: Tensor, kept: Tensor, top_k: int
    ) -> GpuBatch:
        """Of `top_k` nodes of each sequence, at the same depth."""
        return GpuBatch(
            TokenIds(nodes.ids, None),
            positions,
            slots,
            runs,
            numbers,
            self._cache,
            self._max_model_len,
            decodes=True,
            prefills=False,
            all_logits=True,
            ancestors=nodes.words,
            max_queries=next_power_of_two(top_k),
            hidden=kept.index_select(0, nodes.sources).to(self._dtype),
        )


def padded_rows(rows: Sequence[int]) -> Int32:
    of_seqs = np.full(padded(len(rows)), -1, np.int32)
    of_seqs[: len(rows)] = rows
    return of_seqs


def grown(found: Tensor, whole: bool) -> Callable[[], list[GrownTree]]:
    """Of `likeliest`, on its way to the host. `whole`: with nodes that cannot be."""
    arrive = to_host(found)
    return lambda: _trees(arrive()[0].numpy(), whole)


def _trees(found: Int32, whole: bool) -> list[GrownTree]:
    bits = found[:, 2]
    counts = [bits.shape[1]] * len(bits) if whole else np.count_nonzero(bits, axis=1).tolist()
    confidences = bits.view(np.float32).tolist()
    of_trees = zip(found[:, :2].tolist(), confidences, counts, strict=True)
    return [(tokens[:count], parents[:count], likely[:count]) for (tokens, parents), likely, count in of_trees]
