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


@triton.jit
def combine(x, y, out, M: tl.constexpr, N: tl.constexpr, factor: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    table = tl.load(x + rows)[:, None] + tl.load(y + columns) * factor
    tl.store(out + rows[:, None] * N + columns, table)


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.int8, torch.int32), (torch.int32,) * 2])
@pytest.mark.parametrize("factor", [2, 0, True, -1])
def test_types_and_shapes_are_as_torchs_when_they_come_again(dtypes: tuple[torch.dtype, ...], factor: int) -> None:
    for M, N in ((4, 8), (4, 8), (8, 4)):
        x, y = torch.arange(M).to(dtypes[0]), torch.arange(N).to(dtypes[1])
        out = torch.zeros(M, N, dtype=dtypes[1])
        combine[(1,)](x, y, out, M, N, factor)
        assert torch.equal(out, x[:, None] + y * factor)


@triton.jit
def scale(x, out, factor: tl.constexpr):
    tl.store(out, tl.load(x) * factor)


def test_numbers_that_are_equal_are_not_one() -> None:
    x, out = torch.tensor([100], dtype=torch.int8), torch.zeros(1)
    for _ in range(2):
        scale[(1,)](x, out, 2.0)
        assert out.item() == 200
        with pytest.raises(Exception, match="overflow detected"):
            scale[(1,)](x, out, 2)


@triton.jit
def mismatch(out):
    tl.store(out + tl.arange(0, 4), tl.arange(0, 4) + tl.arange(0, 8))


@triton.jit
def out_of_range(x, out):
    tl.store(out, tl.load(x) + 300)


def test_what_is_refused_is_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(Exception, match="incompatible dimensions"):
            mismatch[(1,)](torch.zeros(4, dtype=torch.int32))
        with pytest.raises(Exception, match="300 is out of range"):
            out_of_range[(1,)](torch.zeros(1, dtype=torch.int8), torch.zeros(1, dtype=torch.int8))


@triton.jit
def take_later(a, b):
    return tl.where(b > 2, b, a - b)


@triton.jit
def reduce(x, out, AXIS: tl.constexpr, KEEP: tl.constexpr):
    table = tl.load(x + tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8))
    reduced = tl.reduce(table, AXIS, take_later, keep_dims=KEEP)
    places = tl.arange(0, 8 if AXIS == 0 else 4)
    if KEEP:
        places = places[None, :] if AXIS == 0 else places[:, None]
    tl.store(out + places, reduced)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_function_reduces_an_axis_from_its_first_element_on(axis: int, keep: bool) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * 3
    expected = x.unbind(axis)[0]
    for each in x.unbind(axis)[1:]:
        expected = torch.where(each > 2, each, expected - each)
    reduce[(1,)](x, out := torch.zeros(len(expected)), axis, keep)
    assert torch.equal(out, expected)
