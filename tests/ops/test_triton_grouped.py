"""GEMMs with weights quantized in groups: interpreted where there is no GPU, else compiled."""

import pytest
import torch

from ops.gemms import HALF, assert_close, integers, randn, spread
from ops.ptx import execute
from ops.quantized_cases import CASES, NF4, K, N, int4_case, stored_case
from quire.ops.gpu.linear import unpack as quant_unpack
from quire.ops.gpu.linear.dequantize import dequantize, dequantize_rows
from quire.ops.gpu.linear.grouped import MAX_KERNEL_ROWS, grouped_linear
from quire.ops.gpu.linear.grouped_config import grouped_config
from quire.ops.gpu.linear.grouped_gemv import GroupedGemvConfig, can_gemv, grouped_gemv, x_group
from quire.ops.gpu.linear.grouped_layout import GroupedWeight, pack_int4
from quire.ops.gpu.linear.linear import num_splits
from quire.ops.gpu.linear.quantize_rows import quantize_rows

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CASES)
def test_codes_are_written_out_as_the_numbers_they_stand_for(name: str) -> None:
    weight, plain = CASES[name]()
    written = dequantize(weight, HALF)
    torch.testing.assert_close(written.float(), plain, rtol=torch.finfo(HALF).eps, atol=1e-5)
    places = [*range(len(plain) - 1, -1, -3), 0]  # rows of a table: more than one program's, and some whose ids follow
    last = torch.tensor(places, dtype=torch.int32, device=written.device)
    ids = torch.where(
        torch.arange(len(last), device=last.device) % 4 == 1, ~torch.arange(len(last), device=last.device), last
    )
    assert torch.equal(dequantize_rows(last, weight, HALF), written[places])
    assert torch.equal(dequantize_rows(ids.int(), weight, HALF, last), written[places])


@pytest.mark.parametrize("number,name", list(enumerate(CASES)))
def test_products_with_groups_of_codes(number: int, name: str) -> None:
    weight, plain = CASES[name]()
    M = (1, 17)[number % 2]
    x, bias = randn(M, weight.num_inputs, seed=3).to(HALF), randn(N, seed=4)
    assert_close(grouped_linear(x, weight, bias), x, plain, bias)


@pytest.mark.parametrize("group", [32, 64, 128, 256, 512])
@pytest.mark.parametrize("has_offsets", [False, True])
def test_scales_that_lie_together(group: int, has_offsets: bool) -> None:
    """One number a chunk or fewer, or words of them; many rows are multiplied with weights where scales are many."""
    weight, plain = int4_case(group, 0, torch.float16, torch.float16 if has_offsets else None, K=512)
    assert weight.chunk == 256 and weight.offsets is None
    assert grouped_config(40, weight).fold == (group == 32 or has_offsets)
    torch.testing.assert_close(dequantize(weight, HALF).float(), plain, rtol=torch.finfo(HALF).eps, atol=1e-5)
    x = randn(40, 512, seed=3).to(HALF)
    assert_close(grouped_linear(x, weight), x, plain, tolerance=torch.finfo(HALF).eps)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "MXFP4 as stored", "MXFP4 in chunks of 256"])
def test_many_rows_of_weights_that_are_scaled_first(name: str) -> None:
    weight, plain = CASES[name]()
    assert grouped_config(40, weight).fold
    x = randn(40, weight.num_inputs, seed=3).to(HALF)
    assert_close(grouped_linear(x, weight), x, plain, tolerance=torch.finfo(HALF).eps)


@pytest.mark.parametrize("group,has_offsets", [(32, True), (64, False), (128, True), (128, False), (256, True)])
@pytest.mark.parametrize("depth", [1, 2])
def test_one_row_of_codes(group: int, has_offsets: bool, depth: int) -> None:
    K = 5 * 256  # one step, and a quarter of another
    weight, plain = int4_case(group, 0 if has_offsets else 8, torch.float16, torch.float16 if has_offsets else None, K)
    assert can_gemv(weight)
    x, bias = randn(1, K, seed=3), randn(N, seed=4)
    x[0, :300] *= 50
    q = quantize_rows(x, torch.int16, x_group(weight))
    y = grouped_gemv(q, weight, bias, GroupedGemvConfig(32, 8, depth), torch.float32)
    assert_close(y, x, plain, bias, tolerance=2e-5)


