"""GEMMs in Triton against fp32 matmuls: interpreted where there is no GPU, else compiled."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.stored_blocks import stored_rows
from quire.ops.dequantize import dequantize as plain_numbers
from quire.ops.gpu.linear import unpack as quant_unpack
from quire.ops.gpu.linear.dequantize import dequantize, dequantize_rows
from quire.ops.gpu.linear.gemv import GemvConfig, linear_gemv
from quire.ops.gpu.linear.grouped import MAX_KERNEL_ROWS, grouped_linear
from quire.ops.gpu.linear.grouped_config import grouped_config
from quire.ops.gpu.linear.grouped_gemv import GroupedGemvConfig, can_gemv, grouped_gemv, x_group
from quire.ops.gpu.linear.grouped_layout import GroupedWeight, pack_codebook4, pack_int4, pack_int8
from quire.ops.gpu.linear.linear import LinearKernel, choose_kernel, linear, num_splits
from quire.ops.gpu.linear.quantize_rows import QuantizedRows, quantize_rows
from quire.ops.gpu.linear.quantized_weights import load_quantized
from quire.ops.gpu.linear.scaled import ScaledConfig, ScaledWeight, scaled_kernel, scaled_linear
from quire.ops.gpu.linear.split_k import new_tickets
from quire.ops.gpu.linear.stream import StreamConfig, linear_stream
from quire.ops.gpu.moe.moe import moe_mlp, sort_by_expert, stack_scaled
from quire.ops.gpu.moe.quantized import stack_experts
from quire.ops.tensors import STORAGE_TYPES, StoredTensor

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter's tl.dot does not know bf16


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None, tolerance: float = 0.0) -> None:
    """y against the fp32 matmul, as a share of each output's sum of magnitudes: `tolerance` and y's own rounding."""
    truth = x.double() @ w.double().T + (0 if bias is None else bias.double())
    size = x.double().abs() @ w.double().abs().T
    unit = torch.finfo(y.dtype).eps
    assert y.isfinite().all()
    assert ((y.double() - truth).abs() <= (tolerance + 1e-5) * size + unit * truth.abs() + 1e-6).all()


@pytest.mark.parametrize("N,K", [(7, 40), (30, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gemv(N: int, K: int, dtype: torch.dtype) -> None:
    x, w, bias = randn(1, K, dtype=dtype), randn(N, K, dtype=dtype, seed=1), randn(N, dtype=dtype, seed=2)
    config = GemvConfig(block_n=4, block_k=128, warps=4, stages=1)
    assert_close(linear_gemv(x, w, None, config), x, w)
    assert_close(linear_gemv(x, w, bias, config), x, w, bias)


@pytest.mark.parametrize("splits,serial", [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("M", [1, 3, 17])
def test_stream(M: int, splits: int, serial: bool) -> None:
    x, w, bias = randn(M, 328).to(HALF), randn(150, 328, seed=1).to(HALF), randn(150, seed=2)
    tickets = new_tickets(DEVICE)
    config = StreamConfig(16, 64, 64, splits, serial, 4, 3)
    assert_close(linear_stream(x, w, None, config, tickets), x, w)
    assert_close(linear_stream(x, w, bias, config, tickets), x, w, bias)
    assert not tickets.any()  # ready for the next GEMM


@pytest.mark.parametrize("M", [0, 1, 5, 70])
def test_every_way_gives_the_product(M: int) -> None:
    x, w, bias = randn(M, 264).to(HALF), randn(72, 264, seed=1).to(HALF), randn(72, seed=2).to(HALF)
    for batch_invariant in (False, True):
        y = linear(x, w, bias, batch_invariant=batch_invariant)
        assert y.shape == (M, 72)
        assert_close(y, x, w, bias)


def test_rows_of_x_and_w_may_be_strided() -> None:
    x, w = randn(3, 400).to(HALF)[:, 8:264], randn(40, 512, seed=1).to(HALF)[:, :256]
    for rows in (x, x[:1]):
        assert_close(linear(rows, w), rows, w)


def test_fp32_is_computed_as_such() -> None:
    x, w, bias = randn(19, 72), randn(70, 72, seed=1), randn(70, seed=2)
    assert_close(linear(x, w, bias), x, w, bias)
    invariant = linear(x, w, bias, batch_invariant=True)
    assert_close(invariant, x, w, bias)
    assert torch.equal(linear(x[:1], w, bias, batch_invariant=True), invariant[:1])


def test_batch_invariant_rows_do_not_see_how_many_they_are() -> None:
    # On a GPU, whatever the tile. The interpreter's matmuls are numpy's, whose sums differ with the tile's shape.
    K, most, counts = (4096, 140, (1, 20, 33)) if torch.cuda.is_available() else (1024, 16, (1, 7))
    x, w = randn(most, K).to(HALF), randn(64, K, seed=1).to(HALF)
    assert num_splits(64, K) > 1
    whole = linear(x, w, batch_invariant=True)
    for count in counts:
        assert torch.equal(linear(x[:count], w, batch_invariant=True), whole[:count])


def test_the_way_is_a_function_of_the_shape() -> None:
    assert [choose_kernel(M, 4096, 4096) for M in (1, 2, 64, 65)] == [
        LinearKernel.GEMV,
        LinearKernel.STREAM,
        LinearKernel.STREAM,
        LinearKernel.CUBLAS,
    ]
    assert {choose_kernel(M, 4096, 4096, batch_invariant=True) for M in (1, 64, 4096)} == {LinearKernel.STREAM}


# -- in groups --------------------------------------------------------------------------------------------------------

NF4 = [-1.0, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0.0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1.0]
N, K = 70, 384


def integers(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def spread(values: Tensor, num_inputs: int) -> Tensor:
    """[N, groups] -> [N, K]"""
    return values.float().repeat_interleave(num_inputs // values.shape[1], dim=1)


def int4_case(group: int, zero: int, scale_dtype: torch.dtype, offset_dtype: torch.dtype | None, K: int = K) -> Any:
    """-> packed, and the fp32 matrix that it stands for"""
    q = integers(0, 16, N, K)
    scales = randn(N, K // group, seed=1).to(scale_dtype)
    offsets = None if offset_dtype is None else randn(N, K // group, seed=2).to(offset_dtype)
    plain = spread(scales, K) * (q - zero) + (0 if offsets is None else spread(offsets, K))
    return pack_int4(q.to(torch.uint8), scales, offsets, zero), plain


def codebook_case(group: int) -> Any:
    q, scales = integers(0, 16, N, K), randn(N, K // group, seed=1).half()
    plain = spread(scales, K) * torch.tensor(NF4, device=DEVICE).to(HALF).float()[q]
    return pack_codebook4(q.to(torch.uint8), scales, NF4), plain


def int8_case(group: int, scale_dtype: torch.dtype, offset_dtype: torch.dtype | None) -> Any:
    q = integers(-128, 128, N, K)
    scales = randn(N, K // group, seed=1).to(scale_dtype)
    offsets = None if offset_dtype is None else randn(N, K // group, seed=2).to(offset_dtype)
    plain = spread(scales, K) * q + (0 if offsets is None else spread(offsets, K))
    return pack_int8(q.to(torch.int8), scales, offsets), plain


def stored_case(name: str, K: int = 512) -> Any:
    """As a file has it."""
    tensor = StoredTensor(name, (N, K), STORAGE_TYPES[name], stored_rows(STORAGE_TYPES[name], N, K))
    return load_quantized([tensor], torch.device(DEVICE)), torch.from_numpy(plain_numbers(tensor)).to(DEVICE)


CASES = {
    "Q4_0": lambda: int4_case(32, 8, torch.float16, None),
    "Q4_1": lambda: int4_case(32, 0, torch.float16, torch.float16),
    "fp32 scales": lambda: int4_case(32, 0, torch.float32, torch.float32),
    "GPTQ": lambda: int4_case(128, 0, torch.float16, torch.float32),
    "groups of 64": lambda: int4_case(64, 8, torch.bfloat16, None),
    "odd K": lambda: int4_case(16, 8, torch.float16, None, K=144),
    "NF4": lambda: codebook_case(64),
    "MXFP4": lambda: codebook_case(32),
    "Q8_0": lambda: int8_case(32, torch.float16, None),
    "NVFP4": lambda: int8_case(16, torch.float32, None),
    "int8 with offsets": lambda: int8_case(16, torch.float32, torch.float32),
    "int8 rows": lambda: int8_case(K, torch.float32, None),
    "Q2_K": lambda: stored_case("Q2_K"),
    "Q3_K": lambda: stored_case("Q3_K"),
    "Q4_K": lambda: stored_case("Q4_K"),
    "Q5_K": lambda: stored_case("Q5_K"),
    "Q6_K": lambda: stored_case("Q6_K"),
}


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


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K"])
def test_many_rows_of_scales_of_two_levels(name: str) -> None:
    weight, plain = stored_case(name)
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


def execute(asm: str, words: tuple[int, ...], num_planes: int, dtype: torch.dtype) -> list[Tensor]:
    """What the instructions make of two words, and of a third with two halves: planes of two floats each."""
    registers = {f"${num_planes + i}": word for i, word in enumerate(words)}

    def floats(word: int) -> Tensor:
        return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(dtype)

    for line in asm.strip("{}\n").replace(";", "").splitlines():
        op, _, operands = line.partition(" ")
        if op == ".reg":
            registers |= dict.fromkeys(operands.removeprefix(".b32 ").split(", "), 0)
            continue
        target, *sources = operands.split(", ")
        a, *rest = (registers[o] if o in registers else int(o, 0) for o in sources)
        match op.split(".")[0]:
            case "mov":
                result = a
            case "and":
                result = a & rest[0]
            case "or":
                result = a | rest[0]
            case "xor":
                result = a ^ rest[0]
            case "shr":
                result = a >> rest[0]
            case "shl":
                result = a << rest[0] & 0xFFFFFFFF
            case "lop3":
                assert rest[2] == 0xEA
                result = a & rest[0] | rest[1]
            case "prmt":
                both = a | rest[0] << 32
                picks = [rest[1] >> 4 * i & 15 for i in range(4)]
                assert max(picks) < 8  # the top bit would spread a sign
                result = sum((both >> 8 * pick & 255) << 8 * i for i, pick in enumerate(picks))
            case "fma":
                product = floats(a).double() * floats(rest[0]).double() + floats(rest[1]).double()
                low, high = product.to(dtype).view(torch.uint16).tolist()
                result = low | high << 16
            case _:
                raise AssertionError(line)
        registers[target] = result
    return [floats(registers[f"${plane}"]) for plane in range(num_planes)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_instructions_unpack_every_code(dtype: torch.dtype) -> None:
    table = torch.tensor(NF4).to(dtype)
    for first in range(0, 256, 2):  # every value comes by in every plane; two words hold different ones
        words = [[(first + 37 * i + 91 * w) % 256 for i in range(4)] for w in (0, 1)]
        numbers = tuple(sum(byte << 8 * i for i, byte in enumerate(word)) for word in words)
        codes8 = torch.tensor(words).T
        signed = torch.where(codes8 < 128, codes8, codes8 - 256)
        assert torch.equal(torch.stack(execute(quant_unpack._int8(dtype), numbers, 4, dtype)).long(), signed)
        codes4 = torch.stack([codes8 & 15, codes8 >> 4], dim=1).flatten(0, 1)
        for zero in (0, 8):
            planes = torch.stack(execute(quant_unpack._integers(dtype, zero, 0), numbers, 8, dtype))
            assert torch.equal(planes.long(), codes4 - zero)
        for high_bits, zero in ((1, 0), (2, 32)):
            high = (codes4 * 5 + first // 2 + torch.arange(8)[:, None]) % (1 << high_bits)
            fp16_values = [sum(int(code) << high_bits * i for i, code in enumerate(word)) for word in high.T]
            words3 = (*numbers, fp16_values[0] | fp16_values[1] << 16)
            planes = torch.stack(execute(quant_unpack._integers(dtype, zero, high_bits), words3, 8, dtype))
            assert torch.equal(planes.long(), codes4 + 16 * high - zero)
        planes = torch.stack(execute(quant_unpack._codebook(dtype, tuple(NF4)), numbers, 8, dtype))
        assert torch.equal(planes, table[codes4])


# -- 8-bit activations ------------------------------------------------------------------------------------------------


def exact_codes(x: Tensor, dtype: torch.dtype, group: int) -> QuantizedRows:
    """As `quantize_rows`, by torch, whose rounding to fp8 is right everywhere."""
    most = 127.0 if dtype == torch.int8 else 448.0
    groups = torch.nn.functional.pad(x, (0, -len(x[0]) % (group or 1))).unflatten(1, (-1, group or len(x[0])))
    scales = groups.abs().amax(-1) / most
    q = (groups / scales[..., None]).flatten(1)[:, : len(x[0])]
    return QuantizedRows((q.round() if dtype == torch.int8 else q).to(dtype).contiguous(), scales)


def scaled_case(M: int, N: int, K: int, dtype: torch.dtype, by_blocks: bool) -> tuple[QuantizedRows, ScaledWeight]:
    x = exact_codes(randn(M, K), dtype, 128 if by_blocks else 0)
    if by_blocks:
        w, scales = randn(N, K, seed=1).clamp(-4, 4).to(dtype), randn(-(-N // 128), -(-K // 128), seed=2).abs()
    else:
        w, scales = exact_codes(randn(N, K, seed=1), dtype, 0)
        scales = scales.flatten()
    return x, ScaledWeight(w, scales)


def plain(x: QuantizedRows, weight: ScaledWeight) -> tuple[Tensor, Tensor]:
    """-> the fp32 matrices"""
    (N, K), w_scales = weight.q.shape, weight.scales
    if not weight.by_blocks:
        return x.q.float() * x.scales, weight.q.float() * w_scales[:, None]
    x_scales = x.scales.repeat_interleave(128, dim=1)[:, :K]
    w_scales = w_scales.repeat_interleave(128, dim=0)[:N].repeat_interleave(128, dim=1)[:, :K]
    return x.q.float() * x_scales, weight.q.float() * w_scales


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize("M", [1, 17])
def test_products_of_codes(dtype: torch.dtype, by_blocks: bool, M: int) -> None:
    x, weight = scaled_case(M, 150, 336, dtype, by_blocks)
    bias = randn(150, seed=3)
    y = scaled_linear(x, weight, bias, torch.float32)
    assert_close(y, *plain(x, weight), bias, tolerance=1e-3 if dtype == torch.float8_e4m3fn else 0)  # 14-bit sums


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_splits_of_products_of_codes(dtype: torch.dtype) -> None:
    x, weight = scaled_case(3, 70, 512, dtype, by_blocks=False)
    shared, serial = (
        scaled_kernel(x, weight, None, torch.float32, ScaledConfig(16, 64, 4, serial, 4, 3)) for serial in (False, True)
    )
    assert_close(shared, *plain(x, weight), tolerance=1e-3)
    assert torch.equal(shared, serial)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: it is cuBLAS that multiplies")
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("N", [96, 100])
def test_many_rows_of_codes(dtype: torch.dtype, N: int) -> None:
    x, weight = scaled_case(200, N, 336, dtype, by_blocks=False)
    bias = randn(N, seed=3)
    assert_close(scaled_linear(x, weight, bias), *plain(x, weight), bias, tolerance=1e-3)


def test_norms_and_products_meet() -> None:
    x, w = randn(3, 256).to(HALF), randn(40, 256, seed=1)
    weight = ScaledWeight(*exact_codes(w, torch.int8, 0))
    y = scaled_linear(quantize_rows(x, torch.int8), ScaledWeight(weight.q, weight.scales.flatten()), None, HALF)
    assert (y.float() - x.float() @ w.T).norm() < 0.02 * (x.float() @ w.T).norm()


# -- mixture of experts ----------------------------------------------------------------------------------------------


def plain_moe(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Token by token, route by route."""
    out = torch.zeros(x.shape, device=x.device)
    for t, j in torch.cartesian_prod(torch.arange(len(x)), torch.arange(ids.shape[1])).tolist():
        if 0 <= int(ids[t, j]) < len(gate_up):
            gate, up = (gate_up[ids[t, j]].float() @ x[t].float()).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            out[t] += weights[t, j] * (down[ids[t, j]].float() @ hidden)
    return out


