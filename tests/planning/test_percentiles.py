"""A percentile is a value that was measured: by nearest rank."""

import pytest

from quire.planning.percentiles import percentile


@pytest.mark.parametrize(("share", "rank"), [(0, 1), (1, 1), (20, 1), (21, 2), (50, 3), (90, 5), (99, 5), (100, 5)])
def test_the_smallest_value_that_enough_do_not_exceed(share: float, rank: int) -> None:
    assert percentile([5.0, 1.0, 4.0, 2.0, 3.0], share) == rank


def test_rounding_does_not_move_the_rank() -> None:
    values = [float(value) for value in range(1, 1001)]
    assert [percentile(values, share) for share in (0.1, 50, 99, 99.9)] == [1, 500, 990, 999]
    assert percentile([7.0], 50) == 7
