"""The compiled searches give the bits of the plain ones, with every instruction set and for any number of groups."""

from collections.abc import Iterator

import numpy as np
import pytest

from quire.ops.compiled import available_isas, use_isa
from quire.ops.dequantize import IQ4_VALUES
from quire.ops.dequantize_grids import IQ2_VALUES, IQ3_S_VALUES
from quire.quantize import gguf_grids, plain_search, search
from quire.quantize.integers import SHRINKS


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    use_isa(request.param)
    yield request.param
    use_isa(available_isas()[0])


def groups(count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """One group of zeros, one with a single weight, one of a constant, and some that count for nothing."""
    rng = np.random.default_rng(count * size)
    x = (rng.standard_t(4, (count, size)) * rng.lognormal(-3, 1, (count, 1))).astype(np.float32)
    weights = rng.exponential(size=(count, size)).astype(np.float32)
    x[0], x[1], x[2] = 0, 0, 0.25
    x[1, size // 2] = -1
    weights[3, ::2] = 0
    return x, weights


SHAPES = [(5, 16), (37, 32), (16, 128)]


@pytest.mark.parametrize(("count", "size"), SHAPES)
@pytest.mark.parametrize("levels", [4, 8, 32])
def test_symmetric_scales(count: int, size: int, levels: int, isa: str) -> None:
    x, weights = groups(count, size)
    ours, plain = (module.symmetric_scales(x, weights, levels) for module in (search, plain_search))
    assert np.array_equal(ours, plain)
    assert ours[0] == 0 and ours[1] != 0


@pytest.mark.parametrize(("count", "size"), SHAPES)
@pytest.mark.parametrize("free", [False, True])
def test_scales_and_offsets(count: int, size: int, free: bool, isa: str) -> None:
    x, weights = groups(count, size)
    ours, plain = (module.offset_scales(x, weights, 15, free=free) for module in (search, plain_search))
    assert np.array_equal(ours[0], plain[0]) and np.array_equal(ours[1], plain[1])
    assert free or (ours[1] <= 0).all()


@pytest.mark.parametrize(("count", "size"), SHAPES)
def test_shrunk_scales(count: int, size: int, isa: str) -> None:
    x, weights = groups(count, size)
    widest = np.abs(x).max(1, keepdims=True) / np.float32(7.5)
    zeros = np.full_like(widest, 8)
    ours, plain = (module.shrunk_scales(x, weights, widest, zeros, 15, SHRINKS) for module in (search, plain_search))
    assert ours.dtype == np.float16 and np.array_equal(ours, plain) and (ours > 0).all()


@pytest.mark.parametrize(("count", "size"), SHAPES[:2])
def test_scales_of_a_codebook(count: int, size: int, isa: str) -> None:
    x, weights = groups(count, size)
    assert np.array_equal(
        search.codebook_scales(x, weights, IQ4_VALUES), plain_search.codebook_scales(x, weights, IQ4_VALUES)
    )


@pytest.mark.parametrize(("name", "values", "digits"), [("IQ2_S", IQ2_VALUES, 8), ("IQ3_S", IQ3_S_VALUES, 4)])
def test_entries_of_a_grid(name: str, values: np.ndarray, digits: int, isa: str) -> None:
    x, weights = groups(37, digits)
    magnitudes, halves = np.abs(x) * 100, gguf_grids.grid_halves(name)
    ours, plain = (module.nearest_in_grid(magnitudes, weights, values, halves) for module in (search, plain_search))
    assert np.array_equal(ours, plain)
    entries = values[gguf_grids.grid(name)]  # and no other entry is nearer
    costs = (weights[:, None] * (magnitudes[:, None] - entries) ** 2).sum(2)
    assert np.allclose(costs[np.arange(37), ours], costs.min(1), rtol=1e-5)


def test_what_is_no_group_is_refused() -> None:
    x = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match="different shapes"):
        search.symmetric_scales(x, x[:1], 8)
    with pytest.raises(ValueError, match="no combination of digits"):
        search.nearest_in_grid(x, x, IQ2_VALUES, np.full((3, 2), 81, np.uint8))
