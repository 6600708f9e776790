"""What attention kernels are given: a layer's pages, the step's sequences, and how scores are made.

Each has an `args()`: a named tuple of tensors and strides that a kernel takes as one argument."""

from dataclasses import dataclass
from functools import cache
from math import e, log2
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.kv_8bit import as_words

LOG2E = log2(e)  # kernels take powers of two: exp(x) = exp2(x * LOG2E)
INTERPRETED_PROGRAMS = 3  # that share the work where kernels are interpreted, one after the other


class PageArgs(NamedTuple):
    """A layer's pages as `attend` reads them, 8-bit ones in 16-bit words; strides count elements of each tensor."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None
    block: int
    slot: int
    head: int
    scale_block: int
    scale_slot: int
    scale_head: int


class StoreArgs(NamedTuple):
    """A layer's pages as `store_kv` writes them."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None
    k_inverse_scale: float  # of fp8
    v_inverse_scale: float
    block: int
    slot: int
    head: int
    scale_block: int
    scale_slot: int
    scale_head: int


@dataclass(frozen=True, slots=True)
class Pages:
    """K and V of one layer, [blocks, block_size, kv_heads, head_dim]. Any strides will do but the last, which is 1.

    int8 has scales [blocks, block_size, kv_heads] in fp32; fp8 (e4m3) has one scale for the whole layer."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    k_fp8_scale: float = 1.0
    v_fp8_scale: float = 1.0

    def __post_init__(self) -> None:
        assert self.k.shape == self.v.shape and self.k.stride() == self.v.stride(), "K and V are laid out alike"
        assert self.k.stride(-1) == 1, f"strides {self.k.stride()}: the numbers of a head are contiguous"
        assert self.block_size & (self.block_size - 1) == 0, f"blocks of {self.block_size}: not a power of two"
        assert (self.k.dtype == torch.int8) == (self.k_scales is not None) == (self.v_scales is not None)

    @property
    def block_size(self) -> int:
        return int(self.k.shape[1])

    @property
    def num_kv_heads(self) -> int:
        return int(self.k.shape[2])

    @property
    def head_dim(self) -> int:
        return int(self.k.shape[3])

    @property
    def padded_head_dim(self) -> int:
        """Columns of a tile: a power of two that tensor cores take. 8-bit tiles are split into even and odd columns."""
        return next_power_of_two(self.head_dim, 32 if self.k.dtype.itemsize == 1 else 16)

    @property
    def is_fp8(self) -> bool:
        return bool(self.k.dtype == torch.float8_e4m3fn)

    def args(self) -> PageArgs:
        k, v = as_words(self.k), as_words(self.v)
        return PageArgs(k, v, self.k_scales, self.v_scales, *_strides(k), *_strides(self.k_scales))

    def store_args(self) -> StoreArgs:
        inverse = 1.0 / self.k_fp8_scale, 1.0 / self.v_fp8_scale
        return StoreArgs(
            self.k, self.v, self.k_scales, self.v_scales, *inverse, *_strides(self.k), *_strides(self.k_scales)
        )


def _strides(pages: Tensor | None) -> tuple[int, int, int]:
    """Between blocks, slots and heads."""
    return (0, 0, 0) if pages is None else (pages.stride(0), pages.stride(1), pages.stride(2))


class RunArgs(NamedTuple):
    seq_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    table_stride: int


@dataclass(frozen=True, slots=True)
class Runs:
    """The step's sequences, as in `StepBatch`, on the device: int32. A sequence whose context is 0 is padding."""

    seq_starts: Tensor  # [S + 1]
    context_lens: Tensor  # [S]
    block_tables: Tensor  # [S, W]

    @property
    def num_seqs(self) -> int:
        return int(self.context_lens.shape[0])

    def args(self) -> RunArgs:
        return RunArgs(self.seq_starts, self.context_lens, self.block_tables, self.block_tables.stride(0))


class ScoreArgs(NamedTuple):
    qk_scale: float  # what q.k is multiplied by: for exp2, or for the tanh of a soft cap
    cap: float | None  # what the tanh is multiplied by, for exp2; None: no soft cap
    slopes: Tensor | None
    sinks: Tensor | None
    biases: Tensor | None


@dataclass(frozen=True, slots=True)
class Scoring:
    """softmax over soft_cap * tanh(q.k * scale / soft_cap) + slope * (key's position - query's position) + bias of that
    distance, and over a sink, which has no value."""

    scale: float
    window: int = 0  # a position sees itself and the window - 1 before it; 0: all; < 0: its chunk of -window positions
    soft_cap: float = 0.0  # 0: none
    slopes: Tensor | None = None  # ALiBi: [heads] fp32
    sinks: Tensor | None = None  # [heads] fp32
    biases: Tensor | None = None  # [heads, 2 * reach + 1] fp32, contiguous: of distances -reach .. reach

    @property
    def reach(self) -> int:
        """The greatest distance that has a bias of its own."""
        return 0 if self.biases is None else int(self.biases.shape[1]) // 2

    def args(self, k_scale: float = 1.0) -> ScoreArgs:
        """`k_scale`: what stored keys are multiplied by."""
        scale = self.scale * k_scale
        qk_scale, cap = (scale / self.soft_cap, self.soft_cap * LOG2E) if self.soft_cap else (scale * LOG2E, None)
        return ScoreArgs(qk_scale, cap, self.slopes, self.sinks, self.biases)


class HeadArgs(NamedTuple):
    """A tensor [T, heads, head_dim]."""

    ptr: Tensor
    token: int
    head: int


def head_args(x: Tensor) -> HeadArgs:
    return HeadArgs(x, x.stride(0), x.stride(1))


def dot_type(q: Tensor, stored: torch.dtype) -> tl.dtype:
    """The type in which K and V are multiplied. 8-bit values become fp16: that is one instruction for two of them, and
    exact; bf16 would take four. Triton's interpreter cannot multiply bf16."""
    if q.dtype.itemsize == 2 and stored.itemsize == 1:
        return tl.float16
    if q.dtype == torch.bfloat16 and q.device.type != "cuda":
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[q.dtype]


def offset_type(pages: Tensor) -> tl.dtype:
    """32 bits where they suffice: addresses take half the registers."""
    last = sum((n - 1) * stride for n, stride in zip(pages.shape, pages.stride(), strict=True))
    return tl.int32 if last < 2**31 else tl.int64


def next_power_of_two(n: int, minimum: int = 1) -> int:
    """The smallest power of two that is at least n and at least `minimum`."""
    return max(minimum, 1 << (n - 1).bit_length())


def num_programs(device: torch.device, per_multiprocessor: int, max_programs: int) -> int:
    """How many persistent programs share the work."""
    if device.type != "cuda":
        return min(INTERPRETED_PROGRAMS, max_programs)
    return min(multiprocessors(device) * per_multiprocessor, max_programs)


@cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
