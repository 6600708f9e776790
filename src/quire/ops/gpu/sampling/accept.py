# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Which drafts are accepted, on the device: every line of a tree has been sampled, and the path of sampled tokens is
followed from the root."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from quire.core.draft_tree import depths, is_unknown
from quire.ops.gpu.attention.pages import next_power_of_two
from quire.ops.gpu.sampling.job import FIELDS, NUM_TOKENS
from quire.ops.gpu.sampling.kept_trees import UNKNOWN_LINE
from quire.ops.gpu.sampling.pick import BROKEN
from quire.ops.opset import Int32

MIN_NODES = 16  # a kernel is compiled for powers of two from here
MAX_PATH = tl.constexpr(64)  # lines of a path that are written: the root, and drafts that are accepted


@dataclass(frozen=True, slots=True)
class DraftLines:
    """The lines of logits of several sequences with drafts, as arrays of one copy."""

    num_lines: int
    num_seqs: int
    max_nodes: int  # of a sequence's lines, up to a power of two
    max_depth: int
    has_unknown: bool  # some tree is kept on the device
    flat: Int32  # rows, depths, drafts and parents of lines, then first lines, numbers of lines and rows of sequences

    @classmethod
    def pack(
        cls,
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        num_lines: int,
        num_seqs: int,
        unknown_depth: int = 0,
    ) -> "DraftLines":
        """Padded to so many lines and sequences. Rows below 0 are skipped. A draft below 0 stands for last[~draft].
        `unknown_depth`: of trees that only the device knows, at most"""
        of_lines = np.full((4, num_lines), -1, np.int32)
        of_seqs = np.full((3, num_seqs), -1, np.int32)
        counts = np.fromiter(map(len, drafts), np.int32, len(drafts)) + 1  # lines
        firsts = np.cumsum(counts, dtype=np.int32) - counts
        of_seqs[:, : len(rows)] = firsts, counts, rows
        of_line = np.repeat(np.arange(len(rows)), counts)
        numbers = np.arange(len(of_line), dtype=np.int32) - firsts[of_line]  # of the line in its sequence
        known = np.full_like(numbers, -1)
        known[numbers > 0] = np.fromiter(chain.from_iterable(drafts), np.int32, len(numbers) - len(rows))
        of_lines[:, : len(of_line)] = of_seqs[2, of_line], numbers, known, numbers - 1  # those of chains
        has_unknown = False
        for first, tree in zip(firsts.tolist(), parents, strict=True):
            of_tree = slice(first + 1, first + 1 + len(tree))
            if is_unknown(tree):
                has_unknown = True
                of_lines[1, of_tree], of_lines[3, of_tree] = min(unknown_depth, len(tree)), UNKNOWN_LINE.value
            elif tree:
                of_lines[1, of_tree], of_lines[3, of_tree] = depths(tree), np.array(tree) + 1
        max_depth = max(int(of_lines[1].max()), 0)
        most = max(MIN_NODES, next_power_of_two(int(counts.max())))
        flat = np.concatenate([of_lines.ravel(), of_seqs.ravel()])
        return cls(num_lines, num_seqs, most, max_depth, has_unknown, flat)

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """-> of lines [4, lines], of sequences [3, sequences]"""
        size = 4 * self.num_lines
        return flat[:size].view(4, self.num_lines), flat[size:].view(3, self.num_seqs)


def accept(
    lines: DraftLines, flat: Tensor, tokens: Tensor, num_accepted: Tensor, last: Tensor, params: Tensor, paths: Tensor
) -> None:
    """Given the tokens [lines] that were sampled, advance the states of the rows by those of accepted drafts and the
    one behind. num_accepted [sequences] gets the numbers of the drafts; paths [rows, MAX_PATH], from its second column
    on, their lines among those of the row."""
    (_, _, drafts, parents), (firsts, counts, rows) = lines.split(flat)
    _accept[(lines.num_seqs,)](
        tokens,
        drafts,
        parents,
        firsts,
        counts,
        rows,
        num_accepted,
        last,
        params,
        paths,
        lines.max_depth,
        NODES=lines.max_nodes,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["max_depth"])
def _accept(
    tokens,
    drafts,
    parents,
    firsts,
    counts,
    rows,
    num_accepted,
    last,
    of_rows,
    paths,
    max_depth,
    NODES: tl.constexpr,
):
    seq = tl.program_id(0)
    row = tl.load(rows + seq).to(tl.int64)
    if row < 0:
        tl.store(num_accepted + seq, 0)
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
        is_child = child < NODES
        tl.store(paths + row * MAX_PATH + num_sampled, child, mask=is_child & (num_sampled < MAX_PATH))
        num_sampled += is_child.to(tl.int32)
        node = tl.where(child < NODES, child, node)
        token = tl.load(tokens + first + node)
    tl.store(num_accepted + seq, num_sampled - 1)
    broken = token == BROKEN
    tl.store(last + row, tl.where(broken, 0, token))  # a next step of a broken row must read inside its tables
    num_tokens = of_rows + row * FIELDS + NUM_TOKENS
    tl.store(num_tokens, tl.load(num_tokens) + tl.where(broken, num_sampled - 1, num_sampled))
