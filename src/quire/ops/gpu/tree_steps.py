"""Trees of drafts that grow without the host: each step computes the likeliest nodes of the level before. All levels
are one CUDA graph, and one copy brings what was found."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.gpu.attention.pages import Runs, next_power_of_two
from quire.ops.gpu.batch import GpuBatch, TokenIds
from quire.ops.gpu.cache import GpuCache
from quire.ops.gpu.hidden_states import GpuHiddenStates
from quire.ops.gpu.sampling.graphs import LaunchGraphs
from quire.ops.gpu.sampling.logprobs import to_host
from quire.ops.gpu.sampling.sampler import padded
from quire.ops.opset import GrownTree, Int32, TreeRoots, TreeShape
from quire.ops.philox import MASK32

PIECE = 512  # tokens of the vocabulary among which the likeliest are found first
ALIGNMENT = 16  # int32: a kernel is compiled again for arrays that begin elsewhere


class TreeSteps:
    """`width`: blocks of a table."""

    def __init__(
        self,
        forward: Callable[[GpuBatch], Tensor],
        cache: GpuCache,
        hidden: GpuHiddenStates,
        max_model_len: int,
        width: int,
    ) -> None:
        self._forward, self._cache, self._hidden = forward, cache, hidden
        self._max_model_len, self._width = max_model_len, width
        self._graphs = LaunchGraphs(cache.k.device)

    def run(self, logits: Tensor, roots: TreeRoots, shape: TreeShape) -> Callable[[], list[GrownTree]]:
        """logits [S, vocab] of the roots -> see `Chain.grow`"""
        arrays = self._arrays(roots, shape)
        sizes = [-(-array.size // ALIGNMENT) * ALIGNMENT for array in arrays]
        flat = np.zeros(sum(sizes), np.int32)
        for part, array in zip(np.split(flat, np.cumsum(sizes)[:-1]), arrays, strict=True):
            part[: array.size] = array.ravel()

        def launch(on_device: Tensor) -> Tensor:
            parts = zip(on_device.split(sizes), arrays, strict=True)
            views = [part[: array.size].view(array.shape) for part, array in parts]
            return self._levels(logits, views, shape)

        num_seqs = len(roots.positions)
        with torch.inference_mode():
            of_logits = logits.data_ptr(), logits.stride(0), logits.dtype, len(logits)
            key = of_logits, len(arrays[0]), shape
            found = to_host(self._graphs.run(key, flat, launch)[:num_seqs])
        return lambda: _trees(found()[0])

    def _arrays(self, roots: TreeRoots, shape: TreeShape) -> list[Int32]:
        """lines, positions, hidden_rows, temperatures (their bits) [S], context_lens [levels, S], seq_starts [S + 1],
        slots [levels, S * top_k], keys [levels, 2, S], block_tables [S, W]; S is padded: slot -1, an empty context,
        and the last of the hidden states."""
        n, s = len(roots.positions), padded(len(roots.positions))
        num_levels, top_k = shape.num_levels, shape.top_k
        of_seqs = np.zeros((4, s), np.int32)
        of_seqs[2] = len(self._hidden.rows) - 1
        bits = roots.temperatures.astype(np.float32).view(np.int32)
        of_seqs[:, :n] = np.array([np.arange(n), roots.positions, roots.hidden_rows, bits])
        places = roots.positions[:, None] + np.arange((num_levels - 1) * top_k, dtype=np.int32)  # [n, nodes]
        size = self._cache.spec.block_size
        of_places = roots.block_tables[np.arange(n)[:, None], places // size] * size + places % size
        slots = np.full((num_levels - 1, s, top_k), -1, np.int32)
        slots[:, :n] = of_places.reshape(n, num_levels - 1, top_k).swapaxes(0, 1)
        contexts = np.zeros((num_levels - 1, s), np.int32)
        contexts[:, :n] = roots.positions + top_k * np.arange(1, num_levels, dtype=np.int32)[:, None]
        keys = np.zeros((num_levels, 2, s), np.int32)
        keys[:, :, :n] = roots.keys.astype(np.uint32).view(np.int32).transpose(1, 2, 0)
        tables = np.zeros((s, self._width), np.int32)
        used = min(roots.block_tables.shape[1], self._width)
        tables[:n, :used] = roots.block_tables[:, :used]
        starts = top_k * np.arange(s + 1, dtype=np.int32)
        return [*of_seqs, contexts, starts, slots, keys, tables]

    def _levels(self, logits: Tensor, arrays: Sequence[Tensor], shape: TreeShape) -> Tensor:
        """-> [S, 3, nodes]: tokens, parents (a node before, or -1), and the bits of probabilities; see `_likeliest`"""
        lines, positions, hidden_rows, temperatures, contexts, starts, slots, keys, tables = arrays
        num_seqs, num_levels, top_k = len(lines), shape.num_levels, shape.top_k
        heat = temperatures.contiguous().view(torch.float32).double()[:, None, None]
        numbers = torch.arange(top_k, device=lines.device)
        parents = torch.full((num_seqs, 1), -1, device=lines.device)  # by number among all nodes
        places = parents  # by place among the computed ones
        joint = torch.ones(num_seqs, 1, dtype=torch.float64, device=lines.device)
        words = torch.zeros(num_seqs, 1, dtype=torch.int64, device=lines.device)
        of_level = logits.index_select(0, lines).unsqueeze(1)  # [S, parents, vocab]
        levels, num_nodes = [], 0
        for level in range(num_levels):
            tokens, confidences = _children(of_level, shape, heat, keys[level].long() & MASK32)
            likely = (joint[:, :, None] * confidences).flatten(1)
            above = parents[:, :, None].expand_as(tokens)
            levels.append((tokens.flatten(1), above.flatten(1), confidences.flatten(1), likely))
            if level + 1 == num_levels:
                break
            joint, order = (x[:, :top_k] for x in likely.sort(dim=1, descending=True, stable=True))
            owner = order // shape.num_children
            words = words.gather(1, owner) | 1 << (level * top_k + numbers)
            sources = hidden_rows[:, None] + 1 + places.gather(1, owner)
            parents, places = num_nodes + order, (level * top_k + numbers).expand(num_seqs, -1)
            num_nodes += likely.shape[1]
            step = self._step(
                tokens.flatten(1).gather(1, order), positions + level, slots[level], sources, words,
                Runs(starts, contexts[level].clone(), tables), top_k,
            )  # fmt: skip
            of_level = self._forward(step).view(num_seqs, top_k, -1)
            assert step.kept is not None, "the program keeps no hidden states"
            if level + 2 < num_levels:
                behind = torch.where(contexts[level][:, None] > 0, 1 + places, 0)
                targets = hidden_rows[:, None] + behind
                self._hidden.rows.index_copy_(0, targets.flatten().long(), step.kept.to(self._hidden.rows.dtype))
        of_nodes = [torch.cat(of_levels, dim=1) for of_levels in zip(*levels, strict=True)]
        return _likeliest(of_nodes, shape.num_nodes)

    def _step(
        self, ids: Tensor, positions: Tensor, slots: Tensor, sources: Tensor, words: Tensor, runs: Runs, top_k: int
    ) -> GpuBatch:
        """Of `top_k` nodes of each sequence, at the same depth."""
        flat = ids.int().flatten()
        return GpuBatch(
            TokenIds(flat, None),
            positions.repeat_interleave(top_k),
            slots.flatten().clone(),  # which begins where kernels are compiled for
            runs,
            torch.arange(len(flat), dtype=torch.int32, device=flat.device),
            self._cache,
            self._max_model_len,
            decodes=True,
            prefills=False,
            all_logits=True,
            ancestors=words.flatten(),
            max_queries=next_power_of_two(top_k),
            hidden=self._hidden.rows[sources.flatten().clamp(max=len(self._hidden.rows) - 1)],
        )


def _children(logits: Tensor, shape: TreeShape, heat: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """logits [S, parents, vocab] -> tokens and confidences [S, parents, children]: the most likely or, where tokens are
    sampled, those of the candidates that lead the race which will sample the token. keys [2, S]"""
    raw = torch.where(logits.isnan(), -torch.inf, logits.float())
    best, ids = _topk(raw, shape.num_candidates)
    likely = (best - raw.logsumexp(-1, keepdim=True)).exp().nan_to_num(0.0).double()
    if shape.num_candidates == shape.num_children:  # all rows are greedy
        return ids, likely
    speeds = likely ** (1.0 / heat.clamp(min=1e-6)) / exponentials(keys, ids)
    shares = speeds / speeds.sum(-1, keepdim=True).clamp(min=1e-300)
    confidences, order = torch.where(heat > 0, shares, likely).sort(dim=-1, descending=True, stable=True)
    confidences = confidences.float().double()
    return ids.gather(-1, order[..., : shape.num_children]), confidences[..., : shape.num_children]


def _topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`x.topk(count)`, of pieces first: torch sorts a long line, or goes over it sixteen times with one block."""
    length = x.shape[-1]
    if length <= PIECE * count:
        best, ids = x.topk(count, dim=-1)
        return best, ids
    pieces = F.pad(x, (0, -length % PIECE), value=-torch.inf).unflatten(-1, (-1, PIECE))
    best, ids = pieces.topk(min(count, PIECE), dim=-1)
    ids = ids + PIECE * torch.arange(pieces.shape[-2], device=x.device)[:, None]
    best, order = best.flatten(-2).topk(count, dim=-1)
    return best, ids.flatten(-2).gather(-1, order).clamp(max=length - 1)


