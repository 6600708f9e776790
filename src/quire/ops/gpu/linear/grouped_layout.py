"""Weights quantized to 4 to 8 bits in groups, laid out for grouped.py.

    integers      w = scale * (q - zero) + offset     q 0 .. 15, or 0 .. 63 with high bits; int8: -128 .. 127, zero 0
    zero points   w = scale * (q - zero point)        q 0 .. 15, an integer of its own for each group
    codebook      w = scale * codebook[q]             16 values: NF4, FP4, MXFP4, IQ4_NL

Scale, zero point and offset belong to a group of neighbouring inputs of one output. Without the others, zero = 8 is
what symmetric formats mean. A zero point is subtracted while values are unpacked, which costs nothing; an offset is
multiplied with the sum of the group's activations. Nothing is rounded on the way in, so these are exact (larger groups
take fewer bits):

    stored as              bits a weight  q      zero  group  scale  offset
    Q4_0, symmetric GPTQ   4.5            int4   8     32     fp16   none
    Q4_1                   5              int4   0     32     fp16   fp16
    GPTQ, AWQ              5              int4   point 32     fp16   none
    HQQ, zeros not whole   5.5            int4   0     32     fp16   fp32: -scale * zero has up to 16 bits
    Q8_0, W8A16            8.5            int8   0     32     fp16   none
    Q2_K                   5.13           int4   0     16     int8   int8, both times super-scales
    Q3_K                   4.63           int4   8     16     int8   none
    Q4_K                   4.5            int4   0     32     6 bits 6 bits
    Q5_K                   5.5            4 + 1  0     32     6 bits 6 bits
    Q6_K                   6.63           4 + 2  32    16     int8   none
    MXFP4                  4.25           index  none  32     byte   none

Values lie in words of 32 bits, one for each plane: 8 planes of 4 bits, the lowest first, or 4 of 8. `width` words make
a chunk of planes * width inputs: plane p of word i is input p * width + i of the chunk. So a row of words, whose planes
are taken one after the other, meets runs of `width` neighbouring inputs, and no lane needs what another has loaded.
Where values have more than 4 bits, the others lie in `high`, in smaller words with planes of their own. MXFP4's values
lie in pairs of words, and their rows in eights (e2m1.py); its scales, powers of two, are bytes (exponents.py).

Where scales are small, those of an output's chunk lie together, each followed by its offset (or its zero point, in 16
bits), and are loaded as words: fp16 beside 4-bit values, and the bytes or six bits of K-quants. K-quants have two
levels: scales and offsets are multiplied with super-scales, of which there is one for 256 inputs. Six bits lie as they
do in files: of a word's four bytes the low bits are the scales of groups 0 .. 3, of the next word's the offsets; groups
4 .. 7 have four bits in the last word, a scale's and then an offset's in each byte, and two on top of the others. A
super-scale has 32 bits, as loads of fewer cannot be in flight while others are worked on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.gpu.linear.e2m1 import E2M1, place
from quire.ops.gpu.linear.exponents import by_chunk, exponents_of

WIDTHS = (16, 32, 64)  # words of a chunk. 16: the least K that tensor cores take
MAX_AUTO_WIDTH = 32  # with 64, the planes of a tile take more registers than 64 tokens leave
HIGH_WORDS = {1: torch.uint8, 2: torch.int16}
SUPER_BLOCK = 256  # inputs that share a super-scale
MXFP4_GROUP = 32
MAX_ZERO_POINT = 127  # 128 + q - 128 - point is exact in bf16


class GroupedArgs(NamedTuple):
    """A `GroupedWeight` as kernels take it."""

    words: Tensor
    high: Tensor | None
    scales: Tensor
    offsets: Tensor | None
    super_scales: Tensor | None
    codebook: Tensor | None  # where it is not in the instructions: see unpack.py


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """A matrix [num_outputs, num_inputs]. There are G groups: those of all the chunks, zeros past the last input."""

    bits: int  # 4 or 8: those in `words`
    num_outputs: int
    num_inputs: int
    group: int  # inputs, a power of two
    words: Tensor  # [N, chunks, width] int32
    scales: Tensor  # [G, N] fp16, bf16 or fp32; or of chunks [chunks, N, words] int32 or int64; exponents: uint8
    offsets: Tensor | None = None  # [G, N] fp16, bf16 or fp32, unless they are among the words
    super_scales: Tensor | None = None  # [K / 256, N] fp32, of scales; int32: two fp16, of scales and of -offsets
    has_offsets: bool = False
    high: Tensor | None = None  # [N, chunks, width] uint8 or int16: one or two more bits of 8 planes
    zero: int = 0
    codebook: tuple[float, ...] = ()  # 16 values; empty: integers
    has_zero_points: bool = False  # beside the scales, in place of `zero`

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
    def has_exponents(self) -> bool:
        """Whether scales are those of exponents.py."""
        return bool(self.scales.dtype == torch.uint8)

    @property
    def nbytes(self) -> int:
        tensors = (self.words, self.scales, self.offsets, self.super_scales, self.high)
        return sum(t.nbytes for t in tensors if t is not None)


def pack_int4(q: Tensor, scales: Tensor, offsets: Tensor | None = None, zero: int = 0, width: int = 0) -> GroupedWeight:
    """q [N, K] uint8 of 0 .. 15, scales and offsets [N, K / group]. A `width` of 0 is chosen here."""
    assert zero in (0, 8)
    return _pack(4, q, scales, offsets, zero, (), width)


def pack_zero_points(q: Tensor, scales: Tensor, points: Tensor) -> GroupedWeight:
    """q [N, K] uint8 of 0 .. 15, scales [N, K / group] fp16, points of the same shape that `are_zero_points`"""
    assert scales.dtype == torch.float16
    as_halves = points.to(torch.int16).view(torch.float16)
    return replace(_pack(4, q, scales, as_halves, 0, (), 0), has_offsets=False, has_zero_points=True)


def are_zero_points(zeros: Tensor) -> bool:
    whole = zeros.round().clamp(0, MAX_ZERO_POINT)
    return bool(torch.equal(whole, zeros))


def pack_codebook4(q: Tensor, scales: Tensor, codebook: Sequence[float], width: int = 0) -> GroupedWeight:
    """q [N, K] uint8 of 0 .. 15, scales [N, K / group]. Kernels round the codebook to the activations' dtype."""
    assert len(codebook) == 16
    return _pack(4, q, scales, None, 0, tuple(codebook), width)


