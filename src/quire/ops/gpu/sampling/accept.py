# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Which drafts are accepted, on the device: every line of a tree has been sampled, and the path of sampled tokens is
followed from the root."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from quire.core.draft_tree import ROOT, depths
from quire.ops.gpu.attention.pages import next_power_of_two
from quire.ops.gpu.sampling.job import FIELDS, NUM_TOKENS
from quire.ops.gpu.sampling.pick import BROKEN
from quire.ops.opset import Int32

MIN_NODES = 16  # a kernel is compiled for powers of two from here


@dataclass(frozen=True, slots=True)
class DraftLines:
    """The lines of logits of several sequences with drafts, as arrays of one copy."""

    num_lines: int
    num_seqs: int
    max_nodes: int  # of a sequence's lines, up to a power of two
    max_depth: int
    flat: Int32  # rows, depths, drafts and parents of lines, then first lines, numbers of lines and rows of sequences

    @classmethod
    def pack(
        cls,
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        num_lines: int,
        num_seqs: int,
    ) -> "DraftLines":
        """Padded to so many lines and sequences. Rows below 0 are skipped. A draft below 0 stands for last[~draft]."""
        of_lines = np.full((4, num_lines), -1, np.int32)
        of_seqs = np.full((3, num_seqs), -1, np.int32)
        first = max_depth = 0
        for index, (row, of_row, tree) in enumerate(zip(rows, drafts, parents, strict=True)):
            end = first + 1 + len(of_row)
            deep = depths(tree) if tree else range(1, 1 + len(of_row))
            of_lines[0, first:end] = row
            of_lines[1, first], of_lines[1, first + 1 : end] = 0, deep
            of_lines[2, first + 1 : end] = of_row
            of_lines[3, first + 1 : end] = [1 + parent for parent in tree or range(ROOT, len(of_row) - 1)]
            of_seqs[:, index] = first, end - first, row
            max_depth = max(max_depth, *deep) if of_row else max_depth
            first = end
        most = max(MIN_NODES, next_power_of_two(int(of_seqs[1].max())))
        return cls(num_lines, num_seqs, most, max_depth, np.concatenate([of_lines.ravel(), of_seqs.ravel()]))

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """-> of lines [4, lines], of sequences [3, sequences]"""
        size = 4 * self.num_lines
        return flat[:size].view(4, self.num_lines), flat[size:].view(3, self.num_seqs)


def accept(lines: DraftLines, flat: Tensor, tokens: Tensor, last: Tensor, params: Tensor) -> None:
    """Given the tokens [lines] that were sampled, advance the states of the rows by those of accepted drafts and the
    one behind."""
    (_, _, drafts, parents), (firsts, counts, rows) = lines.split(flat)
    _accept[(lines.num_seqs,)](
        tokens, drafts, parents, firsts, counts, rows, last, params, lines.max_depth, NODES=lines.max_nodes, num_warps=1
    )


@triton.jit(do_not_specialize=["max_depth"])
def _accept(tokens, drafts, parents, firsts, counts, rows, last, of_rows, max_depth, NODES: tl.constexpr):
    seq = tl.program_id(0)
    row = tl.load(rows + seq).to(tl.int64)
    if row < 0:
        return
    first, count = tl.load(firsts + seq), tl.load(counts + seq)
    nodes = tl.arange(0, NODES)
    known = (nodes > 0) & (nodes < count)
    node_drafts = tl.load(drafts + first + nodes, mask=known, other=0)
    on_device = known & (node_drafts < 0)
    node_drafts = tl.where(on_device, tl.load(last - node_drafts - 1, mask=on_device, other=0), node_drafts)
    node_parents = tl.load(parents + first + nodes, mask=known, other=-1)
    node, num_sampled = 0, 1
    token = tl.load(tokens + first)
    for _ in range(max_depth):
        child = tl.min(tl.where((node_parents == node) & (node_drafts == token), nodes, NODES), axis=0)
        num_sampled += (child < NODES).to(tl.int32)
        node = tl.where(child < NODES, child, node)
        token = tl.load(tokens + first + node)
    broken = token == BROKEN
    tl.store(last + row, tl.where(broken, 0, token))  # a next step of a broken row must read inside its tables
    num_tokens = of_rows + row * FIELDS + NUM_TOKENS
    tl.store(num_tokens, tl.load(num_tokens) + tl.where(broken, num_sampled - 1, num_sampled))
