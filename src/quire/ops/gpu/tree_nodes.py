# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The nodes of growing trees of drafts, level by level: which tokens follow a node, which nodes of a level are the
likeliest, and which of all. Specification: `grown` in tests/ops/test_tree_steps.py

A node's place is its number among the likeliest of its level, in order. Of equals, the first is the likelier."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.pages import next_power_of_two
from quire.ops.gpu.sampling.race import exponential
from quire.ops.gpu.sampling.softmax_weights import FLOAT_MAX, logit_of, pack, unpack_id, unpack_key
from quire.ops.opset import TreeShape

PIECE = 1024  # tokens of the vocabulary that one program looks at
WARP_PAIRS = 1024  # of logits and ids, that a warp merges
MAX_COMPARED = 4096  # pairs of nodes at a time
NONE = tl.constexpr(-(1 << 63))  # less than any pair of a logit and an id


class Level(NamedTuple):
    """What grows below the nodes of a level that were computed."""

    tokens: Tensor  # int32 [S * parents, children], as `confidences`
    confidences: Tensor  # float32: of a token, after its parent
    num_parents: int  # of a sequence


class RankedNodes(NamedTuple):
    """The likeliest nodes of each level, in order: [levels, S, width]"""

    tokens: Tensor  # int32
    parents: Tensor  # int32: places in the level before
    confidences: Tensor  # float32
    joint: Tensor  # float64: how likely a node and its ancestors are together


class NextStep(NamedTuple):
    """Of the nodes that are computed next [S * top_k]: their tokens and ancestors, and which rows the hidden states of
    their parents are."""

    ids: Tensor  # int32
    sources: Tensor  # int32
    words: Tensor  # int64


