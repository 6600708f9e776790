# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Split-K: several programs share the inputs of one tile of outputs, and the last of them to finish adds up the parts.

Few rows of activations make few tiles of outputs, too few to keep every multiprocessor loading. So the inputs are split
as well. Each split leaves its partial sums in memory and takes a ticket; the program with the last ticket adds up all
of them, from the first split to the last. The order never depends on which program was fast, and no second kernel is
launched."""

from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_TICKETS = 1 << 16  # tiles of one GEMM


class OutputArgs(NamedTuple):
    """Where the sums of a GEMM's tiles go."""

    out: Tensor  # [M, N]
    bias: Tensor | None  # [N]
    partials: Tensor | None  # [tiles, shares, tile_size] fp32; None: one program has all inputs of its tile
    tickets: Tensor | None


class SplitConfig(Protocol):
    """How a GEMM is divided among programs."""

    @property
    def block_m(self) -> int: ...  # tokens a program
    @property
    def block_n(self) -> int: ...  # outputs a program
    @property
    def splits(self) -> int: ...  # of K
    @property
    def serial(self) -> bool: ...  # one program takes all splits of its tile, one after the other
    @property
    def stages(self) -> int: ...


class SplitLaunch(NamedTuple):
    grid: tuple[int, int, int]  # tiles of outputs, shares, tiles of tokens
    to: OutputArgs
    constants: dict[str, Any]  # of the kernel


def new_tickets(device: torch.device | str) -> Tensor:
    """One counter for each tile of outputs. Kernels leave it zeroed, so GEMMs that run one after the other, as on one
    stream, can share it."""
    return torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device)


def split_launch(config: SplitConfig, out: Tensor, bias: Tensor | None, tickets: Tensor | None) -> SplitLaunch:
    """The launch of a kernel whose programs `finish` tiles of out [M, N]."""
    M, N = out.shape
    tiles_m, tiles_n = triton.cdiv(M, config.block_m), triton.cdiv(N, config.block_n)
    shares = 1 if config.serial else config.splits
    to = _output_args(out, bias, tiles_m * tiles_n, config.block_n * config.block_m, shares, tickets)
    tile = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    constants = {"SPLITS": config.splits, "SHARES": shares, **tile, "STAGES": config.stages}
    return SplitLaunch((tiles_n, shares, tiles_m), to, constants)


def _output_args(
    out: Tensor, bias: Tensor | None, tiles: int, tile_size: int, shares: int, tickets: Tensor | None
) -> OutputArgs:
    """`shares`: programs that share the inputs of a tile."""
    if shares == 1:
        return OutputArgs(out, bias, None, None)
    tickets = new_tickets(out.device) if tickets is None else tickets
    assert tiles <= len(tickets), f"{tiles} tiles, {len(tickets)} tickets"
    partials = torch.empty(tiles * shares * tile_size, dtype=torch.float32, device=out.device)
    return OutputArgs(out, bias, partials, tickets)


@triton.jit
def opaque(x, ASM: tl.constexpr):
    """x fp32, in no instruction: Triton does not look through it, so a dot product is waited for."""
    return x if ASM == "" else tl.inline_asm_elementwise("", "=f,0", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def rounded_product(x, y, ASM: tl.constexpr):
    """x * y fp32 of one shape. The assembler fuses a plain product with the addition that follows, `mul.rn` never."""
    if ASM == "":
        product = x * y
    else:
        product = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, is_pure=True, pack=1
        )
    return product


@triton.jit
def finish(acc, to, outputs, tokens, N, M, SHARES: tl.constexpr):
    """acc [outputs, tokens], the sums of this program's share of the inputs, become out [M, N], bias added.

    to: OutputArgs. Programs are numbered (tile of outputs, share, tile of tokens)."""
    if SHARES == 1:
        _store_outputs(to, acc, outputs, tokens, N, M)
    else:
        ROWS: tl.constexpr = acc.shape[0]
        COLUMNS: tl.constexpr = acc.shape[1]
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        tl.store(to.partials + _tile_offsets(tile * SHARES + tl.program_id(1), ROWS, COLUMNS), acc)
        tl.debug_barrier()  # one thread takes the ticket: the sums of all threads come first
        ticket = tl.atomic_add(to.tickets + tile, 1, sem="acq_rel", scope="gpu")
        if ticket == SHARES - 1:
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for share in range(SHARES):
                offsets = _tile_offsets(tile * SHARES + share, ROWS, COLUMNS)
                total += tl.load(to.partials + offsets, cache_modifier=".cg")
            tl.store(to.tickets + tile, 0)
            _store_outputs(to, total, outputs, tokens, N, M)


@triton.jit
def _tile_offsets(index, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    inside = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return index.to(tl.int64) * (ROWS * COLUMNS) + inside


@triton.jit
def _store_outputs(to, acc, outputs, tokens, N, M):
    if to.bias is not None:
        acc += tl.load(to.bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None]
    offsets = tokens.to(tl.int64)[None, :] * N + outputs[:, None]
    inside = (outputs < N)[:, None] & (tokens < M)[None, :]
    tl.store(to.out + offsets, acc.to(to.out.dtype.element_ty), mask=inside)
