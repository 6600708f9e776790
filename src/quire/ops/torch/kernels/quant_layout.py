"""Weights as 4- or 8-bit codes in groups, laid out for the kernels of `quant_linear`.

    integers   w = scale * (code - zero) + offset     int4: code 0 .. 15, zero 0 or 8; int8: code -128 .. 127, zero 0
    codebook   w = scale * table[code]                16 values: NF4, FP4, MXFP4, IQ4_NL

Scale and offset belong to a group of neighbouring inputs of one output. Without an offset, zero = 8 is what symmetric
formats mean. Nothing is rounded on the way in, so these are exact:

    stored as             codes  zero   scale   offset
    Q4_0, symmetric GPTQ  int4   8      fp16    none
    Q4_1                  int4   0      fp16    fp16
    Q4_K                  int4   0      fp32    fp32
    GPTQ, AWQ             int4   0      fp16    fp32: -scale * zero point has up to 16 bits
    Q8_0, W8A16           int8   0      fp16    none
    Q5_K, Q2_K            int8   0      fp32    fp32
    Q6_K, Q3_K            int8   0      fp32    none

Codes lie in words of 32 bits, one a plane: 8 planes of 4 bits, the lowest first, or 4 of 8. `width` words make a chunk
of planes * width inputs: plane p of word i is input p * width + i of the chunk. So a row of words, whose planes are
taken one after the other, meets runs of `width` neighbouring inputs, and no lane needs what another has loaded. The
scales of a group lie side by side; where a single row is multiplied, all of an output's are wanted at once, and they
are kept in that order as well."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WIDTHS = (16, 32, 64)  # words of a chunk. 16: the inner size of the tensor cores' smallest product
WIDEST = 32  # unless asked for: with 64, the planes of a tile take more registers than 64 tokens leave


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """A matrix [num_outputs, num_inputs]. There are G groups: those of all the chunks, zeros past the last input."""

    bits: int  # 4 or 8
    num_outputs: int
    num_inputs: int
    group: int  # inputs, a power of two
    words: Tensor  # [N, chunks, width] int32
    scales: Tensor  # [G, N] fp16, bf16 or fp32
    offsets: Tensor | None  # [G, N] the same, or another of them
    by_output: Tensor | None  # int4: the same, [N, G] fp16, or [N, G, 2] with offsets, where all are fp16
    zero: int = 0
    table: tuple[float, ...] = ()  # of 16 values; else empty

    @property
    def num_chunks(self) -> int:
        return int(self.words.shape[1])

    @property
    def width(self) -> int:
        return int(self.words.shape[2])

    @property
    def chunk(self) -> int:
        """Inputs of a chunk."""
        return 32 // self.bits * self.width

    @property
    def nbytes(self) -> int:
        tensors = (self.words, self.scales, self.offsets, self.by_output)
        return sum(t.nbytes for t in tensors if t is not None)


def pack_int4(
    codes: Tensor, scales: Tensor, offsets: Tensor | None = None, zero: int = 0, width: int = 0
) -> GroupedWeight:
    """codes [N, K] uint8 of 0 .. 15, scales and offsets [N, K / group]. `width` is chosen where it is 0."""
    assert zero in (0, 8)
    return _pack(4, codes, scales, offsets, zero, (), width)


def pack_codebook4(codes: Tensor, scales: Tensor, table: Sequence[float], width: int = 0) -> GroupedWeight:
    """codes [N, K] uint8 of 0 .. 15, scales [N, K / group]; the kernels round `table` to the activations' dtype."""
    assert len(table) == 16
    return _pack(4, codes, scales, None, 0, tuple(table), width)


def pack_int8(codes: Tensor, scales: Tensor, offsets: Tensor | None = None, width: int = 0) -> GroupedWeight:
    """codes [N, K] int8, scales and offsets [N, K / group]"""
    return _pack(8, codes.view(torch.uint8), scales, offsets, 0, (), width)


def _pack(
    bits: int,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    zero: int,
    table: tuple[float, ...],
    width: int,
) -> GroupedWeight:
    assert codes.dtype == torch.uint8
    N, K = codes.shape
    group = _group(K, scales.shape[1])
    width = width or _width(K, group, 32 // bits)
    assert width in WIDTHS and width <= group
    words = _words(codes, bits, width)
    num_groups = -(-words.shape[1] * 32 // bits * width // group)
    scales = _by_group(scales, num_groups)
    offsets = None if offsets is None else _by_group(offsets, num_groups)
    by_output = None if bits == 8 or table else _by_output(scales, offsets)
    return GroupedWeight(bits, N, K, group, words, scales, offsets, by_output, zero, table)


def _group(K: int, num_groups: int) -> int:
    """Inputs that share a scale; a single group, for one scale a row, is taken to the next power of two."""
    group = max(1 << (K - 1).bit_length(), WIDTHS[0]) if num_groups == 1 else K // num_groups
    assert num_groups == 1 or num_groups * group == K, f"{num_groups} groups of {K} inputs"
    assert group >= WIDTHS[0] and group & (group - 1) == 0, f"groups of {group} inputs"
    return group


def _width(K: int, group: int, planes: int) -> int:
    """The one that pads least; of those, the widest."""
    widths = [width for width in WIDTHS if width <= min(group, WIDEST)]
    return min(widths, key=lambda width: (-K % (planes * width), -width))


def _words(codes: Tensor, bits: int, width: int) -> Tensor:
    """[N, K] -> [N, chunks, width] int32; zeros after the last input"""
    (N, K), planes = codes.shape, 32 // bits
    num_chunks = -(-K // (planes * width))
    padded = codes.new_zeros(N, num_chunks * planes * width)
    padded[:, :K] = codes
    by_plane = padded.view(N, num_chunks, planes, width)
    words = torch.zeros(N, num_chunks, width, dtype=torch.int32, device=codes.device)
    for plane in range(planes):
        words |= by_plane[:, :, plane].int() << bits * plane
    return words


def _by_group(values: Tensor, num_groups: int) -> Tensor:
    """[N, groups] -> [num_groups, N]"""
    out = values.new_zeros(num_groups, len(values))
    out[: values.shape[1]] = values.T
    return out


def _by_output(scales: Tensor, offsets: Tensor | None) -> Tensor | None:
    """[G, N] -> [N, G], or with offsets [N, G, 2]"""
    if any(t.dtype != torch.float16 for t in (scales, offsets) if t is not None):
        return None
    return scales.T.contiguous() if offsets is None else torch.stack([scales.T, offsets.T], dim=2)
