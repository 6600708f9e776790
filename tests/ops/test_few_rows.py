"""Few rows of weights in groups: the kernel's own functions, carried out on a CPU, and the kernel on a Hopper GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from ops.gemms import integers, randn, spread
from ops.gluon_on_cpu import Pointers, on_cpu, run_programs
from ops.stored_blocks import stored_rows
from quire.ops.dequantize import dequantize as plain_numbers
from quire.ops.gpu.linear import few_lanes, grouped_few
from quire.ops.gpu.linear.few_config import FewConfig, few_format
from quire.ops.gpu.linear.grouped_few import few_kernel
from quire.ops.gpu.linear.grouped_layout import GroupedWeight, pack_codebook4, pack_int4, pack_int8, pack_zero_points
from quire.ops.gpu.linear.quantized_weights import load_quantized
from quire.ops.gpu.linear.wide_config import has_wide_kernel
from quire.ops.tensors import STORAGE_TYPES, StoredTensor

N, K = 37, 768  # three units
HOPPER = torch.cuda.is_available() and has_wide_kernel(torch.device("cuda", 0))
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


CASES: dict[str, Callable[[int, int, str], Case]] = {
    **{name: (lambda *args, name=name: stored(name, *args)) for name in ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0")},
    **{f"groups of {group}": (lambda *args, group=group: int4(group, *args)) for group in (32, 64, 128)},
    **{f"points of {group}": (lambda *args, group=group: points(group, *args)) for group in (32, 64, 128)},
}


class OnCpu:
    """Takes the kernel's place. What would be rounded to bf16 is kept in fp32."""

    def __init__(self, programs: int) -> None:
        self.programs, self.code = programs, on_cpu(few_lanes, grouped_few)
        self.found = torch.empty(0)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, num_warps: int, maxnreg: int, **constants: Any) -> None:
        given = [Pointers(arg) if isinstance(arg, Tensor) else arg for arg in args]
        self.found = torch.full_like(args[8], torch.nan, dtype=torch.float32)
        given[8] = Pointers(self.found)
        run_programs(self.code._few_kernel, self.programs, *given, **constants)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("M", "config", "programs"), [
    (1, FewConfig(warps=2), 2),  # two steps, the last with an idle warp; a program with two tiles of outputs
    (8, FewConfig(warps=4, batch=2), 1),
    (11, FewConfig(warps=1), 3),
])  # fmt: skip
def test_every_lane_multiplies_what_it_has(
    name: str, M: int, config: FewConfig, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the kernel itself runs there")
    weight, plain = CASES[name](N, K, "cpu")
    kernel = OnCpu(programs)
    monkeypatch.setattr(grouped_few, "_few_kernel", kernel)
    x, bias = randn(M, K).cpu().bfloat16(), randn(N, seed=3).cpu()
    few_kernel(x, weight, bias, config)
    truth = x.double() @ plain.double().T + bias.double()
    error = (kernel.found.double() - truth).norm() / truth.norm()
    assert error < (2e-5 if weight.has_offsets else 2e-7)  # sums of x are two bf16


def test_which_weights_can_be_few() -> None:
    q, scales = integers(0, 16, 8, 512).cpu().to(torch.uint8), randn(8, 4).cpu().half()
    assert few_format(pack_int4(q, scales)) is not None
    assert few_format(pack_int4(q[:, :384], scales[:, :3])) is None  # half a unit at the end
    assert few_format(pack_int4(q, scales.float())) is None
    assert few_format(pack_int4(q, scales, scales)) is None
    assert few_format(pack_int8(q.view(torch.int8), scales)) is None
    assert few_format(pack_codebook4(q, scales, [float(i) for i in range(16)])) is None
    assert few_format(stored("Q2_K", 8, 512, "cpu")[0]) is None
