"""The policy `fair`: tenants that always have requests waiting get service by their weights."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.driven import Engine
from quire.core.fair_order import FairOrder, expected_tokens
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.sequence_group import SequenceGroup
from trials import LENGTH


def ask(engine: Engine, name: str, prompt: list[int], tenant: str, weight: float = 1.0, **more: object) -> None:
    params = SamplingParams(seed=1, max_tokens=more.pop("max_tokens", 8), ignore_eos=True)  # type: ignore[arg-type]
    request = Request(id=name, prompt_ids=prompt, params=params, eos_ids=[0], tenant=tenant, weight=weight, **more)  # type: ignore[arg-type]
    engine.scheduler.add(request, 0.0)


def order_of(engine: Engine) -> list[str]:
    """Requests in the order in which they were admitted."""
    seen: list[str] = []
    while engine.scheduler.has_work:
        plan = engine.scheduler.schedule()
        seen += [engine.scheduler.rows[admission.row].group.id for admission in plan.admitted]
        engine.events += engine.scheduler.update(engine.executor.run(plan))
        engine.scheduler.check()
    return seen


def test_a_tenant_with_one_request_does_not_wait_for_the_queue_of_another() -> None:
    engine = Engine(policy="fair", max_num_seqs=1)
    for number in range(5):
        ask(engine, f"a{number}", [1, 2, 3], "a")
    ask(engine, "b0", [1, 2, 3], "b")
    assert order_of(engine) == ["a0", "b0", "a1", "a2", "a3", "a4"]


def test_weights_are_shares() -> None:
    engine = Engine(policy="fair", max_num_seqs=1)
    for number in range(12):
        ask(engine, f"a{number}", [number, 1, 2], "a", weight=3.0)
        ask(engine, f"b{number}", [number, 3, 4], "b")
    first = order_of(engine)[:8]
    assert sum(name[0] == "a" for name in first) == 6


def test_priority_comes_before_shares() -> None:
    engine = Engine(policy="fair", max_num_seqs=1)
    ask(engine, "a0", [1, 2, 3], "a")
    ask(engine, "a1", [1, 2, 3], "a")
    ask(engine, "b0", [1, 2, 3], "b", priority=1)
    assert order_of(engine) == ["a0", "a1", "b0"]


def test_a_resumed_request_does_not_wait_for_its_share_again() -> None:
    engine = Engine(policy="fair", max_num_seqs=1)
    ask(engine, "a0", [1, 2, 3], "a")
    ask(engine, "b0", [1, 2, 3], "b")
    ask(engine, "a1", [4, 5, 6], "a", resumed=[[7, 8]])
    ask(engine, "b1", [4, 5, 6], "b", priority=-1)
    assert order_of(engine) == ["b1", "a1", "a0", "b0"]


def test_who_comes_back_has_saved_up_nothing() -> None:
    engine = Engine(policy="fair", max_num_seqs=1)
    ask(engine, "b0", [9, 9], "b")
    order_of(engine)
    for number in range(20):
        ask(engine, f"a{number}", [number, 1], "a")
    for _ in range(40):
        engine.step()  # some of them are served, and b is away
    for number in range(6):
        ask(engine, f"b{number}", [number, 2], "b")
    first = order_of(engine)[:6]
    assert sum(name[0] == "b" for name in first) in (3, 4)


def test_what_was_not_taken_is_given_back() -> None:
    engine = Engine(policy="fair", max_num_seqs=2)
    ask(engine, "a", [1, 2, 3, 4], "a", max_tokens=50)
    engine.step()
    fair = engine.scheduler.groups.fair
    assert fair is not None and fair.counters.values()["a"] == 4 + 2 * 50
    engine.scheduler.cancel("a")
    assert fair.counters.values()["a"] == 4 + 2 * 1


@pytest.mark.trial
@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=20 * LENGTH, deadline=None)
def test_backlogged_tenants_stay_within_the_largest_request(seed: int) -> None:
    """Always: what two tenants with waiting requests were charged, by weight, differs by at most twice the largest."""
    rng = random.Random(seed)
    limits = {"max_num_seqs": rng.randint(1, 6), "max_num_batched_tokens": rng.randint(8, 64)}
    engine = Engine(256, policy="fair", prefix_caching=False, **limits)
    weights = {"a": 1.0, "b": rng.choice([1.0, 2.0, 5.0]), "c": 0.5}
    largest, number = 0.0, 0
    fair = engine.scheduler.groups.fair
    assert isinstance(fair, FairOrder)
    began: dict[str, float] = {}
    for _ in range(60):
        for tenant, weight in weights.items():
            while fair._num_waiting[tenant] < 3:
                number += 1
                prompt = [rng.randint(1, 9) for _ in range(rng.randint(1, 40))]
                ask(engine, str(number), prompt, tenant, weight, max_tokens=rng.randint(1, 30))
                group = engine.scheduler.groups._groups[str(number)]
                assert isinstance(group, SequenceGroup)
                largest = max(largest, expected_tokens(group) / weight)
        began = began or dict(fair.counters.values())
        engine.step()
        had = [fair.counters.values()[tenant] - began[tenant] for tenant in weights]
        assert max(had) - min(had) <= 2 * largest
