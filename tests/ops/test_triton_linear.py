"""GEMMs with weights of 16 bits against fp32 matmuls: interpreted where there is no GPU, else compiled."""

import pytest
import torch

from ops.gemms import DEVICE, HALF, assert_close, randn
from quire.ops.gpu.linear.gemv import GemvConfig, linear_gemv
from quire.ops.gpu.linear.linear import LinearKernel, choose_kernel, linear, num_splits
from quire.ops.gpu.linear.norm_gemv import norm_gemv
from quire.ops.gpu.linear.split_k import new_tickets
from quire.ops.gpu.linear.stream import StreamConfig, linear_stream
from quire.ops.gpu.norm import add_rms_norm

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("N,K,ahead", [(7, 40, 1), (30, 300, 2), (9, 384, 2), (5, 256, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("M", [1, 2, 3, 4])
def test_gemv(M: int, N: int, K: int, ahead: int, dtype: torch.dtype) -> None:
    x, w, bias = randn(M, K, dtype=dtype), randn(N, K, dtype=dtype, seed=1), randn(N, dtype=dtype, seed=2)
    config = GemvConfig(block_n=4, block_k=128, warps=4, ahead=ahead)
    assert_close(linear_gemv(x, w, None, config), x, w)
    assert_close(linear_gemv(x, w, bias, config), x, w, bias)


@pytest.mark.parametrize("M,N,K", [(1, 7, 40), (2, 30, 300), (5, 9, 264)])
def test_a_norm_and_the_matmul_behind_it(M: int, N: int, K: int) -> None:
    x, residual, norm = randn(M, K).to(HALF), randn(M, K, seed=1).to(HALF), 1 + randn(K, seed=2)
    w, bias = randn(N, K, seed=3).to(HALF), randn(N, seed=4)
    out, normed, total = norm_gemv(x, residual, norm, 1e-5, w, bias)
    plain, plain_total = add_rms_norm(x, residual, norm, 1e-5)
    assert torch.equal(total, plain_total)
    torch.testing.assert_close(normed, plain, rtol=torch.finfo(HALF).eps, atol=0)  # sums may differ in their order
    assert_close(out, normed, w, bias)
    out, normed, total = norm_gemv(total, None, norm, 1e-5, w)
    assert torch.equal(total, plain_total)
    torch.testing.assert_close(normed, plain, rtol=torch.finfo(HALF).eps, atol=0)
    assert_close(out, normed, w)


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
    x, w = randn(5, 400).to(HALF)[:, 8:264], randn(40, 512, seed=1).to(HALF)[:, :256]
    for rows in (x, x[:3], x[:1]):
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
    assert [choose_kernel(M, 4096, 4096) for M in (1, 4, 5, 64, 65)] == [
        LinearKernel.GEMV,
        LinearKernel.GEMV,
        LinearKernel.STREAM,
        LinearKernel.STREAM,
        LinearKernel.CUBLAS,
    ]
    assert [choose_kernel(M, 28672, 4096) for M in (2, 3, 4)] == [LinearKernel.GEMV, *[LinearKernel.STREAM] * 2]
    assert {choose_kernel(M, 4096, 4096, batch_invariant=True) for M in (1, 4, 64, 4096)} == {LinearKernel.STREAM}
