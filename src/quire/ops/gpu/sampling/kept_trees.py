# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Trees of drafts that wait on the device until they are verified: of each draft, what the host would tell of it.

A draft that only the device knows has an id below zero, the complement of where it is kept: the step that verifies it
and the sampler look up its parent, its depth and its word there. Specification: core/draft_tree.py"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.core.draft_tree import MAX_TREE_NODES
from quire.ops.gpu.attention.pages import next_power_of_two

NODES = next_power_of_two(MAX_TREE_NODES)
TOKENS = 64  # that a program looks up
UNKNOWN_LINE = tl.constexpr(-2)  # the parent of a line whose draft is kept on the device


class KeptTrees(NamedTuple):
    """Where `last` has the token of a draft."""

    parents: Tensor  # int32: 0 is the root, 1 + n is node n
    depths: Tensor  # int32: 1 below the root
    words: Tensor  # int64: `ancestor_words`


def new_kept_trees(last: Tensor) -> KeptTrees:
    words = torch.zeros_like(last, dtype=torch.int64)
    return KeptTrees(torch.zeros_like(last), torch.zeros_like(last), words)


def keep_trees(found: Tensor, rows: Tensor, last: Tensor, kept: KeptTrees, num_rows: int, num_levels: int) -> None:
    """found [S, 3, nodes] is of `tree_nodes.likeliest`; of `rows` [S], those below zero keep nothing."""
    _keep[(len(rows),)](
        found, rows, last, kept.parents, kept.depths, kept.words, found.shape[2], num_rows, num_levels,
        NODES=NODES, num_warps=1,
    )  # fmt: skip


def look_up_tokens(ids: Tensor, positions: Tensor, words: Tensor, kept: KeptTrees) -> None:
    """Of the tokens of a step [T], those whose drafts are kept: the host has given them an id below zero, the position
    of their root, and no word."""
    num_tokens = len(ids)
    grid = (triton.cdiv(num_tokens, TOKENS),)
    _look_up_tokens[grid](ids, positions, words, kept.depths, kept.words, num_tokens, TOKENS=TOKENS, num_warps=1)


def look_up_lines(drafts: Tensor, depths: Tensor, parents: Tensor, kept: KeptTrees) -> None:
    """Of lines of logits, those whose parent is UNKNOWN_LINE."""
    num_lines = len(drafts)
    grid = (triton.cdiv(num_lines, TOKENS),)
    _look_up_lines[grid](drafts, depths, parents, kept.depths, kept.parents, num_lines, TOKENS=TOKENS, num_warps=1)


@triton.jit(do_not_specialize=["num_nodes", "num_rows", "num_levels"])
def _keep(found, rows, last, parents, depths, words, num_nodes, num_rows, num_levels, NODES: tl.constexpr):
    seq = tl.program_id(0)
    row = tl.load(rows + seq)
    if row >= 0:
        nodes = tl.arange(0, NODES)
        is_node = nodes < num_nodes
        of_seq = found + seq * 3 * num_nodes
        above = tl.load(of_seq + num_nodes + nodes, mask=is_node, other=-1)
        place = row + (1 + nodes) * num_rows
        tl.store(last + place, tl.load(of_seq + nodes, mask=is_node), mask=is_node)
        tl.store(parents + place, 1 + above, mask=is_node)
        depth = tl.full([NODES], 1, tl.int32)
        bit = tl.full([NODES], 1, tl.int64)
        word = bit | (bit << (1 + nodes).to(tl.int64))
        for _ in range(num_levels - 1):
            has_parent = above >= 0
            depth += has_parent.to(tl.int32)
            word |= tl.where(has_parent, bit << tl.maximum(1 + above, 0).to(tl.int64), 0)
            above = tl.load(of_seq + num_nodes + above, mask=has_parent, other=-1)
        tl.store(depths + place, depth, mask=is_node)
        tl.store(words + place, word, mask=is_node)


@triton.jit(do_not_specialize=["num_tokens"])
def _look_up_tokens(ids, positions, words, kept_depths, kept_words, num_tokens, TOKENS: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = token < num_tokens
    id = tl.load(ids + token, mask=exists, other=0)
    is_kept = (id < 0) & (tl.load(words + token, mask=exists, other=1) == 0)
    depth = tl.load(kept_depths - id - 1, mask=is_kept, other=0)
    root = tl.load(positions + token, mask=is_kept, other=0)
    tl.store(positions + token, root + depth, mask=is_kept)
    tl.store(words + token, tl.load(kept_words - id - 1, mask=is_kept, other=0), mask=is_kept)


@triton.jit(do_not_specialize=["num_lines"], do_not_specialize_on_alignment=["drafts", "depths", "parents"])
def _look_up_lines(drafts, depths, parents, kept_depths, kept_parents, num_lines, TOKENS: tl.constexpr):
    line = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = line < num_lines
    is_kept = exists & (tl.load(parents + line, mask=exists, other=0) == UNKNOWN_LINE)
    place = -tl.load(drafts + line, mask=is_kept, other=-1) - 1
    tl.store(depths + line, tl.load(kept_depths + place, mask=is_kept, other=0), mask=is_kept)
    tl.store(parents + line, tl.load(kept_parents + place, mask=is_kept, other=0), mask=is_kept)
