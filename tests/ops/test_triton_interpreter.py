"""What the interpreter checks is still checked after tests/triton_interpreter.py has made it faster."""

import os

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU kernels are compiled")


@triton.jit
def add(x, y, out, sign: tl.constexpr):
    tl.store(out, tl.load(x) + sign * tl.load(y))


@pytest.mark.parametrize(
    ("dtype", "x", "y"), [(torch.int32, 2**31 - 2, 1), (torch.int8, 126, 1), (torch.int64, 1, 2**40)]
)
def test_sums_that_fit(dtype: torch.dtype, x: int, y: int) -> None:
    out = torch.zeros(1, dtype=dtype)
    add[(1,)](torch.tensor([x], dtype=dtype), torch.tensor([y], dtype=dtype), out, 1)
    assert out.item() == x + y


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.int32, 2**31 - 1), (torch.int8, 127)])
def test_an_overflow_is_an_error(dtype: torch.dtype, limit: int, sign: int) -> None:
    x, y = torch.tensor([sign * limit], dtype=dtype), torch.tensor([2], dtype=dtype)
    with pytest.raises(Exception, match="overflow detected"):
        add[(1,)](x, y, torch.zeros(1, dtype=dtype), sign)