@pytest.mark.parametrize("depth", [1, 2])
def test_one_row_of_codes_with_two_levels_of_scales(depth: int) -> None:
    weight, plain = stored_case("Q4_K", 5 * 256)
    assert can_gemv(weight)
    x, bias = randn(1, 5 * 256, seed=3), randn(N, seed=4)
    q = quantize_rows(x, torch.int16, x_group(weight))
    y = grouped_gemv(q, weight, bias, GroupedGemvConfig(32, 8, depth), torch.float32)
    assert_close(y, x, plain, bias, tolerance=2e-5)


def test_many_rows_are_left_to_cublas_unless_they_must_not_see_their_number() -> None:
    weight, plain = CASES["Q4_0"]()
    x = randn(MAX_KERNEL_ROWS + 1, K, seed=3).to(HALF)
    assert_close(grouped_linear(x, weight), x, plain, tolerance=torch.finfo(HALF).eps)
    if torch.cuda.is_available():
        whole = grouped_linear(x, weight, batch_invariant=True)
        assert_close(whole, x, plain)
        assert all(torch.equal(grouped_linear(x[:m], weight, batch_invariant=True), whole[:m]) for m in (1, 33, 65))


def test_splits_of_groups_are_added_up() -> None:
    q, scales = integers(0, 16, 64, 2048), randn(64, 16, seed=1).half()
    weight: GroupedWeight = pack_int4(q.to(torch.uint8), scales, zero=8)
    assert num_splits(64, 2048) > 1
    x = randn(3, 2048, seed=3).to(HALF)
    plain = spread(scales, 2048) * (q - 8)
    assert_close(grouped_linear(x, weight), x, plain)
    assert grouped_linear(x[:0], weight).shape == (0, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_instructions_unpack_every_code(dtype: torch.dtype) -> None:
    table, first = torch.tensor(NF4).to(dtype), torch.arange(0, 256, 2)
    bytes_of = 37 * torch.arange(4) + 91 * torch.arange(2)[:, None]  # of two words that hold different ones
    words = (first[:, None, None] + bytes_of) % 256  # [pairs, 2, 4]: every value comes by in every plane
    numbers = (words << 8 * torch.arange(4)).sum(2).unbind(1)
    codes8 = words.permute(2, 0, 1)
    signed = torch.where(codes8 < 128, codes8, codes8 - 256)
    assert torch.equal(torch.stack(execute(quant_unpack._int8(dtype), numbers, 4, dtype)).long(), signed)
    codes4 = torch.stack([codes8 & 15, codes8 >> 4], dim=1).flatten(0, 1)  # [planes, pairs, 2]
    for zero in (0, 8):
        planes = torch.stack(execute(quant_unpack._integers(dtype, zero, 0), numbers, 8, dtype))
        assert torch.equal(planes.long(), codes4 - zero)
    places = torch.arange(8)[:, None, None]
    for high_bits, zero in ((1, 0), (2, 32)):
        high = (codes4 * 5 + (first // 2)[:, None] + places) % (1 << high_bits)
        low_half, high_half = (high << high_bits * places).sum(0).unbind(1)
        words3 = (*numbers, low_half | high_half << 16)
        planes = torch.stack(execute(quant_unpack._integers(dtype, zero, high_bits), words3, 8, dtype))
        assert torch.equal(planes.long(), codes4 + 16 * high - zero)
    planes = torch.stack(execute(quant_unpack._codebook(dtype, tuple(NF4)), numbers, 8, dtype))
    assert torch.equal(planes, table[codes4])