def exponentials(keys: Tensor, ids: Tensor) -> Tensor:
    """As `exponentials` of ops/race.py, to a rounding of the logarithm. keys [2, S] int64; ids [S, ...]"""
    k0, k1 = (key.view(-1, *[1] * (ids.dim() - 1)) for key in keys)
    mixed = _mix(ids + k0 & MASK32)
    high, low = _mix(mixed ^ k1), _mix(mixed * 0x9E3779B1 + k1 & MASK32)
    odd = high << 21 | low >> 12 << 1 | 1
    return -torch.log(1.0 - odd.double() * 2.0**-53)


def _mix(x: Tensor) -> Tensor:
    """`mix` of ops/race.py. A product may pass 63 bits: its low 32 are right."""
    x = x ^ x >> 16
    x = x * 0x7FEB352D & MASK32
    x = x ^ x >> 15
    x = x * 0x846CA68B & MASK32
    return x ^ x >> 16


def _likeliest(of_nodes: Sequence[Tensor], count: int) -> Tensor:
    """Of all nodes of trees [S, N], by number: tokens, parents, confidences, and how likely each and its ancestors are
    together -> [S, 3, count]: tokens and parents of the likeliest, in that order, and the bits of their confidences; 0
    where there are no more. A node is at most as likely as its parent, which comes before it."""
    tokens, parents, confidences, joint = of_nodes
    order = joint.sort(dim=1, descending=True, stable=True).indices
    places = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    order = order[:, :count]
    above = parents.gather(1, order)
    above = torch.where(above < 0, -1, places.gather(1, above.clamp(min=0)))
    bits = torch.where(joint > 0, confidences, 0.0).gather(1, order).float().view(torch.int32)
    return torch.stack([tokens.gather(1, order).int(), above.int(), bits], dim=1)


def _trees(found: Tensor) -> list[GrownTree]:
    tokens, parents, bits = found.unbind(1)
    confidences = bits.contiguous().view(torch.float32)
    counts = (confidences > 0).sum(1).tolist()
    of_trees = zip(tokens.tolist(), parents.tolist(), confidences.tolist(), counts, strict=True)
    return [(of_tree[:count], above[:count], likely[:count]) for of_tree, above, likely, count in of_trees]
