"""The steps in which a GPU grows trees of drafts, beside what they are in plain torch. Without a GPU, in Triton's
interpreter."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from quire.ops.gpu.batch import GpuBatch
from quire.ops.gpu.cache import GpuCache
from quire.ops.gpu.sampling.sampler import padded
from quire.ops.gpu.tree_nodes import find_children
from quire.ops.gpu.tree_steps import TreeSteps
from quire.ops.kv_spec import KVSpec
from quire.ops.philox import random_bits
from quire.ops.program import TreeRoots, TreeShape
from quire.ops.race import exponentials

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, COLUMNS = 50, 8
Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # tokens and hidden states -> logits, and what is kept


def children(
    logits: Tensor, temperature: float, key: tuple[int, int], shape: TreeShape
) -> tuple[list[list[int]], Tensor]:
    """Of one sequence: logits [parents, vocab] -> tokens and confidences [parents, children]"""
    raw = torch.where(logits.isnan(), -torch.inf, logits.double())
    best, ids = raw.sort(dim=1, descending=True, stable=True)
    best, ids = best[:, : shape.num_candidates], ids[:, : shape.num_candidates]
    likely = (best - raw.logsumexp(1, keepdim=True)).exp().nan_to_num(0.0).float().double()
    if temperature > 0:
        numbers = torch.from_numpy(exponentials(key, ids.cpu().numpy())).to(ids.device)
        speeds = likely ** (1.0 / temperature) / numbers
        likely = speeds / speeds.sum(1, keepdim=True).clamp(min=1e-300)
    likely, order = likely.sort(dim=1, descending=True, stable=True)
    count = shape.num_children
    return ids.gather(1, order)[:, :count].tolist(), likely[:, :count].float()


def grown(
    logits: Tensor, hidden: Tensor, forward: Forward, temperature: float, keys: Sequence[tuple[int, int]],
    shape: TreeShape,
) -> tuple[list[int], list[int], list[float]]:  # fmt: skip
    """The tree of one sequence, from the logits [1, vocab] and the hidden state [1, columns] of its root."""
    tokens, parents, confidences, joint = list[int](), list[int](), list[float](), list[float]()
    above = [-1]  # the nodes whose children are next
    for level, key in enumerate(keys):
        first = len(tokens)
        for parent, ids, likely in zip(above, *children(logits, temperature, key, shape), strict=True):
            tokens += ids
            parents += [parent] * len(ids)
            confidences += likely.tolist()
            joint += [one * (1.0 if parent < 0 else joint[parent]) for one in likely.tolist()]
        of_level = sorted(range(first, len(tokens)), key=lambda node: -joint[node])[: shape.top_k]
        if level + 1 < len(keys):
            sources = [above.index(parents[node]) for node in of_level]
            ids = torch.tensor([tokens[node] for node in of_level]).to(hidden.device)
            logits, hidden = forward(ids, hidden[sources])
        above = of_level
    kept = sorted(range(len(tokens)), key=lambda node: -joint[node])[: shape.num_nodes]
    kept = [node for node in kept if joint[node] > 0]
    places = {-1: -1, **{node: place for place, node in enumerate(kept)}}
    return [tokens[n] for n in kept], [places[parents[n]] for n in kept], [confidences[n] for n in kept]


def roots_of(num_seqs: int, shape: TreeShape, temperatures: Sequence[float]) -> TreeRoots:
    positions = np.arange(20, 20 + num_seqs, dtype=np.int32)
    keys = [[random_bits(seq, 30 + level, 0)[0] for level in range(shape.num_levels)] for seq in range(num_seqs)]
    tables = np.tile(np.arange(4, dtype=np.int32), (num_seqs, 1))
    lines = np.arange(num_seqs, dtype=np.int32)[::-1].copy()
    return TreeRoots(positions, tables, lines, np.array(temperatures[:num_seqs], np.float32), np.array(keys))


@pytest.mark.parametrize("num_seqs", [1, 3])
@pytest.mark.parametrize(
    "shape, temperatures",
    [
        (TreeShape(num_levels=3, top_k=4, num_children=8, num_candidates=8, num_nodes=14), [0.0] * 3),
        (TreeShape(num_levels=4, top_k=3, num_children=6, num_candidates=12, num_nodes=32), [1.0, 0.0, 0.6]),
        (TreeShape(num_levels=1, top_k=2, num_children=4, num_candidates=4, num_nodes=9), [0.0] * 3),
    ],
)
def test_trees_are_those_of_plain_torch(num_seqs: int, shape: TreeShape, temperatures: list[float]) -> None:
    make = torch.Generator().manual_seed(5)
    embed, head = (torch.randn(VOCAB, COLUMNS, generator=make).to(DEVICE) for _ in range(2))
    steps: list[GpuBatch] = []

    def compute(ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        kept = (hidden + embed[ids.long()]).tanh()
        return (kept[:, None] * head).sum(-1), kept

    def forward(step: GpuBatch) -> Tensor:
        assert step.hidden is not None
        steps.append(step)
        logits, step.kept = compute(step.ids.ids, step.hidden)
        return logits

    kept = torch.randn(5, COLUMNS, generator=make).to(DEVICE)
    roots = roots_of(num_seqs, shape, temperatures)
    logits = (kept[roots.lines.tolist(), None] * head).sum(-1)
    grower = TreeSteps(forward, GpuCache(KVSpec(1, 1, 16, 16, "float32"), 9, 0, DEVICE), torch.float32, 160, 4)
    trees = grower.run(logits, kept, roots, shape)()
    for seq, (tokens, parents, confidences) in enumerate(trees):
        hidden = kept[roots.lines[seq : seq + 1].tolist()]
        keys = [(int(k0), int(k1)) for k0, k1 in roots.keys[seq]]
        expected = grown(logits[seq : seq + 1], hidden, compute, temperatures[seq], keys, shape)
        assert (tokens, parents) == expected[:2]
        np.testing.assert_allclose(confidences, expected[2], rtol=1e-5)
    assert len(steps) == shape.num_levels - 1
    for level, step in enumerate(steps):
        of_step = np.arange(level * shape.top_k, (level + 1) * shape.top_k)  # places behind the text
        assert step.positions.tolist()[: num_seqs * shape.top_k] == [
            position + level for position in roots.positions.tolist() for _ in of_step
        ]
        assert step.slots.tolist()[: num_seqs * shape.top_k] == [
            place for position in roots.positions for place in (position + of_step).tolist()
        ]
        assert step.slots.tolist()[num_seqs * shape.top_k :] == [-1] * (padded(num_seqs) - num_seqs) * shape.top_k
        assert step.runs.context_lens.tolist()[:num_seqs] == (roots.positions + of_step[-1] + 1).tolist()
        assert step.ancestors is not None
        words = np.array(step.ancestors.tolist()).reshape(-1, shape.top_k)
        assert (words >> of_step & 1).all() and not (words >> (of_step[-1] + 1)).any()
        assert all(word.bit_count() == level + 1 for word in words.ravel().tolist())
        of_tokens = [step.ids.ids, step.positions, step.slots, step.logit_rows, step.ancestors, step.hidden]
        assert all(one is not None and one.is_contiguous() for one in of_tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_children_of_odd_logits(dtype: torch.dtype, temperature: float) -> None:
    """Of several pieces of a vocabulary, with equal logits and such that are no numbers."""
    vocab = 2500
    shape = TreeShape(num_levels=1, top_k=3, num_children=6, num_candidates=12, num_nodes=6)
    logits = torch.randn(6, vocab + 4, generator=torch.Generator().manual_seed(1)).mul(4).to(dtype)[:, :vocab]
    logits[1, [3, 700, 1500, 2499]] = 30.0
    logits[2] = logits[2].round()
    logits[3, ::3] = torch.nan
    logits[4, 9], logits[5] = torch.inf, -torch.inf
    on_device = logits.to(DEVICE)
    key = random_bits(7, 8, 0)[0]
    heat = torch.tensor([temperature], dtype=torch.float32).view(torch.int32).to(DEVICE)
    keys = torch.from_numpy(np.array(key, np.uint32).view(np.int32)[:, None].copy()).to(DEVICE)
    level = find_children(on_device, 6, heat, keys, shape)
    tokens, confidences = children(logits, temperature, key, shape)
    assert level.tokens.tolist() == tokens
    torch.testing.assert_close(level.confidences.cpu(), confidences, rtol=1e-5, atol=0.0)
    assert not level.confidences[4:].any()
