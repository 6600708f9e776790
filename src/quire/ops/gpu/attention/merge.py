# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# ruff: noqa: E741 (l is the running sum of an online softmax)
"""The end of a piece: an unsplit context is stored; a split one leaves its partial softmax, and the last split merges.

Splits are merged first to last, whichever program does it, so results do not depend on who finishes last. A kernel of
its own would cost a launch in every layer: some 2 us, or a twentieth of a token at batch 1 with 4-bit weights."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.plan import DecodePlan
from quire.ops.gpu.attention.tile import FINITE_MIN
from quire.ops.gpu.linear.quantize_rows import QUANT_MAX, paired_index, quantize_groups

INT16_MAX = tl.constexpr(QUANT_MAX[torch.int16])
NUMBERS_IN_FLIGHT = tl.constexpr(8192)  # of partial softmaxes, on their way to the program that merges


class PartialSoftmax(NamedTuple):
    """Room for the partial softmaxes of splits. A worker has at most two pieces that are not a whole context: its first
    one, which another worker has begun, and its last one, which another worker continues."""

    acc: Tensor  # [workers * 2 * lanes * rows, head_dim] fp32
    ml: Tensor  # [workers * 2 * lanes * rows, 2] fp32: m and l


def new_partials(plan: DecodePlan, lanes: int, rows: int, head_dim: int) -> PartialSoftmax:
    like = {"dtype": torch.float32, "device": plan.pieces.device}
    size = plan.workers * 2 * lanes * rows if plan.split_contexts else 0
    return PartialSoftmax(torch.empty(size, head_dim, **like), torch.empty(size, 2, **like))


@triton.jit
def _partial_index(worker, split, lane, row, LANES: tl.constexpr, ROWS: tl.constexpr):
    return (((2 * worker + tl.where(split == 0, 1, 0)) * LANES + lane) * ROWS + row).to(tl.int64)


@triton.jit
def finish_piece(
    acc,  # [ROWS, D_PAD]
    m,  # [ROWS]
    l,  # [ROWS]
    exists,  # [ROWS]
    out_offset,  # [ROWS] where the row's result goes
    out,
    out_scales,  # if `out` is int16: it has one token then, and rows are groups
    partials,  # PartialSoftmax
    counter,  # how many splits of these rows are done
    worker,
    lane,  # which of the LANES programs of the worker this is
    split,
    num_splits,
    v_scale,
    LANES: tl.constexpr,
    D: tl.constexpr,
):
    """Store the result of a whole context, or a split's partial softmax; the last split stores the result of all."""
    ROWS: tl.constexpr = acc.shape[0]
    D_PAD: tl.constexpr = acc.shape[1]
    SPLITS_AT_ONCE: tl.constexpr = max(1, NUMBERS_IN_FLIGHT // (ROWS * D_PAD))
    columns = tl.arange(0, D_PAD)
    present = exists[:, None] & (columns < D)[None, :]
    if num_splits == 1:
        _store(acc * _normalizer(l, v_scale)[:, None], out_offset, out, out_scales, exists, D, D_PAD)
    else:
        row = tl.arange(0, ROWS)
        index = _partial_index(worker, split, lane, row, LANES, ROWS)
        tl.store(partials.acc + index[:, None] * D + columns[None, :], acc, mask=present)
        tl.store(partials.ml + index * 2, m, mask=exists)
        tl.store(partials.ml + index * 2 + 1, l, mask=exists)
        tl.debug_barrier()  # the stores of the whole program come before its count
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
            tl.store(counter, 0)  # for the next launch
            merged_acc = tl.zeros([ROWS, D_PAD], tl.float32)
            merged_m = tl.full([ROWS], FINITE_MIN, tl.float32)
            merged_l = tl.zeros([ROWS], tl.float32)
            for i in tl.range(0, num_splits, loop_unroll_factor=SPLITS_AT_ONCE):
                index = _partial_index(worker - split + i, i, lane, row, LANES, ROWS)
                split_acc = tl.load(partials.acc + index[:, None] * D + columns[None, :], mask=present, other=0.0)
                split_m = tl.load(partials.ml + index * 2, mask=exists, other=FINITE_MIN)
                split_l = tl.load(partials.ml + index * 2 + 1, mask=exists, other=0.0)
                m_new = tl.maximum(merged_m, split_m)
                alpha = tl.exp2(merged_m - m_new)
                split_alpha = tl.exp2(split_m - m_new)
                merged_acc = merged_acc * alpha[:, None] + split_acc * split_alpha[:, None]
                merged_l = merged_l * alpha + split_l * split_alpha
                merged_m = m_new
            _store(merged_acc * _normalizer(merged_l, v_scale)[:, None], out_offset, out, out_scales, exists, D, D_PAD)


@triton.jit
def _store(y, out_offset, out, out_scales, exists, D: tl.constexpr, D_PAD: tl.constexpr):
    """Rows as they are, or quantized for the GEMV that follows (`quantize_rows`)."""
    dtype: tl.constexpr = out.dtype.element_ty
    columns = tl.arange(0, D_PAD)
    if dtype == tl.int16:
        tl.static_assert(D == D_PAD)
        q, scales = quantize_groups(y, INT16_MAX, dtype)
        index = paired_index((out_offset[:, None] + columns[None, :]).to(tl.int32))
        tl.store(out + index, q.to(dtype), mask=exists[:, None])
        tl.store(out_scales + out_offset // D * 2, scales, mask=exists)
        tl.store(out_scales + out_offset // D * 2 + 1, tl.sum(q, 1) * scales, mask=exists)
    else:
        tl.store(out + out_offset[:, None] + columns[None, :], y, mask=exists[:, None] & (columns < D)[None, :])


@triton.jit
def _normalizer(l, v_scale):
    return v_scale / tl.where(l == 0.0, 1.0, l)  # a row that saw nothing stays zeros


@triton.jit
def zero_padding(out, first, num_tokens, HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr):
    """Clear tokens first .. num_tokens, which belong to no sequence: what follows must read numbers there. out:
    HeadArgs"""
    columns = tl.arange(0, D_PAD)
    for piece in range(tl.program_id(0), (num_tokens - first) * HEADS, tl.num_programs(0)):
        index = (first + piece // HEADS).to(tl.int64) * out.token + piece % HEADS * out.head
        tl.store(out.ptr + index + columns, tl.zeros([D_PAD], tl.float32), mask=columns < D)
