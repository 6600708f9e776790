# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Where a step's tokens and blocks lie in window pages: found on the device, once a step, so that a captured graph
reads which block has which page when it is replayed."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ENTRIES = 1024  # of a program


def find_pages(page_of: Tensor, slots: Tensor, tables: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """page_of [blocks], slots [T] and tables [S, W], all int32 -> slots and tables in window pages. The slot of padding
    stays -1; a block that has no page has any."""
    assert page_of.dtype == slots.dtype == tables.dtype == torch.int32
    page_slots, page_tables = torch.empty_like(slots), torch.empty_like(tables)
    num_programs = triton.cdiv(max(slots.numel(), tables.numel()), ENTRIES)
    _find_pages[(num_programs,)](
        page_of,
        slots.contiguous(),
        page_slots,
        tables.contiguous(),
        page_tables,
        slots.numel(),
        tables.numel(),
        BLOCK_SIZE=block_size,
        ENTRIES=ENTRIES,
        num_warps=4,
    )
    return page_slots, page_tables


@triton.jit(do_not_specialize=["num_slots", "num_entries"])
def _find_pages(
    page_of,
    slots,
    page_slots,
    tables,
    page_tables,
    num_slots,
    num_entries,
    BLOCK_SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    block = tl.load(tables + entry, mask=entry < num_entries, other=0)
    tl.store(page_tables + entry, tl.load(page_of + block), mask=entry < num_entries)
    slot = tl.load(slots + entry, mask=entry < num_slots, other=-1)
    is_token = slot >= 0
    page = tl.load(page_of + slot // BLOCK_SIZE, mask=is_token, other=0)
    tl.store(page_slots + entry, tl.where(is_token, page * BLOCK_SIZE + slot % BLOCK_SIZE, -1), mask=entry < num_slots)
