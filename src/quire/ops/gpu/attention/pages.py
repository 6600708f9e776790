"""What attention kernels are given: a layer's pages, the step's runs, and how scores are made."""

from dataclasses import dataclass
from functools import cache
from math import e, log2

import torch
import triton.language as tl
from torch import Tensor

LOG2E = log2(e)  # kernels take powers of two: exp(x) = exp2(x * LOG2E)
PROGRAMS_WITHOUT_DEVICE = 3  # where kernels are interpreted, one after the other


@dataclass(frozen=True, slots=True)
class Pages:
    """K and V of one layer, [blocks, block_size, kv_heads, head_dim]. Any strides will do but the last, which is 1.

    int8 codes have units [blocks, block_size, kv_heads] in fp32; fp8 (e4m3) has one scale for all of the layer."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    k_fp8_scale: float = 1.0
    v_fp8_scale: float = 1.0

    def __post_init__(self) -> None:
        assert self.k.shape == self.v.shape and self.k.stride() == self.v.stride(), "K and V are laid out alike"
        assert self.k.stride(-1) == 1, f"strides {self.k.stride()}: numbers of one head lie side by side"
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


@dataclass(frozen=True, slots=True)
class Runs:
    """The step's sequences, as in `StepBatch`, on the device: int32. A sequence whose context is 0 is padding."""

    seq_starts: Tensor  # [S + 1]
    context_lens: Tensor  # [S]
    block_tables: Tensor  # [S, W]

    @property
    def num_seqs(self) -> int:
        return int(self.context_lens.shape[0])


@dataclass(frozen=True, slots=True)
class Scoring:
    """softmax over: soft_cap * tanh(q.k * scale / soft_cap) + slope * (key's position - query's position), and over a
    sink, which has no value."""

    scale: float
    window: int = 0  # a position sees itself and the window - 1 before it; 0: all
    soft_cap: float = 0.0  # 0: none
    slopes: Tensor | None = None  # ALiBi: [heads] fp32
    sinks: Tensor | None = None  # likewise
    biases: Tensor | None = (
        None  # [heads, 2 * reach + 1] fp32, side by side: by distance, plus the one that stands there
    )

    @property
    def reach(self) -> int:
        return 0 if self.biases is None else int(self.biases.shape[1]) // 2

    def factors(self, k_fp8_scale: float) -> tuple[float, float]:
        """-> what q.k is multiplied by, and what its tanh is multiplied by (1 without a cap), for powers of two."""
        scale = self.scale * k_fp8_scale
        return (scale / self.soft_cap, self.soft_cap * LOG2E) if self.soft_cap else (scale * LOG2E, 1.0)


def dot_type(q: Tensor, kept: torch.dtype) -> tl.dtype:
    """The type in which K and V meet q and the weights. Codes of 8 bits become halves: that is one instruction for two
    of them, and exact; bfloat16 would take four. Triton's interpreter cannot multiply bfloat16."""
    if q.dtype.itemsize == 2 and kept.itemsize == 1:
        return tl.float16
    if q.dtype == torch.bfloat16 and q.device.type != "cuda":
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[q.dtype]


def offset_type(pages: Tensor) -> tl.dtype:
    """32 bits where they suffice: addresses take half the registers."""
    last = sum((n - 1) * stride for n, stride in zip(pages.shape, pages.stride(), strict=True))
    return tl.int32 if last < 2**31 else tl.int64


def next_power_of_two(n: int, least: int = 1) -> int:
    """The least power of two that is neither below n nor below `least`."""
    return max(least, 1 << (n - 1).bit_length())


def num_programs(device: torch.device, per_multiprocessor: int, most: int) -> int:
    """How many programs stay on the device and share the work, of which there are at most `most` pieces."""
    if device.type != "cuda":
        return min(PROGRAMS_WITHOUT_DEVICE, most)
    return min(multiprocessors(device) * per_multiprocessor, most)


@cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
