# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Rows of an embedding table."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # columns a program


def embedding(ids: Tensor, table: Tensor, dtype: torch.dtype | None = None, last: Tensor | None = None) -> Tensor:
    """ids [T] int32 or int64, all inside the table [vocab, n] -> table[ids] [T, n] in `dtype`, or the table's own.
    An id below zero stands for last[~id]."""
    (rows,), n = ids.shape, table.shape[1]
    assert ids.is_contiguous() and table.stride(1) == 1
    out = table.new_empty(rows, n, dtype=dtype or table.dtype)
    if rows:
        grid = (rows, triton.cdiv(n, BLOCK))
        _embedding_kernel[grid](ids, last, table, out, n, table.stride(0), HAS_LAST=last is not None, BLOCK=BLOCK)
    return out


@triton.jit
def _embedding_kernel(
    ids_ptr, last_ptr, table_ptr, out_ptr, n, table_stride, HAS_LAST: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids_ptr + row).to(tl.int64)
    if HAS_LAST and id < 0:
        id = tl.load(last_ptr - id - 1).to(tl.int64)
    x = tl.load(table_ptr + id * table_stride + columns, mask=columns < n)
    tl.store(out_ptr + row * n + columns, x, mask=columns < n)
