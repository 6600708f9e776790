"""Few rows of weights in groups: the kernel's own functions, carried out on a CPU, and the kernel on a Hopper GPU."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from ops.gemms import DEVICE, assert_close, integers, randn, spread
from ops.gluon_on_cpu import Pointers, on_cpu, run_programs
from ops.stored_blocks import stored_rows
from quire.ops.dequantize import dequantize as plain_numbers
from quire.ops.gpu.activation import activate_and_mul_quantized
from quire.ops.gpu.linear import few_lanes, grouped_few
from quire.ops.gpu.linear.few_config import EIGHT, FOUR, FewConfig, few_config, few_config_of, few_format
from quire.ops.gpu.linear.grouped import grouped_linear
from quire.ops.gpu.linear.grouped_few import few_kernel
from quire.ops.gpu.linear.grouped_layout import GroupedWeight, pack_codebook4, pack_int4, pack_int8, pack_zero_points
from quire.ops.gpu.linear.quantize_rows import QuantizedRows, quantize_rows
from quire.ops.gpu.linear.quantized_weights import load_quantized
from quire.ops.gpu.linear.wide_config import has_wide_kernel
from quire.ops.gpu.norm import rms_norm_quantized
from quire.ops.opset import Activation
from quire.ops.tensors import STORAGE_TYPES, StoredTensor

N, K = 37, 768  # three units
HOPPER = torch.cuda.is_available() and has_wide_kernel(torch.device("cuda", 0))
TRANSLATED = not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "0"  # compile_only.py
Case = tuple[GroupedWeight, Tensor]


def stored(name: str, N: int, K: int, device: str) -> Case:
    tensor = StoredTensor(name, (N, K), STORAGE_TYPES[name], stored_rows(STORAGE_TYPES[name], N, K))
    weight = load_quantized([tensor], torch.device(device))
    assert isinstance(weight, GroupedWeight)
    return weight, torch.from_numpy(plain_numbers(tensor)).to(device)


def int4(group: int, N: int, K: int, device: str) -> Case:
    q, scales = integers(0, 16, N, K).to(device), randn(N, K // group, seed=1).to(device).half()
    return pack_int4(q.to(torch.uint8), scales, zero=8), spread(scales.float(), K) * (q - 8)


def points(group: int, N: int, K: int, device: str) -> Case:
    q, scales = integers(0, 16, N, K).to(device), randn(N, K // group, seed=1).to(device).half()
    zeros = integers(0, 17, N, K // group, seed=2).to(device)
    plain = spread(scales.float(), K) * (q - spread(zeros, K))
    return pack_zero_points(q.to(torch.uint8), scales, zeros), plain


def int8(group: int, N: int, K: int, device: str) -> Case:
    q, scales = integers(-128, 128, N, K).to(device), randn(N, K // group, seed=1).to(device).half()
    return pack_int8(q.to(torch.int8), scales), spread(scales.float(), K) * q


CASES: dict[str, Callable[[int, int, str], Case]] = {
    **{name: (lambda *args, name=name: stored(name, *args)) for name in ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0")},
    **{f"groups of {group}": (lambda *args, group=group: int4(group, *args)) for group in (32, 64, 128)},
    **{f"points of {group}": (lambda *args, group=group: points(group, *args)) for group in (32, 64, 128)},
    **{f"8 bits of {group}": (lambda *args, group=group: int8(group, *args)) for group in (32, 64, 128)},
}


class OnCpu:
    """Takes the kernel's place. What would be rounded to bf16 is kept in fp32."""

    def __init__(self, programs: int) -> None:
        self.programs, self.code = programs, on_cpu(few_lanes, grouped_few)
        self.found = torch.empty(0)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, num_warps: int, maxnreg: int, **constants: Any) -> None:
        whole = torch.empty(0, dtype=torch.int32).set_(args[0].untyped_storage())  # type: ignore[call-overload]
        given = [Pointers(arg) if isinstance(arg, Tensor) else arg for arg in (whole, *args[1:])]
        self.found = torch.full_like(args[8], torch.nan, dtype=torch.float32)
        given[8] = Pointers(self.found)
        run_programs(self.code._few_kernel, self.programs, *given, **constants)