def pack_int8(q: Tensor, scales: Tensor, offsets: Tensor | None = None, width: int = 0) -> GroupedWeight:
    """q [N, K] int8, scales and offsets [N, K / group]"""
    return _pack(8, q.view(torch.uint8), scales, offsets, 0, (), width)


def pack_super_scaled(
    q: Tensor, scales: Tensor, super_scales: Tensor, high_bits: int = 0, zero: int = 0
) -> GroupedWeight:
    """q [N, K] uint8 of 4 + high_bits bits, scales [N, K / group] int8, super_scales [N, K / 256] fp16; with offsets
    [N, K / group, 2] and [N, K / 256, 2]: scale * q - offset."""
    assert scales.dtype == torch.int8
    group = _group(q.shape[1], scales.shape[1])
    return _pack_super_scaled(q, group, scales, torch.int64, super_scales, high_bits, zero)


def pack_six_bits(q: Tensor, scales: Tensor, super_scales: Tensor) -> GroupedWeight:
    """`pack_super_scaled` in groups of 32, with scales and offsets as they lie in files: scales [N, K / 256, 12]
    uint8"""
    assert scales.dtype == torch.uint8 and scales.shape[2] == 12
    return _pack_super_scaled(q, 32, scales, torch.int32, super_scales, high_bits=0, zero=0)


def _pack_super_scaled(
    q: Tensor, group: int, scales: Tensor, word: torch.dtype, super_scales: Tensor, high_bits: int, zero: int
) -> GroupedWeight:
    (N, K), width = q.shape, min(group, MAX_AUTO_WIDTH)
    assert K % SUPER_BLOCK == 0 and super_scales.dtype == torch.float16
    words = _words(q & 15, 4, width)
    by_block = super_scales.float().T if super_scales.dim() == 2 else super_scales.view(torch.int32)[..., 0].T
    by_chunk = scales.reshape(N, words.shape[1], -1).contiguous().view(word).transpose(0, 1)
    return GroupedWeight(
        bits=4,
        num_outputs=N,
        num_inputs=K,
        group=group,
        words=words,
        scales=by_chunk.contiguous(),
        super_scales=by_block.contiguous(),
        has_offsets=super_scales.dim() == 3,
        high=_words(q >> 4, high_bits, width, 8).to(HIGH_WORDS[high_bits]) if high_bits else None,
        zero=zero,
    )


