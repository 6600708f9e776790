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
from quire.ops.gpu.linear.e2m1 import E2M1, rows_in_order
from quire.ops.gpu.linear.grouped_layout import GroupedWeight, pack_codebook4, pack_int4, pack_int8, pack_zero_points
from quire.ops.gpu.linear.quantized_weights import load_quantized
from quire.ops.gpu.linear.wide_config import can_be_wide
from quire.ops.gpu.linear.wide_format import WideFormat, high_bits, scale_words, slab_format
from quire.ops.gpu.linear.wide_unpack import operands, unpack_pieces
from quire.ops.tensors import STORAGE_TYPES, StoredTensor

N, K = 7, 768  # three spans
CODE = on_cpu(wide_scales, wide_planes)
Case = tuple[GroupedWeight, Tensor]
HALF, FLOAT = torch.float16, torch.float32


def planes_of(weight: GroupedWeight) -> Tensor:
    """The bf16 weights [N, K] that tensor cores would be given."""
    form, found = slab_format(weight), []
    assert form is not None
    span = weight.chunk * form.parts
    spans, tail = divmod(weight.num_inputs, span)
    for number in range(spans):
        found.append(_planes_of_span(weight, form, number))
    if tail:
        parts = 1 if form.parts == 2 and tail * 2 <= span else form.parts
        last = _planes_of_span(weight, form._replace(parts=parts), spans * form.parts // parts)
        found.append(last[:, :tail])
    return torch.cat(found, dim=1)


def _planes_of_span(weight: GroupedWeight, form: WideFormat, number: int) -> Tensor:
    """The inputs of span `number`, of `form.parts` chunks."""
    bits_above, exponents = high_bits(weight), form.kind == "exponents"
    span, stored = weight.chunk * form.parts, (form.kind, form.second, form.group)
    num_groups, num_halves = (count.fn(form.group, span) for count in (wide_scales.num_groups, wide_scales.num_halves))
    items = num_groups // num_halves
    half = Values(torch.arange(num_halves, dtype=torch.int32)[:, None])
    rows = Values(torch.arange(weight.num_outputs)[None])
    memory = [torch.zeros(2, items, num_halves, weight.num_outputs, dtype=torch.int32) for _ in range(2)]
    lines = [Shared(tensor.view(2 * num_groups, -1)) for tensor in memory]
    tensors = [scale_words(weight), weight.offsets, weight.super_scales]
    pointers = [None if tensor is None else Pointers(tensor) for tensor in tensors]
    second = form.kind if exponents else form.second
    asm = unpack_pieces(weight.bits, bits_above, form.zero, second), operands(bits_above, second)
    numbers = CODE.load_numbers(*pointers, number, rows, half, weight.num_outputs, *stored, form.parts, span)
    shared = [Shared(tensor) for tensor in memory]
    CODE.store_scales(numbers, *shared, half, number % 2, *stored, span, form.offset_scales)
    chunks = range(number * form.parts, (number + 1) * form.parts)
    words = rows_in_order(weight.words)[: weight.num_outputs] if exponents else weight.words
    halves = [half for chunk in chunks for half in CODE.halves_of(Values(words[:, chunk]), exponents)]
    high = [Values(weight.high[:, chunk]) for chunk in chunks] if weight.high is not None else []
    constants = weight.bits, bits_above, weight.width, form.second, form.group, items, num_halves, None, *asm
    found = []
    for piece in range(span // (2 * weight.width)):
        planes = CODE.unpack_piece(halves, high, *lines, number % 2, piece, *constants, not exponents)
        found += [plane.data for plane in planes]
    return torch.cat(found, dim=1) * (2**32 if exponents else 1)


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


def mxfp4(K: int) -> Case:
    q, scales = integers(0, 16, N, K).cpu(), 2.0 ** integers(-9, 4, N, K // 32, seed=1).cpu()
    return pack_codebook4(q.to(torch.uint8), scales, E2M1), spread(scales, K) * torch.tensor(E2M1)[q]


def with_inputs(K: int, group: int, points: bool) -> Case:
    q, scales = integers(0, 16, N, K).cpu(), randn(N, K // group, seed=1).cpu().half()
    zeros = integers(0, 17, N, K // group, seed=2).cpu()
    plain = spread(scales, K) * (q - (spread(zeros, K) if points else 8))
    packed = q.to(torch.uint8)
    return pack_zero_points(packed, scales, zeros) if points else pack_int4(packed, scales, zero=8), plain


TAILS: dict[str, Callable[[], Case]] = {
    **{f"MXFP4 {K}": (lambda K=K: mxfp4(K)) for K in (768, 320, 704, 448, 2880)},
    **{f"4 bits {K} {group}": (lambda K=K, group=group: with_inputs(K, group, False))
       for K, group in ((384, 128), (640, 128), (704, 64), (320, 32), (2880, 32))},
    **{f"points {K} {group}": (lambda K=K, group=group: with_inputs(K, group, True))
       for K, group in ((384, 128), (640, 64), (704, 32), (320, 32))},
}  # fmt: skip


@pytest.mark.parametrize("name", TAILS)
def test_planes_of_inputs_that_are_no_whole_spans(name: str) -> None:
    """As the kernel for experts has them."""
    weight, plain = TAILS[name]()
    planes = planes_of(weight)
    assert planes.shape == plain.shape
    if name.startswith("MXFP4"):
        assert torch.equal(planes.float(), plain)
    else:
        assert (planes == plain.bfloat16()).float().mean() > 0.9


def test_which_weights_can_be_wide() -> None:
    q, scales = integers(0, 16, N, 384).cpu().to(torch.uint8), randn(N, 3).cpu().half()
    assert not can_be_wide(pack_int4(q, scales, zero=8))  # half a chunk at the end
    assert not can_be_wide(pack_codebook4(q, scales, [float(i) for i in range(16)]))
    assert can_be_wide(pack_int8(q.view(torch.int8), scales))
