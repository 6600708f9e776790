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


@triton.jit
def take_ticket(sums, partial_ptr, ticket_ptr, tile, split, SPLITS: tl.constexpr):
    """Leave this split's sums [ROWS, COLUMNS] of a tile; -> whether all splits of the tile have now done so."""
    ROWS: tl.constexpr = sums.shape[0]
    COLUMNS: tl.constexpr = sums.shape[1]
    tl.store(partial_ptr + _places(tile * SPLITS + split, ROWS, COLUMNS), sums)
    tl.debug_barrier()  # the ticket is one thread's: everyone's sums come first
    ticket = tl.atomic_add(ticket_ptr + tile, 1, sem="acq_rel", scope="gpu")
    return ticket == SPLITS - 1


@triton.jit
def add_splits(partial_ptr, ticket_ptr, tile, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums of all splits [ROWS, COLUMNS]; the counter is ready for the next product."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for split in range(SPLITS):
        total += tl.load(partial_ptr + _places(tile * SPLITS + split, ROWS, COLUMNS), cache_modifier=".cg")
    tl.store(ticket_ptr + tile, 0)
    return total


@triton.jit
def _places(index, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    inside = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return index.to(tl.int64) * (ROWS * COLUMNS) + inside


@triton.jit
def store_outputs(
    out_ptr, bias_ptr, sums, outputs, tokens, num_outputs, num_tokens, out_stride, HAS_BIAS: tl.constexpr
):
    """sums [outputs, tokens] (+ bias) to out [tokens, outputs]."""
    if HAS_BIAS:
        sums += tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[:, None]
    places = tokens.to(tl.int64)[None, :] * out_stride + outputs[:, None]
    inside = (outputs < num_outputs)[:, None] & (tokens < num_tokens)[None, :]
    tl.store(out_ptr + places, sums.to(out_ptr.dtype.element_ty), mask=inside)