def find_children(logits: Tensor, num_lines: int, temperatures: Tensor, keys: Tensor, shape: TreeShape) -> Level:
    """Of nodes with these logits [lines, vocab], whose last line stands for all that are missing: the most likely
    tokens or, where tokens are sampled, those of the candidates that lead the race which will sample the token.
    temperatures [S] and keys [2, S] are bits of fp32 and uint32."""
    vocab, device = logits.shape[1], logits.device
    assert logits.stride(1) == 1 and shape.num_candidates <= vocab, f"{shape.num_candidates} of {vocab} tokens"
    num_pieces, width = triton.cdiv(vocab, PIECE), next_power_of_two(shape.num_candidates)
    pairs = torch.empty(num_lines, num_pieces, width, dtype=torch.int64, device=device)
    maxima = torch.empty(num_lines, num_pieces, dtype=torch.float32, device=device)
    sums = torch.empty_like(maxima)  # by itself, as the others: a kernel is compiled again for unaligned addresses
    _find_candidates[(num_pieces, num_lines)](
        logits, logits.stride(0), len(logits), pairs, maxima, sums, vocab, shape.num_candidates,
        PIECE=PIECE, WIDTH=width,
    )  # fmt: skip
    num_seqs, pieces = len(temperatures), next_power_of_two(num_pieces)
    tokens = torch.empty(num_lines, shape.num_children, dtype=torch.int32, device=device)
    confidences = torch.empty_like(tokens, dtype=torch.float32)
    _choose_children[(num_lines,)](
        pairs, maxima, sums, temperatures, keys, tokens, confidences, num_pieces, shape.num_candidates,
        shape.num_children, num_lines // num_seqs, num_seqs, PIECES=pieces, WIDTH=width,
        num_warps=min(max(pieces * width // WARP_PAIRS, 4), 16), enable_fp_fusion=False,
    )  # fmt: skip
    return Level(tokens, confidences, num_lines // num_seqs)


def new_ranked(num_seqs: int, shape: TreeShape, device: torch.device) -> RankedNodes:
    size = shape.num_levels, num_seqs, max(shape.top_k, shape.num_nodes)
    dtypes = torch.int32, torch.int32, torch.float32, torch.float64
    return RankedNodes(*(torch.empty(size, dtype=dtype, device=device) for dtype in dtypes))


def rank_level(number: int, level: Level, ranked: RankedNodes, rows: Tensor, words: Tensor, top_k: int) -> NextStep:
    """Fill `ranked[number]`. rows and words [S * parents] are those of the parents; those of the root have no bits."""
    num_nodes = level.num_parents * level.tokens.shape[1]  # of a sequence
    num_seqs = ranked.tokens.shape[1]
    step = NextStep(*(like.new_empty(num_seqs * top_k) for like in (rows, rows, words)))
    size = next_power_of_two(num_nodes)
    _rank_level[(num_seqs,)](
        level.tokens, level.confidences, ranked, rows, words, step, number, level.num_parents, level.tokens.shape[1],
        top_k, num_seqs, ranked.tokens.shape[2], ROOT=number == 0, NODES=size, CHUNK=_chunk(size), num_warps=1,
    )  # fmt: skip
    return step


def likeliest(ranked: RankedNodes, shape: TreeShape) -> Tensor:
    """Of all levels -> [S, 3, nodes]: tokens, parents (a node before, or -1) and the bits of confidences, which are 0
    where there are no more."""
    num_levels, num_seqs, width = ranked.tokens.shape
    num_nodes = shape.num_found
    found = torch.empty(num_seqs, 3, num_nodes, dtype=torch.int32, device=ranked.tokens.device)
    size = next_power_of_two(num_levels * width)
    _find_likeliest[(num_seqs,)](
        ranked, found, num_nodes, shape.num_children, shape.top_k, num_seqs, num_levels, width,
        NODES=size, CHUNK=_chunk(size),
    )  # fmt: skip
    return found


def _chunk(size: int) -> int:
    return min(size, max(MAX_COMPARED // size, 1))


@triton.jit(do_not_specialize=["num_lines", "count"])
def _find_candidates(
    logits,
    stride,
    num_lines,
    pairs,  # [lines, pieces, WIDTH]
    maxima,  # [lines, pieces], as `sums`
    sums,
    vocab,
    count,
    PIECE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The greatest logits of a piece of a line, packed with their ids, and the sum of exp(logit - maximum)."""
    piece, num_pieces, line = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    ids = piece * PIECE + tl.arange(0, PIECE)
    x = logits + tl.minimum(line, num_lines - 1).to(tl.int64) * stride + ids
    x = tl.load(x, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    maximum = tl.clamp(tl.max(x), -FLOAT_MAX, FLOAT_MAX)
    of_piece = line * num_pieces + piece
    tl.store(maxima + of_piece, maximum)
    tl.store(sums + of_piece, tl.sum(tl.exp(x - maximum)))
    left = tl.where(ids < vocab, pack(x, ids), NONE)
    tl.store(pairs + of_piece * WIDTH + tl.arange(0, WIDTH), _greatest(left, count, WIDTH))


@triton.jit
def _greatest(pairs, count, WIDTH: tl.constexpr):
    """The first `count` of different pairs in descending order -> [WIDTH]"""
    numbers = tl.arange(0, WIDTH)
    found = tl.full([WIDTH], NONE, tl.int64)
    for number in range(count):
        best = tl.max(pairs)
        found = tl.where(numbers == number, best, found)
        pairs = tl.where(pairs == best, NONE, pairs)
    return found


@triton.jit(
    do_not_specialize=["count", "num_children", "num_parents", "num_seqs"], do_not_specialize_on_alignment=["keys"]
)
def _choose_children(
    pairs,  # [lines, pieces, WIDTH]
    maxima,  # [lines, pieces], as `sums`
    sums,
    temperatures,  # [S]
    keys,  # [2, S]
    tokens,  # [lines, children], as `confidences`
    confidences,
    num_pieces,
    count,
    num_children,
    num_parents,
    num_seqs,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    line = tl.program_id(0)
    seq = line // num_parents
    of_line, places = line * num_pieces * WIDTH, tl.arange(0, PIECES * WIDTH)
    candidates = tl.load(pairs + of_line + places, mask=places < num_pieces * WIDTH, other=NONE)
    best = _greatest(candidates, count, WIDTH)
    numbers = tl.arange(0, WIDTH)
    x, ids = logit_of(unpack_key(best)).to(tl.float64), unpack_id(best)
    pieces = tl.arange(0, PIECES)
    maximum = tl.load(maxima + line * num_pieces + pieces, mask=pieces < num_pieces, other=-FLOAT_MAX).to(tl.float64)
    of_pieces = tl.load(sums + line * num_pieces + pieces, mask=pieces < num_pieces, other=0.0).to(tl.float64)
    greatest = tl.max(maximum)
    total = tl.sum(of_pieces * tl.exp(maximum - greatest))
    # All are 0 where every logit is -inf, or one is infinite.
    likely = tl.exp(tl.minimum(x, greatest) - greatest) / tl.where(total > 0.0, total, 1.0)
    likely = tl.where(numbers < count, likely, 0.0).to(tl.float32).to(tl.float64)
    heat = tl.load(temperatures + seq).to(tl.float32, bitcast=True).to(tl.float64)
    share = likely
    if heat > 0.0:
        low, high = tl.load(keys + seq).to(tl.uint32, bitcast=True), tl.load(keys + num_seqs + seq)
        times = exponential((high.to(tl.uint64) << 32) | low.to(tl.uint64), ids)
        powered = tl.exp(tl.log(tl.where(likely > 0.0, likely, 1.0)) / tl.maximum(heat, 1e-6))
        speeds = tl.where(likely > 0.0, powered / times, 0.0)
        share = speeds / tl.maximum(tl.sum(speeds), 1e-300)
    share = tl.where(numbers < count, share, -1.0)
    rank = _num_before(share, numbers, share, numbers)
    chosen = line * num_children + rank
    tl.store(tokens + chosen, ids, mask=rank < num_children)
    tl.store(confidences + chosen, share.to(tl.float32), mask=rank < num_children)


@triton.jit
def _num_before(x, numbers, others, other_numbers):
    """How many of `others` [M] come before each x [N]: they are greater, or equal and of a lower number."""
    is_before = others[None, :] > x[:, None]
    is_before = is_before | ((others[None, :] == x[:, None]) & (other_numbers[None, :] < numbers[:, None]))
    return tl.sum(is_before.to(tl.int32), axis=1)


@triton.jit
def _joint_of_level(confidences, of_parents, nodes, num_nodes, num_children, ROOT: tl.constexpr):
    """How likely these nodes of a level are, together with all before them; -1: there is no such node."""
    joint = tl.load(confidences + nodes, mask=nodes < num_nodes, other=0.0).to(tl.float64)
    if not ROOT:
        joint *= tl.load(of_parents + nodes // num_children, mask=nodes < num_nodes, other=0.0)
    return tl.where(nodes < num_nodes, joint, -1.0)


@triton.jit(do_not_specialize=["level", "num_parents", "num_children", "top_k", "num_seqs", "width"])
def _rank_level(
    tokens,  # [S, parents * children], as `confidences`
    confidences,
    ranked,  # RankedNodes
    rows,  # [S, parents], as `words`
    words,
    step,  # NextStep
    level,
    num_parents,
    num_children,
    top_k,
    num_seqs,
    width,
    ROOT: tl.constexpr,
    NODES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    seq = tl.program_id(0)
    num_nodes = num_parents * num_children
    tokens += seq * num_nodes
    confidences += seq * num_nodes
    of_level = (level * num_seqs + seq) * width
    of_parents = ranked.joint + of_level - num_seqs * width
    nodes = tl.arange(0, NODES)
    joint = _joint_of_level(confidences, of_parents, nodes, num_nodes, num_children, ROOT)
    rank = tl.zeros([NODES], tl.int32)
    for first in range(0, NODES, CHUNK):
        others = first + tl.arange(0, CHUNK)
        of_others = _joint_of_level(confidences, of_parents, others, num_nodes, num_children, ROOT)
        rank += _num_before(joint, nodes, of_others, others)
    parent, token = nodes // num_children, tl.load(tokens + nodes, mask=nodes < num_nodes, other=0)
    is_kept = (nodes < num_nodes) & (rank < width)
    tl.store(ranked.tokens + of_level + rank, token, mask=is_kept)
    tl.store(ranked.parents + of_level + rank, parent, mask=is_kept)
    confidence = tl.load(confidences + nodes, mask=is_kept, other=0.0)
    tl.store(ranked.confidences + of_level + rank, confidence, mask=is_kept)
    tl.store(ranked.joint + of_level + rank, joint, mask=is_kept)
    is_next = (nodes < num_nodes) & (rank < top_k)
    place, above = seq * top_k + rank, seq * num_parents + parent
    tl.store(step.ids + place, token, mask=is_next)
    tl.store(step.sources + place, tl.load(rows + above, mask=is_next, other=0), mask=is_next)
    bit = tl.full([NODES], 1, tl.int64) << tl.where(is_next, level * top_k + rank, 0).to(tl.int64)
    tl.store(step.words + place, tl.load(words + above, mask=is_next, other=0) | bit, mask=is_next)


@triton.jit
def _joint_of_all(joint, nodes, num_children, top_k, num_seqs, num_levels, width):
    """The same of nodes level * width + place."""
    level, place = nodes // width, nodes % width
    is_node = (level < num_levels) & (place < tl.where(level == 0, num_children, top_k * num_children))
    return tl.load(joint + level * num_seqs * width + place, mask=is_node, other=-1.0)


@triton.jit(do_not_specialize=["num_nodes", "num_children", "top_k", "num_seqs", "num_levels", "width"])
def _find_likeliest(
    ranked,  # RankedNodes
    found,  # [S, 3, num_nodes]
    num_nodes,
    num_children,
    top_k,
    num_seqs,
    num_levels,
    width,
    NODES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    seq = tl.program_id(0)
    of_joint = ranked.joint + seq * width
    nodes = tl.arange(0, NODES)
    joint = _joint_of_all(of_joint, nodes, num_children, top_k, num_seqs, num_levels, width)
    level = nodes // width
    where = (level * num_seqs + seq) * width + nodes % width
    is_node = joint >= 0.0
    has_parent = is_node & (level > 0)
    parent = (level - 1) * width + tl.load(ranked.parents + where, mask=has_parent, other=0)
    parent = tl.where(has_parent, parent, 0)
    of_parent = _joint_of_all(of_joint, parent, num_children, top_k, num_seqs, num_levels, width)
    rank = tl.zeros([NODES], tl.int32)
    rank_of_parent = tl.zeros([NODES], tl.int32)
    for first in range(0, NODES, CHUNK):
        others = first + tl.arange(0, CHUNK)
        of_others = _joint_of_all(of_joint, others, num_children, top_k, num_seqs, num_levels, width)
        rank += _num_before(joint, nodes, of_others, others)
        rank_of_parent += _num_before(of_parent, parent, of_others, others)
    is_kept = is_node & (rank < num_nodes)
    place = found + seq * 3 * num_nodes + rank
    tl.store(place, tl.load(ranked.tokens + where, mask=is_kept, other=0), mask=is_kept)
    tl.store(place + num_nodes, tl.where(has_parent, rank_of_parent, -1), mask=is_kept)
    confidence = tl.load(ranked.confidences + where, mask=is_kept, other=0.0)
    bits = tl.where(joint > 0.0, confidence, 0.0).to(tl.int32, bitcast=True)
    tl.store(place + 2 * num_nodes, bits, mask=is_kept)
