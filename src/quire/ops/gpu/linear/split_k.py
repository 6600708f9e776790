# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""A product's inner sum shared by several programs, added up by the last of them to finish.

Few rows of activations make few tiles of outputs, too few to keep every multiprocessor loading. So the inputs are
split as well. Each split leaves its sums in memory and takes a ticket; whoever takes the last one adds up all of them,
from the first split to the last. The order never depends on who was fast, and no second kernel is launched."""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_TICKETS = 1 << 16  # tiles of one product


def new_tickets(device: torch.device | str) -> Tensor:
    """One counter a tile of outputs. Kernels leave it zeroed, so that products that run one after the other, as on one
    stream, can share it."""
    return torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device)


def split_space(out: Tensor, tiles: int, tile_size: int, shares: int, tickets: Tensor | None) -> tuple[Tensor, Tensor]:
    """-> partials [tiles, shares, tile_size] fp32 and tickets; where nothing is shared, neither is touched."""
    if shares == 1:
        return out, out
    tickets = new_tickets(out.device) if tickets is None else tickets
    assert tiles <= len(tickets), f"{tiles} tiles, {len(tickets)} tickets"
    return torch.empty(tiles * shares * tile_size, dtype=torch.float32, device=out.device), tickets


@triton.jit
def finish(
    sums,
    out_ptr,
    bias_ptr,
    partial_ptr,
    ticket_ptr,
    outputs,
    tokens,
    N,
    M,
    HAS_BIAS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """sums [outputs, tokens], those of this program's share of the inputs, become out [M, N], bias added.

    Programs are numbered (tile of outputs, share, tile of tokens)."""
    if SHARES == 1:
        _store_outputs(out_ptr, bias_ptr, sums, outputs, tokens, N, M, HAS_BIAS)
    else:
        ROWS: tl.constexpr = sums.shape[0]
        COLUMNS: tl.constexpr = sums.shape[1]
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        tl.store(partial_ptr + _places(tile * SHARES + tl.program_id(1), ROWS, COLUMNS), sums)
        tl.debug_barrier()  # the ticket is one thread's: everyone's sums come first
        ticket = tl.atomic_add(ticket_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if ticket == SHARES - 1:
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for share in range(SHARES):
                total += tl.load(partial_ptr + _places(tile * SHARES + share, ROWS, COLUMNS), cache_modifier=".cg")
            tl.store(ticket_ptr + tile, 0)
            _store_outputs(out_ptr, bias_ptr, total, outputs, tokens, N, M, HAS_BIAS)


@triton.jit
def _places(index, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    inside = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return index.to(tl.int64) * (ROWS * COLUMNS) + inside


@triton.jit
def _store_outputs(out_ptr, bias_ptr, sums, outputs, tokens, N, M, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        sums += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None]
    places = tokens.to(tl.int64)[None, :] * N + outputs[:, None]
    inside = (outputs < N)[:, None] & (tokens < M)[None, :]
    tl.store(out_ptr + places, sums.to(out_ptr.dtype.element_ty), mask=inside)