@pytest.mark.parametrize("T,k,E", [(1, 2, 8), (5, 3, 4), (20, 2, 3)])
def test_moe(T: int, k: int, E: int) -> None:
    H, intermediate = 72, 40
    x = randn(T, H).to(HALF)
    gate_up, down = randn(E, 2 * intermediate, H, seed=1).to(HALF), randn(E, H, intermediate, seed=2).to(HALF)
    ids = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t))[:k] for t in range(T)])
    ids, weights = ids.to(DEVICE, torch.int32), randn(T, k, seed=3).softmax(-1)
    if T > 1:
        ids[0, 0], ids[-1, 1] = -1, E  # experts that live elsewhere
    truth = plain_moe(x, ids, weights, gate_up, down)
    out = moe_mlp(x, ids, weights, gate_up, down)
    assert (out.float() - truth).norm() <= 4 * torch.finfo(HALF).eps * truth.norm()
    if T > 1:
        assert torch.equal(moe_mlp(x[1:2], ids[1:2], weights[1:2], gate_up, down), out[1:2]) or DEVICE == "cpu"


@pytest.mark.parametrize("name,T", [(name, (1, 30)[number % 2]) for number, name in enumerate(CASES)])
def test_mixtures_of_codes(name: str, T: int) -> None:
    """The rows of three experts are those of the case, each time in another order."""
    weight, plain = CASES[name]()
    inner, K = len(plain) // 2, plain.shape[1]
    orders = [torch.randperm(len(plain), generator=torch.Generator().manual_seed(i))[: 2 * inner] for i in range(3)]
    gate_up = stack_experts([replace(weight, **rows_of(weight, order.to(DEVICE))) for order in orders], 3)
    floats, down = torch.stack([plain[order.to(DEVICE)] for order in orders]), randn(3, K, inner, seed=3).to(HALF)
    x, ids, weights = (randn(T, K) * 0.01).to(HALF), integers(0, 3, T, 2).int(), randn(T, 2, seed=4).softmax(-1)
    truth = plain_moe(x, ids, weights, floats, down)
    out = moe_mlp(x, ids, weights, gate_up, down)
    assert (out.float() - truth).norm() <= 8 * torch.finfo(HALF).eps * truth.norm()


