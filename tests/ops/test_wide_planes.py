"""What wide tiles unpack and scale, of every kind of weight: the kernel's own functions, carried out on a CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from ops.gemms import integers, randn, spread
from ops.gluon_on_cpu import Pointers, Shared, Values, on_cpu
from ops.stored_blocks import stored_rows
from quire.ops.dequantize import dequantize as plain_numbers
from quire.ops.gpu.linear import wide_planes, wide_scales
from quire.ops.gpu.linear.grouped_layout import GroupedWeight, pack_codebook4, pack_int4, pack_int8, pack_zero_points
from quire.ops.gpu.linear.quantized_weights import load_quantized
from quire.ops.gpu.linear.wide_config import can_be_wide
from quire.ops.gpu.linear.wide_format import high_bits, scale_words, wide_format
from quire.ops.gpu.linear.wide_unpack import operands, unpack_pieces
from quire.ops.tensors import STORAGE_TYPES, StoredTensor

N, K = 7, 768  # three spans
CODE = on_cpu(wide_scales, wide_planes)
Case = tuple[GroupedWeight, Tensor]
HALF, FLOAT = torch.float16, torch.float32


def planes_of(weight: GroupedWeight) -> Tensor:
    """The bf16 weights [N, K] that tensor cores would be given."""
    form, bits_above = wide_format(weight), high_bits(weight)
    assert form is not None
    span, stored = weight.chunk * form.parts, (form.kind, form.second, form.group)
    num_groups, num_halves = (count.fn(form.group, span) for count in (wide_scales.num_groups, wide_scales.num_halves))
    items = num_groups // num_halves
    half, rows = Values(torch.arange(num_halves)[:, None]), Values(torch.arange(weight.num_outputs)[None])
    memory = [torch.zeros(2, items, num_halves, weight.num_outputs, dtype=torch.int32) for _ in range(2)]
    lines = [Shared(tensor.view(2 * num_groups, -1)) for tensor in memory]
    tensors = [scale_words(weight), weight.offsets, weight.super_scales]
    pointers = [None if tensor is None else Pointers(tensor) for tensor in tensors]
    asm = unpack_pieces(weight.bits, bits_above, form.zero, form.second), operands(bits_above, form.second)
    found = torch.zeros(weight.num_outputs, weight.num_inputs, dtype=torch.bfloat16)
    for number in range(weight.num_inputs // span):
        numbers = CODE.load_numbers(*pointers, number, rows, half, weight.num_outputs, *stored, form.parts, span)
        shared = [Shared(tensor) for tensor in memory]
        CODE.store_scales(numbers, *shared, half, number % 2, *stored, span, form.offset_scales)
        chunks = range(number * form.parts, (number + 1) * form.parts)
        halves = [half for chunk in chunks for half in CODE.halves_of(Values(weight.words[:, chunk]))]
        high = [Values(weight.high[:, chunk]) for chunk in chunks] if weight.high is not None else []
        constants = weight.bits, bits_above, weight.width, form.second, form.group, items, num_halves, None, *asm
        for piece in range(span // (2 * weight.width)):
            k = number * span + 2 * piece * weight.width
            planes = CODE.unpack_piece(halves, high, *lines, number % 2, piece, *constants)
            found[:, k : k + 2 * weight.width] = torch.cat([plane.data for plane in planes], dim=1)
    return found


def stored(name: str) -> Case:
    tensor = StoredTensor(name, (N, K), STORAGE_TYPES[name], stored_rows(STORAGE_TYPES[name], N, K))
    weight = load_quantized([tensor], torch.device("cpu"))
    assert isinstance(weight, GroupedWeight)
    return weight, torch.from_numpy(plain_numbers(tensor))


def int4(group: int, dtype: torch.dtype = HALF, offset: float = 0.0, zero: int = 8) -> Case:
    q, scales = integers(0, 16, N, K).cpu(), randn(N, K // group, seed=1).cpu().to(dtype)
    offsets = (scales * offset).to(dtype) if offset else None
    plain = spread(scales, K) * (q - zero) + (0 if offsets is None else spread(offsets, K))
    return pack_int4(q.to(torch.uint8), scales, offsets, zero), plain


def points(group: int) -> Case:
    q, scales = integers(0, 16, N, K).cpu(), randn(N, K // group, seed=1).cpu().half()
    zeros = integers(0, 17, N, K // group, seed=2).cpu()
    return pack_zero_points(q.to(torch.uint8), scales, zeros), spread(scales, K) * (q - spread(zeros, K))


def int8(group: int, dtype: torch.dtype = HALF, offset: float = 0.0) -> Case:
    q, scales = integers(-128, 128, N, K).cpu(), randn(N, K // group, seed=1).cpu().to(dtype)
    offsets = (scales * offset).to(dtype) if offset else None
    plain = spread(scales, K) * q + (0 if offsets is None else spread(offsets, K))
    return pack_int8(q.to(torch.int8), scales, offsets), plain


CASES: dict[str, Callable[[], Case]] = {
    **{name: (lambda name=name: stored(name)) for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q4_Z")},
    **{f"groups of {group}": (lambda group=group: int4(group)) for group in (16, 32, 64, 128, 256)},
    **{f"points of {group}": (lambda group=group: points(group)) for group in (16, 32, 64, 128, 256)},
    **{f"offsets of {group}": (lambda group=group: int4(group, HALF, -7.3, 0)) for group in (16, 32, 64, 128, 256)},
    "fp32 scales": lambda: int4(32, FLOAT),
    "fp32 scales and offsets": lambda: int4(128, FLOAT, -7.3, 0),
    "offsets and a zero": lambda: int4(64, HALF, 0.6),
    "8 bits in groups of 32": lambda: int8(32),
    "8 bits in groups of 128": lambda: int8(128),
    "8 bits with offsets": lambda: int8(32, FLOAT, 9.0),
    "8 bits in long groups": lambda: int8(256, FLOAT),
}


@pytest.mark.parametrize("name", CASES)
def test_planes_are_weights_that_are_rounded_once(name: str) -> None:
    """What is left of an offset is rounded before: little where weights surround zero, as those of a model do; random
    blocks of a file have any offset."""
    weight, plain = CASES[name]()
    assert can_be_wide(weight)
    planes = planes_of(weight)
    error, rounding = (planes.float() - plain).abs(), (plain.bfloat16().float() - plain).abs()
    any_offset = name in ("Q2_K", "Q4_K", "Q5_K")
    largest = plain.abs().amax(1, keepdim=True) * (1.0 if any_offset else 0.1) * weight.has_offsets
    assert (error <= 2**-8 * (1.02 * plain.abs() + largest) + 1e-7).all()
    assert error.norm() <= (1.7 if any_offset else 1.1) * rounding.norm()
    if not weight.has_offsets:  # two bf16 are 16 bits of a scale
        assert (planes == plain.bfloat16()).float().mean() > 0.9


def test_which_weights_can_be_wide() -> None:
    q, scales = integers(0, 16, N, 384).cpu().to(torch.uint8), randn(N, 3).cpu().half()
    assert not can_be_wide(pack_int4(q, scales, zero=8))  # half a chunk at the end
    assert not can_be_wide(pack_codebook4(q, scales, [float(i) for i in range(16)]))
    assert can_be_wide(pack_int8(q.view(torch.int8), scales))