def _pack(
    bits: int,
    q: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    zero: int,
    codebook: tuple[float, ...],
    width: int,
) -> GroupedWeight:
    assert q.dtype == torch.uint8
    N, K = q.shape
    group = _group(K, scales.shape[1])
    width = width or _width(K, group, 32 // bits)
    assert width in WIDTHS and width <= group
    words = _words(q, bits, width)
    if codebook == E2M1:
        words = place(words)
    chunk, has_offsets = 32 // bits * width, offsets is not None
    num_groups = -(-words.shape[1] * chunk // group)
    exponents = _exponents(q, scales) if codebook == E2M1 and group == MXFP4_GROUP else None
    as_bytes = None if exponents is None else by_chunk(exponents, words.shape[1], chunk // group)
    scales = _by_group(scales, num_groups) if as_bytes is None else as_bytes
    offsets = None if offsets is None else _by_group(offsets, num_groups)
    if bits == 4 and not codebook and all(t.dtype == torch.float16 for t in (scales, offsets) if t is not None):
        scales, offsets = _together(scales, offsets, max(chunk // group, 1)), None
    return GroupedWeight(
        bits, N, K, group, words, scales, offsets, has_offsets=has_offsets, zero=zero, codebook=codebook
    )


def _exponents(q: Tensor, scales: Tensor) -> Tensor | None:
    """`exponents_of` the scales of values of E2M1, where groups of zeros may have any: files give them 2^-128."""
    found = exponents_of(scales)
    if found is None:
        zeros = (q.unflatten(1, (scales.shape[1], -1)) & 7 == 0).all(2) & scales.isfinite()
        found = exponents_of(scales.masked_fill(zeros, 0))
    return found


def _group(K: int, num_groups: int) -> int:
    """Inputs that share a scale; a single group, for one scale a row, is taken to the next power of two."""
    group = max(1 << (K - 1).bit_length(), WIDTHS[0]) if num_groups == 1 else K // num_groups
    assert num_groups == 1 or num_groups * group == K, f"{num_groups} groups of {K} inputs"
    assert group >= WIDTHS[0] and group & (group - 1) == 0, f"groups of {group} inputs"
    return group


def _width(K: int, group: int, planes: int) -> int:
    """The width that pads least; among equals, the widest."""
    widths = [width for width in WIDTHS if width <= min(group, MAX_AUTO_WIDTH)]
    return min(widths, key=lambda width: (-K % (planes * width), -width))


def _words(q: Tensor, bits: int, width: int, planes: int = 0) -> Tensor:
    """[N, K] -> [N, chunks, width] int32; zeros after the last input. `planes`: fewer than fill a word."""
    (N, K), planes = q.shape, planes or 32 // bits
    num_chunks = -(-K // (planes * width))
    padded = q.new_zeros(N, num_chunks * planes * width)
    padded[:, :K] = q
    by_plane = padded.view(N, num_chunks, planes, width)
    words = torch.zeros(N, num_chunks, width, dtype=torch.int32, device=q.device)
    for plane in range(planes):
        words |= by_plane[:, :, plane].int() << bits * plane
    return words


def _by_group(values: Tensor, num_groups: int) -> Tensor:
    """[N, groups] -> [num_groups, N]"""
    out = values.new_zeros(num_groups, len(values))
    out[: values.shape[1]] = values.T
    return out


def _together(scales: Tensor, offsets: Tensor | None, groups: int) -> Tensor:
    """[G, N] fp16 -> words of the scales of `groups` groups, or [G, N] where a word would hold one"""
    pairs = scales[..., None] if offsets is None else torch.stack([scales, offsets], dim=2)  # [G, N, 1 or 2]
    together = pairs.unflatten(0, (-1, groups)).transpose(1, 2).flatten(2).contiguous()
    count = together.shape[2]
    return together[..., 0] if count == 1 else together.view(torch.int32 if count == 2 else torch.int64)