@pytest.mark.parametrize(("M", "config", "programs"), [
    (1, FewConfig(warps=2), 2),  # two steps, the last with an idle warp; a program with two tiles of outputs
    (8, FewConfig(warps=4, batch=2), 1),
    (11, FewConfig(warps=1), 3),
])  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_every_lane_multiplies_what_it_has(
    name: str, M: int, config: FewConfig, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if HOPPER or TRANSLATED:
        pytest.skip("the kernel itself runs, or is translated")
    weight, plain = CASES[name](N, K, "cpu")
    kernel = OnCpu(programs)
    monkeypatch.setattr(grouped_few, "_few_kernel", kernel)
    x, bias = randn(M, K).cpu().bfloat16(), randn(N, seed=3).cpu()
    few_kernel(quantize_rows(x, torch.float16, weight.width), weight, bias, config)
    truth = x.double() @ plain.double().T + bias.double()
    error = (kernel.found.double() - truth).norm() / truth.norm()
    assert error < (2e-5 if weight.has_offsets else 2e-7)  # sums of x are two bf16


def rows_of(x: QuantizedRows, width: int) -> Tensor:
    """Rows in the order of columns, times their scales."""
    M, (tiles, units, _) = len(x.q), x.scales.shape
    whole = torch.empty(0, dtype=x.q.dtype, device=x.q.device).set_(x.q.untyped_storage())  # type: ignore[call-overload]
    lanes = whole.view(tiles, units, 8, 8, 4, 2, 4).float()  # [.., planes, tokens, quads, halves, 4]
    order = (0, 3, 1, 2, 5, 4, 6) if width == 32 else (0, 3, 1, 5, 2, 4, 6)
    by_row = lanes.permute(order).reshape(tiles * 8, units, 256)
    return (by_row * x.scales[:, :, 64:].transpose(1, 2).reshape(tiles * 8, units, 1)).flatten(1)[:M]


def plane_sums(x: QuantizedRows) -> Tensor:
    """[rows, units, planes]"""
    tiles, units, _ = x.scales.shape
    parts = x.scales[:, :, :64].contiguous().view(torch.float16).float().view(tiles, units, 8, 4, 2, 2).sum(4)
    sums = parts.flatten(3) * x.scales[:, :, 64:, None]
    return sums.transpose(1, 2).flatten(0, 1)[: len(x.q)]


@pytest.mark.parametrize("M", [1, 8, 11])
@pytest.mark.parametrize("width", [16, 32])
def test_rows_become_fragments(M: int, width: int) -> None:
    x = (randn(M, 1280) * torch.tensor([1e-3, 1.0, 1e30, 1e-30, 1.0], device=DEVICE).repeat_interleave(256)).bfloat16()
    x[0, 512:768] = 0
    found = quantize_rows(x, torch.float16, width)
    largest = x.double().abs().view(M, 5, 256).amax(2)[..., None]
    lost = (rows_of(found, width).double() - x.double()).view(M, 5, 256)
    assert (lost.abs() <= 2**-24 * largest).all() and (lost == 0).float().mean() > 0.99
    if width == 32:
        truth = x.double().view(M, 5, 8, 32).sum(3)
        assert ((plane_sums(found) - truth).abs() <= 2**-19 * largest).all()


def test_norms_and_activations_write_fragments() -> None:
    x, weight = randn(3, 1024).bfloat16(), randn(1024, seed=1).bfloat16()
    found = rms_norm_quantized(x, weight, 1e-5, torch.float16, 32)
    truth = F.rms_norm(x.float(), (1024,), weight.float(), 1e-5)
    assert (rows_of(found, 32) - truth).norm() <= 5e-4 * truth.norm()
    found = activate_and_mul_quantized(x, Activation.SILU, torch.float16, 16)
    truth = F.silu(x[:, :512].float()) * x[:, 512:].float()
    assert (rows_of(found, 16) - truth).norm() <= 5e-4 * truth.norm()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_not_finite_stays_so() -> None:
    x = torch.ones(2, 512, device=DEVICE).bfloat16()
    x[0, 3], x[1, 300], x[1, 5] = torch.nan, -torch.inf, 3e38
    found = rows_of(quantize_rows(x, torch.float16, 32), 32)
    assert found[0, 3].isnan() and found[1, 300] == -torch.inf and found[1, 5] == x[1, 5].float()


def test_which_weights_can_be_few() -> None:
    q, scales = integers(0, 16, 8, 512).cpu().to(torch.uint8), randn(8, 4).cpu().half()
    assert few_format(pack_int4(q, scales)) is not None
    assert few_format(pack_int4(q[:, :384], scales[:, :3])) is None  # half a unit at the end
    assert few_format(pack_int4(q, scales.float())) is None
    assert few_format(pack_int4(q, scales, scales)) is None
    assert few_format(pack_int8(q.view(torch.int8), scales.float())) is None
    assert few_format(pack_codebook4(q, scales, [float(i) for i in range(16)])) is None
    assert few_format(stored("Q2_K", 8, 512, "cpu")[0]) is None


def test_programs_divide_the_outputs() -> None:
    """Chosen by what was measured on an H200, in microseconds with 16 rows of Q4_K: 33.1 and 36.7, 19.5 and 17.1, 7.9
    and 10.8, 7.3 and 6.9."""

    def like(N: int, name: str) -> GroupedWeight:
        weight = stored("Q4_K", 16, 512, "cpu")[0] if name == "Q4_K" else int4(128, 16, 512, "cpu")[0]
        scales = weight.scales[:, :1]
        return replace(weight, num_outputs=N, scales=scales.expand(-1, N, *scales.shape[2:]))

    chosen = [few_config(16, like(N, "Q4_K")) for N in (28672, 4096, 6144)]
    assert [config and config.warps for config in chosen] == [4, 8, 4]
    chosen = [few_config(1, like(N, "Q4_K")) for N in (28672, 4096, 6144)]
    assert [config and config.warps for config in chosen] == [8, 8, 4]
    int4_rows = {(N, M): few_config(M, like(N, "int4")) is not None for N in (4096, 28672) for M in (1, 2, 8, 16)}
    assert int4_rows == {
        (4096, 1): False, (4096, 2): True, (4096, 8): True, (4096, 16): True,
        (28672, 1): False, (28672, 2): True, (28672, 8): True, (28672, 16): False,
    }  # fmt: skip


@pytest.mark.skipif(not HOPPER and not TRANSLATED, reason="a Hopper GPU's instructions")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("N,K", [(70, 512), (328, 3584), (4176, 1280)])
def test_few_products_beside_plain_ones(name: str, N: int, K: int) -> None:
    """Outputs that fill no tile, units that do not fill the warps, programs with several tiles, a bias."""
    weight, plain = CASES[name](N, K, DEVICE)
    bias = randn(N, seed=4)
    for M, config in ((1, EIGHT), (3, FOUR), (8, EIGHT), (11, FOUR._replace(batch=2))):
        x = randn(M, K, seed=3).bfloat16()
        y = few_kernel(quantize_rows(x, torch.float16, weight.width), weight, bias, config)
        assert_close(y, x, plain, bias, tolerance=1e-4 if weight.has_offsets else 2e-5)


@pytest.mark.skipif(not HOPPER, reason="a Hopper GPU's instructions")
@pytest.mark.parametrize("M", [1, 5])
def test_few_rows_take_the_kernel(M: int) -> None:
    """Also in a CUDA graph, and with inputs that are the kernel's before."""
    weight, plain = stored("Q4_K", 4096, 2048, DEVICE)
    assert few_config_of(M, weight) is not None and few_config_of(M, weight, batch_invariant=True) is None
    x = randn(M, 2048, seed=3).bfloat16()
    eager = grouped_linear(x, weight, overlap=True)
    assert_close(eager, x, plain, tolerance=1e-4)
    graph, given = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        captured = grouped_linear(F.relu(given) - F.relu(-given), weight, overlap=True)
    given.copy_(x)
    graph.replay()
    assert torch.equal(captured, eager)
