"""Which weights and how many rows the kernel of grouped_few.py is for, and its programs."""

from typing import NamedTuple

import torch

from quire.ops.gpu.linear.few_fragments import TOKENS, UNIT
from quire.ops.gpu.linear.few_unpack import FewValues
from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.linear import PROGRAMS
from quire.ops.gpu.linear.quantize_rows import MAX_BLOCK
from quire.ops.gpu.linear.wide_config import has_wide_kernel
from quire.ops.gpu.linear.wide_format import high_bits

MAX_ROWS = 16
MANY_OUTPUTS = 16384  # that make enough tiles without splits


class FewConfig(NamedTuple):
    warps: int = 8
    resident: int = 2  # programs that share a multiprocessor
    registers: int = 128
    batch: int = 8  # tiles of outputs whose sums are added up together


EIGHT = FewConfig()
FOUR = FewConfig(warps=4, resident=3, registers=168)  # smaller programs, which some numbers of outputs divide better


class FewFormat(NamedTuple):
    """How scales are stored, and how values are scaled."""

    kind: str  # "six": of Q4_K; "pairs": bytes, each with an offset; "bytes": of groups of 16; "halves", "floats": fp16
    group: int  # inputs
    words: int  # of the scales of a chunk; of "floats" their number
    values: FewValues


def few_format(weight: GroupedWeight) -> FewFormat | None:
    """None: the kernel does not know the weight's values or scales, or its inputs are not whole units."""
    whole = weight.num_inputs % UNIT == 0 and weight.num_inputs <= MAX_BLOCK and weight.words.numel() < 2**31
    if weight.bits == 8:
        known = weight.width == 32 and 32 <= weight.group <= 128 and weight.scales.dtype == torch.float16
        floats = FewFormat("floats", weight.group, weight.chunk // weight.group, FewValues(8, 0, 0, "none"))
        return floats if whole and known and not weight.has_offsets else None
    if weight.codebook or not whole or weight.scales.is_floating_point():
        return None
    high = high_bits(weight)
    words = weight.scales.numel() * weight.scales.element_size() // (4 * weight.num_chunks * weight.num_outputs)
    if weight.super_scales is None:
        known = not weight.has_offsets and weight.width == 32 and 32 <= weight.group <= 128
        second = "points" if weight.has_zero_points else "none"
        return FewFormat("halves", weight.group, words, FewValues(4, 0, weight.zero, second)) if known else None
    if weight.has_offsets:
        kind = "six" if weight.scales.dtype == torch.int32 else "pairs"
        return FewFormat(kind, 32, words, FewValues(4, high, 0, "offsets")) if weight.group == 32 else None
    return FewFormat("bytes", 16, words, FewValues(4, high, weight.zero, "none")) if weight.group == 16 else None


def few_config_of(num_rows: int, weight: GroupedWeight, batch_invariant: bool = False) -> FewConfig | None:
    """None where the device, the weight or the rows are not for the kernel, or another one is faster."""
    if batch_invariant or not 1 <= num_rows <= MAX_ROWS or not has_wide_kernel(weight.words.device):
        return None
    return few_config(num_rows, weight)


def few_config(num_rows: int, weight: GroupedWeight) -> FewConfig | None:
    """Larger groups have few scales to apply: one row is left to integers (grouped_gemv.py), and more than eight rows
    of many outputs to the tiles of grouped_config.py."""
    form, many_tokens = few_format(weight), num_rows > TOKENS
    if form is None or form.kind == "floats":  # the kernel computes them, too, and was not timed beside the tiles
        return None
    large_groups = form.kind == "halves" and form.group >= 64
    if large_groups and (num_rows == 1 or (many_tokens and weight.num_outputs >= MANY_OUTPUTS)):
        return None
    # Two sums of 16 tokens, and offsets, take more registers than eight warps have.
    slower = 1.2 if many_tokens and form.values.second == "offsets" else 1.0
    tiles = -(-weight.num_outputs // 16)
    eight, four = (config.resident * -(-tiles // (PROGRAMS * config.resident)) for config in (EIGHT, FOUR))
    config = FOUR if four < slower * eight else EIGHT
    return config._replace(batch=config.batch // 2) if many_tokens else config
