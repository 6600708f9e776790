# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""LoRA: y[t] += scale * B (A x[t]), with the matrices of the slot that row t names.

Rows are sorted by slot into tiles, as routes are by expert in `moe`; rows without a slot are in no tile, and programs
without a tile return at once. The first GEMM has few outputs and many inputs, so the inputs are split at a fixed size
and the splits run side by side; the second GEMM adds them up, in order. A row's sums depend on the sizes of the layer
alone. GEMMs are transposed as in `linear_stream`."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.moe.sorting import RoutedTokens, sort_by_expert
from quire.ops.reference.lora import TorchLoraSlots

SPLIT_INPUTS = 512
MAX_SMALL_TILE_ROWS, SMALL_TILE, LARGE_TILE = 128, 16, 64  # up to so many rows, tiles of 16, else of 64
SHRINK_OUTPUTS = 32  # a program of the first GEMM
EXPAND_OUTPUTS = 64  # a program of the second


class GpuLoraSlots(TorchLoraSlots):
    """`TorchLoraSlots`, and how the kernels divide the layer's outputs."""

    def __init__(
        self,
        num_inputs: int,
        sizes: Sequence[int],
        num_slots: int,
        max_rank: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(num_inputs, sizes, num_slots, max_rank, device, dtype)
        self.tiles = torch.tensor(_output_tiles(sizes), dtype=torch.int32, device=device)  # [tiles, 3]


def _output_tiles(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Tiles of outputs, each inside one part: (first output, end of the part, part)"""
    ends = list(accumulate(sizes))
    return [
        (first, end, part)
        for part, (size, end) in enumerate(zip(sizes, ends, strict=True))
        for first in range(end - size, end, EXPAND_OUTPUTS)
    ]


def sort_by_slot(adapters: Tensor, num_slots: int, batch_invariant: bool) -> RoutedTokens:
    """adapters [T] int32, -1 where a row has none. Once a step, for all layers."""
    block = SMALL_TILE if batch_invariant or len(adapters) <= MAX_SMALL_TILE_ROWS else LARGE_TILE
    return sort_by_expert(adapters, num_slots, block)


def add_lora(y: Tensor, x: Tensor, slots: GpuLoraSlots, routing: RoutedTokens) -> Tensor:
    """y [T, outputs] is updated in place; x [T, inputs], of the slots' type."""
    _, num_parts, rank, num_inputs = slots.a.shape
    num_rows, hidden_size, num_outputs = len(x), num_parts * rank, slots.b.shape[1]
    assert x.shape == (num_rows, num_inputs) and y.shape == (num_rows, num_outputs)
    assert x.stride(1) == y.stride(1) == 1 and x.dtype == y.dtype == slots.a.dtype
    if num_rows == 0:
        return y
    splits, tiles = triton.cdiv(num_inputs, SPLIT_INPUTS), len(routing.tile_experts)
    hidden = torch.empty(splits, num_rows, hidden_size, dtype=torch.float32, device=x.device)
    block_k = 32 if x.dtype == torch.float32 else 128
    sorted_rows = routing.routes, routing.tile_experts
    _shrink_kernel[(tiles, triton.cdiv(hidden_size, SHRINK_OUTPUTS), splits)](
        x,
        slots.a,
        hidden,
        *sorted_rows,
        num_rows,
        x.stride(0),
        HIDDEN_SIZE=hidden_size,
        INPUTS=num_inputs,
        SPLIT=SPLIT_INPUTS,
        BLOCK_M=routing.block,
        BLOCK_N=SHRINK_OUTPUTS,
        BLOCK_K=block_k,
        num_warps=4,
    )
    _expand_kernel[(tiles, len(slots.tiles))](
        hidden,
        slots.b,
        slots.scales,
        y,
        slots.tiles,
        *sorted_rows,
        num_rows,
        y.stride(0),
        PARTS=num_parts,
        RANK=rank,
        OUTPUTS=num_outputs,
        SPLITS=splits,
        BLOCK_M=routing.block,
        BLOCK_N=EXPAND_OUTPUTS,
        BLOCK_R=max(int(triton.next_power_of_2(rank)), 16),
        num_warps=4,
    )
    return y


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x_ptr,
    a_ptr,
    hidden_ptr,
    row_ptr,
    tile_slot_ptr,
    num_rows,
    x_stride,
    HIDDEN_SIZE: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """hidden[split, row] = A[slot] x[row] over the split's inputs"""
    tile, split = tl.program_id(0), tl.program_id(2)
    slot = tl.load(tile_slot_ptr + tile).to(tl.int64)
    if slot >= 0:
        rows = tl.load(row_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        present = rows < num_rows
        outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        a_rows = a_ptr + (slot * HIDDEN_SIZE + tl.minimum(outputs, HIDDEN_SIZE - 1))[:, None] * INPUTS
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for chunk in range(SPLIT // BLOCK_K):
            k = split * SPLIT + chunk * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = k < INPUTS
            x = tl.load(x_ptr + rows[None, :] * x_stride + k[:, None], mask=present[None, :] & inside[:, None], other=0)
            a = tl.load(a_rows + k[None, :], mask=inside[None, :], other=0)
            acc = tl.dot(a, x, acc, input_precision="ieee")
        offsets = hidden_ptr + (split.to(tl.int64) * num_rows + rows[None, :]) * HIDDEN_SIZE + outputs[:, None]
        tl.store(offsets, acc, mask=(outputs < HIDDEN_SIZE)[:, None] & present[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    hidden_ptr,
    b_ptr,
    scale_ptr,
    y_ptr,
    output_tile_ptr,
    row_ptr,
    tile_slot_ptr,
    num_rows,
    y_stride,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """y[row, outputs of a tile] += B[slot] (scale * the sum of the splits of the tile's part)"""
    tile = tl.program_id(0)
    slot = tl.load(tile_slot_ptr + tile).to(tl.int64)
    if slot >= 0:
        first = tl.load(output_tile_ptr + 3 * tl.program_id(1))
        end = tl.load(output_tile_ptr + 3 * tl.program_id(1) + 1)
        part = tl.load(output_tile_ptr + 3 * tl.program_id(1) + 2)
        rows = tl.load(row_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        present = rows < num_rows
        ranks = tl.arange(0, BLOCK_R)
        there = (ranks < RANK)[:, None] & present[None, :]
        hidden = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
        for split in range(SPLITS):
            of_row = (split * num_rows + rows) * (PARTS * RANK) + part * RANK
            hidden += tl.load(hidden_ptr + of_row[None, :] + ranks[:, None], mask=there, other=0.0)
        hidden *= tl.load(scale_ptr + slot * PARTS + part)
        outputs = first + tl.arange(0, BLOCK_N)
        inside = outputs < end
        b_rows = b_ptr + (slot * OUTPUTS + outputs)[:, None] * RANK
        b = tl.load(b_rows + ranks[None, :], mask=inside[:, None] & (ranks < RANK)[None, :], other=0)
        added = tl.dot(b, hidden.to(b.dtype), input_precision="ieee")
        offsets = y_ptr + rows[None, :] * y_stride + outputs[:, None]
        wanted = inside[:, None] & present[None, :]
        y = tl.load(offsets, mask=wanted, other=0).to(tl.float32)
        tl.store(offsets, (y + added).to(y_ptr.dtype.element_ty), mask=wanted)
