# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# ruff: noqa: E741 (l is the running sum of an online softmax)
"""What becomes of a piece: the whole result where there is no other, else a part of it that the last one to end merges.

Parts are merged first to last, whoever does it, so results do not depend on who came last. A kernel of its own for this
would cost its launch in every layer: some 2 us, or a twentieth of a token at batch 1 with weights of 4 bits."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.plan import DecodePlan
from quire.ops.gpu.attention.tile import FINITE_MIN
from quire.ops.gpu.linear.quantize_rows import MOST, codes_of, paired

MOST_INT16 = tl.constexpr(MOST[torch.int16])
NUMBERS_AT_ONCE = tl.constexpr(8192)  # of parts on their way to the program that merges


@dataclass(frozen=True, slots=True)
class PartialSoftmax:
    """Room for what pieces leave behind. A worker has at most two that are not all of a sequence: its first one, that
    goes on with what another has begun, and its last one, that another goes on with."""

    sums: Tensor  # [workers, 2, lanes, rows, head_dim] fp32: of weighted values
    weights: Tensor  # [workers, 2, lanes, rows, 2] fp32: the greatest score, and the sum of weights


def new_partials(plan: DecodePlan, lanes: int, rows: int, head_dim: int) -> PartialSoftmax:
    like = {"dtype": torch.float32, "device": plan.pieces.device}
    places = plan.workers * 2 * lanes * rows if plan.split_contexts else 0
    return PartialSoftmax(torch.empty(places, head_dim, **like), torch.empty(places, 2, **like))


@triton.jit
def _partial_index(worker, split, lane, row, LANES: tl.constexpr, ROWS: tl.constexpr):
    return (((2 * worker + tl.where(split == 0, 1, 0)) * LANES + lane) * ROWS + row).to(tl.int64)


@triton.jit
def finish(
    acc,  # [ROWS, D_PAD]
    m,  # [ROWS]
    l,  # [ROWS]
    exists,  # [ROWS]
    out_at,  # [ROWS] where the row's result goes
    out,
    scales,  # of codes, if `out` is int16: it has one token then, and rows are groups
    partial_acc,
    partial_ml,
    counter,  # how many parts of these rows are there
    worker,
    lane,  # which of the LANES programs of the worker this is
    split,
    num_splits,
    v_fp8_scale,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Store a piece's result, or its part; and if it is the last part, their result."""
    SPLITS_AT_ONCE: tl.constexpr = max(1, NUMBERS_AT_ONCE // (ROWS * D_PAD))
    columns = tl.arange(0, D_PAD)
    present = exists[:, None] & (columns < D)[None, :]
    if num_splits == 1:
        _store(acc * _normalizer(l, v_fp8_scale)[:, None], out_at, out, scales, exists, D, D_PAD)
    else:
        row = tl.arange(0, ROWS)
        at = _partial_index(worker, split, lane, row, LANES, ROWS)
        tl.store(partial_acc + at[:, None] * D + columns[None, :], acc, mask=present)
        tl.store(partial_ml + at * 2, m, mask=exists)
        tl.store(partial_ml + at * 2 + 1, l, mask=exists)
        tl.debug_barrier()  # all that this program stored, before it is counted
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
            tl.store(counter, 0)  # for the next launch
            merged = tl.zeros([ROWS, D_PAD], tl.float32)
            m_max = tl.full([ROWS], FINITE_MIN, tl.float32)
            l_sum = tl.zeros([ROWS], tl.float32)
            for i in tl.range(0, num_splits, loop_unroll_factor=SPLITS_AT_ONCE):
                at = _partial_index(worker - split + i, i, lane, row, LANES, ROWS)
                split_acc = tl.load(partial_acc + at[:, None] * D + columns[None, :], mask=present, other=0.0)
                split_m = tl.load(partial_ml + at * 2, mask=exists, other=FINITE_MIN)
                split_l = tl.load(partial_ml + at * 2 + 1, mask=exists, other=0.0)
                m_new = tl.maximum(m_max, split_m)
                alpha = tl.exp2(m_max - m_new)
                split_alpha = tl.exp2(split_m - m_new)
                merged = merged * alpha[:, None] + split_acc * split_alpha[:, None]
                l_sum = l_sum * alpha + split_l * split_alpha
                m_max = m_new
            _store(merged * _normalizer(l_sum, v_fp8_scale)[:, None], out_at, out, scales, exists, D, D_PAD)


@triton.jit
def _store(y, out_at, out, scales, exists, D: tl.constexpr, D_PAD: tl.constexpr):
    """Rows as they are, or as codes for the product that follows (`quant_rows`)."""
    dtype: tl.constexpr = out.dtype.element_ty
    columns = tl.arange(0, D_PAD)
    if dtype == tl.int16:
        tl.static_assert(D == D_PAD)
        codes, scales = codes_of(y, MOST_INT16, dtype)
        places = paired((out_at[:, None] + columns[None, :]).to(tl.int32))
        tl.store(out + places, codes.to(dtype), mask=exists[:, None])
        tl.store(scales + out_at // D * 2, scales, mask=exists)
        tl.store(scales + out_at // D * 2 + 1, tl.sum(codes, 1) * scales, mask=exists)
    else:
        tl.store(out + out_at[:, None] + columns[None, :], y, mask=exists[:, None] & (columns < D)[None, :])


@triton.jit
def _normalizer(l, v_fp8_scale):
    return v_fp8_scale / tl.where(l == 0.0, 1.0, l)  # a row that saw nothing stays zeros


@triton.jit
def zero_padding(
    out, first, num_tokens, out_token, out_head, HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr
):
    """Tokens first .. num_tokens belong to no sequence. What follows must find numbers there."""
    columns = tl.arange(0, D_PAD)
    for piece in range(tl.program_id(0), (num_tokens - first) * HEADS, tl.num_programs(0)):
        at = (first + piece // HEADS).to(tl.int64) * out_token + piece % HEADS * out_head
        tl.store(out + at + columns, tl.zeros([D_PAD], tl.float32), mask=columns < D)
