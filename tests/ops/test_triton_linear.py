"""Products in Triton against fp32 matrix products: interpreted where there is no GPU, else compiled."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from quire.ops.torch.kernels.linear import Way, choose, linear, num_splits
from quire.ops.torch.kernels.linear_gemv import GemvConfig, linear_gemv
from quire.ops.torch.kernels.linear_splits import new_tickets
from quire.ops.torch.kernels.linear_stream import StreamConfig, linear_stream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter's tl.dot does not know bf16


@pytest.fixture(autouse=True)
def loops_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 makes loop bounds of arrays of one number, which numpy 2.4 no longer takes for a number."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None, tolerance: float = 0.0) -> None:
    """y against the fp32 product, as a share of each output's sum of magnitudes: `tolerance` and y's own rounding."""
    truth = x.double() @ w.double().T + (0 if bias is None else bias.double())
    size = x.double().abs() @ w.double().abs().T
    unit = torch.finfo(y.dtype).eps
    assert y.isfinite().all()
    assert ((y.double() - truth).abs() <= (tolerance + 1e-5) * size + unit * truth.abs() + 1e-6).all()


@pytest.mark.parametrize("N,K", [(7, 40), (130, 300)])
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
    assert not tickets.any()  # ready for the next product


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
    x, w = randn(3, 64), randn(16, 64, seed=1)
    assert_close(linear(x, w), x, w)


def test_batch_invariant_rows_do_not_see_how_many_they_are() -> None:
    # On a GPU, whatever the tile. The interpreter's products are numpy's, whose sums differ with the tile's shape.
    K, most, counts = (4096, 140, (1, 20, 33)) if torch.cuda.is_available() else (1024, 16, (1, 7))
    x, w = randn(most, K).to(HALF), randn(64, K, seed=1).to(HALF)
    assert num_splits(64, K) > 1
    whole = linear(x, w, batch_invariant=True)
    for count in counts:
        assert torch.equal(linear(x[:count], w, batch_invariant=True), whole[:count])


def test_the_way_is_a_function_of_the_shape() -> None:
    assert [choose(M, 4096, 4096) for M in (1, 2, 64, 65)] == [Way.GEMV, Way.STREAM, Way.STREAM, Way.CUBLAS]
    assert {choose(M, 4096, 4096, batch_invariant=True) for M in (1, 64, 4096)} == {Way.STREAM}
