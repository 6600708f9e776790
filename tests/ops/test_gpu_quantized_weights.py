"""GGUF types packed for a GPU: values, scales and offsets make the same weights. Packing needs no GPU."""

import numpy as np
import pytest
import torch

from ops.stored_blocks import stored_rows
from quire.ops.dequantize import dequantize
from quire.ops.gpu.linear.e2m1 import E2M1, nibbles_of
from quire.ops.gpu.linear.exponents import EXPONENT
from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.k_quants import K_QUANTS
from quire.ops.gpu.linear.quantized_weights import DECODED, load_quantized
from quire.ops.tensors import STORAGE_TYPES, StoredTensor

ROWS, COLUMNS = 5, 512


def numbers(weight: GroupedWeight) -> torch.Tensor:
    """[num_outputs, num_inputs], by what quant_layout says of planes, groups and tables."""
    words = nibbles_of(weight.words)[: weight.num_outputs] if weight.codebook == E2M1 else weight.words
    stored = planes(words, weight.bits, 32 // weight.bits)
    if weight.high is not None:
        stored += planes(weight.high, weight.high.itemsize, 8) << 4
    q = stored.to(torch.uint8).view(torch.int8) if weight.bits == 8 else stored - weight.zero
    values = torch.tensor(weight.codebook)[q.long()] if weight.codebook else q.float()

    def of_inputs(groups: torch.Tensor) -> torch.Tensor:
        return groups.T.repeat_interleave(weight.group, 1)

    scales, offsets = levels(weight)
    scaled = of_inputs(scales) * values
    return (scaled if offsets is None else scaled + of_inputs(offsets))[:, : weight.num_inputs]


def planes(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    return torch.stack([words.int() >> bits * plane & (1 << bits) - 1 for plane in range(count)], 2).flatten(1)


def levels(weight: GroupedWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and offsets, fp32 [G, N]"""
    if weight.has_exponents:
        exponents = weight.scales.transpose(1, 2).flatten(0, 1)
        return torch.ldexp(torch.ones(exponents.shape), exponents.int() - EXPONENT).where(exponents > 0, 0.0), None
    if weight.scales.is_floating_point():
        return weight.scales.float(), None if weight.offsets is None else weight.offsets.float()
    kinds = 2 if weight.has_offsets else 1
    if weight.super_scales is None:
        fp16_values = together(weight, torch.float16)
        return fp16_values[::kinds], fp16_values[1::2] if weight.has_offsets else None
    small = six_bits(weight) if weight.scales.dtype == torch.int32 else together(weight, torch.int8)
    of_output = weight.super_scales.T.contiguous()  # [N, K / 256]
    super_scales = (of_output.view(torch.float16) if weight.has_offsets else of_output).float().T
    each = [super_scales[i::kinds].repeat_interleave(256 // weight.group, 0) * small[i::kinds] for i in range(kinds)]
    return each[0], -each[1] if weight.has_offsets else None


def together(weight: GroupedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The numbers in the words of an output's scales, fp32 [numbers, N]"""
    return weight.scales.transpose(0, 1).flatten(1).contiguous().view(dtype).float().T


def six_bits(weight: GroupedWeight) -> torch.Tensor:
    """The same for eight scales and eight offsets in 12 bytes, which take turns."""
    packed = weight.scales.transpose(0, 1).contiguous().view(torch.uint8).unflatten(-1, (3, 4))
    of_scales, of_offsets, last = packed.unbind(2)  # [N, chunks, 4]
    scales = torch.cat([of_scales & 63, last & 15 | of_scales >> 6 << 4], dim=-1)
    offsets = torch.cat([of_offsets & 63, last >> 4 | of_offsets >> 6 << 4], dim=-1)
    return torch.stack([scales, offsets], dim=-1).flatten(1).float().T


@pytest.mark.parametrize("rows,columns", [(ROWS, COLUMNS), (ROWS, 256)])
@pytest.mark.parametrize("name", [*DECODED, *K_QUANTS])
def test_codes_make_the_numbers_of_the_file(name: str, rows: int, columns: int) -> None:
    type = STORAGE_TYPES[name]
    tensor = StoredTensor(name, (rows, columns), type, stored_rows(type, rows, columns))
    weight = load_quantized([tensor], torch.device("cpu"))
    assert isinstance(weight, GroupedWeight) and weight.bits == DECODED.get(name, 4)
    np.testing.assert_array_equal(numbers(weight).numpy(), dequantize(tensor).reshape(rows, columns))


BITS = {"Q4_0": 4.5, "Q4_1": 5, "Q2_K": 5.125, "Q3_K": 4.625, "Q4_K": 4.5, "Q5_K": 5.625, "Q6_K": 6.625}


@pytest.mark.parametrize("name,bits", BITS.items())
def test_scales_take_little_memory(name: str, bits: float) -> None:
    type = STORAGE_TYPES[name]
    tensor = StoredTensor(name, (ROWS, COLUMNS), type, stored_rows(type, ROWS, COLUMNS))
    assert load_quantized([tensor], torch.device("cpu")).nbytes * 8 == bits * ROWS * COLUMNS