@pytest.mark.parametrize("T", [1, 30])
@pytest.mark.parametrize("by_blocks", [False, True])
def test_mixtures_of_fp8(by_blocks: bool, T: int) -> None:
    """Three experts; what they are multiplied with is rounded to fp8 twice, here as well."""
    (E, H, inner), fp8 = (3, 256, 128) if by_blocks else (3, 144, 40), torch.float8_e4m3fn
    group = 128 if by_blocks else 0
    gates = [scaled_case(1, rows, H, fp8, by_blocks)[1] for rows in (inner, inner) * E]
    gates = [replace(w, scales=w.scales * (1 + i) / 50) for i, w in enumerate(gates)]
    downs = [scaled_case(1, H, inner, fp8, by_blocks)[1]] * E
    x, ids, weights = randn(T, H).to(HALF), integers(0, E, T, 2).int(), randn(T, 2, seed=4).softmax(-1)
    out = moe_mlp(x, ids, weights, stack_scaled(gates, E), stack_scaled(downs, E))

    def gemm(rows: QuantizedRows, each: list[int], weights: list[ScaledWeight]) -> Tensor:
        """Of every row with a weight of its own."""
        pairs = (plain(QuantizedRows(*(t[i : i + 1] for t in rows)), weights[e]) for i, e in enumerate(each))
        return torch.cat([row @ w.T for row, w in pairs])

    experts = ids.flatten().tolist()
    rows = QuantizedRows(*(t.repeat_interleave(2, dim=0) for t in quantize_rows(x, fp8, group)))
    gate, up = (gemm(rows, experts, gates[first::2]) for first in (0, 1))
    hidden = (torch.nn.functional.silu(gate) * up).to(HALF)
    routes = gemm(quantize_rows(hidden, fp8, group), experts, downs) * weights.flatten()[:, None]
    truth = routes.unflatten(0, (T, 2)).sum(1)
    assert (out.float() - truth).norm() <= 0.02 * truth.norm()


def rows_of(weight: GroupedWeight, order: Tensor) -> dict[str, Any]:
    """Some rows, as fields."""
    return {
        "num_outputs": len(order),
        "words": weight.words[order],
        "scales": weight.scales[:, order],
        "offsets": None if weight.offsets is None else weight.offsets[:, order],
        "super_scales": None if weight.super_scales is None else weight.super_scales[:, order],
        "high": None if weight.high is None else weight.high[order],
    }


def test_routes_are_sorted_into_tiles_of_one_expert() -> None:
    ids = integers(-1, 7, 50, 2).int()
    routes, tile_experts, num_routes, block = sort_by_expert(ids, 6, 16)
    seen = []
    for tile, expert in enumerate(tile_experts.tolist()):
        inside = [route for route in routes[tile * block : (tile + 1) * block].tolist() if route < num_routes]
        if expert >= 0:
            assert {int(ids.flatten()[route]) for route in inside} == {expert}
            seen += inside
    assert sorted(seen) == ((ids.flatten() >= 0) & (ids.flatten() < 6)).nonzero().flatten().tolist()
    assert sort_by_expert(ids[:1, :1], 6, 16).tile_experts.shape == (2,)
