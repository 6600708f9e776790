"""How long a dead engine's successor waits."""

import pytest

from quire.client.restarts import MAX_RESTARTS, Restarts


def delays(restarts: Restarts, count: int, was_killed: bool = False, ready: bool = True) -> list[float]:
    """Of so many engines that die one after the other."""
    waited = []
    for _ in range(count):
        if ready:
            restarts.ready()
        restarts.died(was_killed)
        waited.append(restarts.delay)
    return waited


def test_an_engine_that_dies_now_and_then_is_started_again_at_once() -> None:
    restarts = Restarts()
    for _ in range(20):
        assert delays(restarts, 3) == [0, 0, 0]
        restarts.gained_output()
    assert not restarts.are_too_many


def test_engines_that_give_nothing_wait_longer_each_time() -> None:
    assert delays(Restarts(), 8) == pytest.approx([0, 0, 0, 0.4, 0.8, 1.6, 3.2, 5.0])


def test_engines_that_are_never_ready_are_given_up() -> None:
    restarts = Restarts()
    assert delays(restarts, MAX_RESTARTS, ready=False) == pytest.approx([0, 0.4, 0.8, 1.6, 3.2])
    assert not restarts.are_too_many
    restarts.died(was_killed=False)
    assert restarts.are_too_many


def test_kills_from_outside_are_no_fault_of_the_engine() -> None:
    restarts = Restarts()
    assert delays(restarts, 20, was_killed=True, ready=False)[-1] == 0.5 and not restarts.are_too_many
