"""How much of a GPU an engine may still take, beside others on it."""

import pytest

from quire.ops.gpu.device import room_of_share

GIB = 1 << 30


@pytest.mark.parametrize(
    "utilization, free_at_start, free, expected",
    [
        pytest.param(0.9, 99, 83, 73, id="alone: all but a tenth"),
        pytest.param(0.96, 99, 83, 79, id="alone, and less left over"),
        pytest.param(0.4, 99, 83, 24, id="a share of its own"),
        pytest.param(0.4, 56, 40, 24, id="the same beside another engine"),
        pytest.param(0.4, 30, 14, 4, id="no more than others leave, and a tenth less"),
        pytest.param(0.4, 20, 4, -6, id="others hold nearly all"),
        pytest.param(0.4, 40, 60, 40, id="others gave back"),
    ],
)
def test_an_engine_takes_its_share(utilization: float, free_at_start: int, free: int, expected: int) -> None:
    found = room_of_share(utilization, 100 * GIB, free * GIB, free_at_start * GIB)
    assert found == pytest.approx(expected * GIB)
