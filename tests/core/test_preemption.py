"""Sequences that are preempted and admitted again, and requests that are resumed in another engine."""

import pytest

from core.driven import LONG, Engine
from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.core.request import Request


def test_a_preempted_sequence_is_computed_again_with_the_same_text() -> None:
    small, large = Engine(num_blocks=10), Engine(num_blocks=64)
    for engine in (small, large):
        engine.add("a", LONG, max_tokens=14)
        engine.add("b", LONG[::-1], max_tokens=14)
        engine.finish()
    assert small.scheduler.stats().preemptions > 0 == large.scheduler.stats().preemptions
    assert [small.tokens(name) for name in "ab"] == [large.tokens(name) for name in "ab"]
    first = next(event for event in small.events if event.final)
    assert first.request_id == "a", "the first in policy order is not the victim"


def test_with_room_on_the_host_blocks_are_swapped_and_nothing_is_computed_twice() -> None:
    small, large = Engine(num_blocks=10, num_host_blocks=10), Engine(num_blocks=64)
    for engine in (small, large):
        engine.add("a", LONG, max_tokens=14)
        engine.add("b", LONG[::-1], max_tokens=14)
        engine.finish()
    assert small.scheduler.stats().preemptions > 0
    assert any(plan.swap_out for plan in small.plans) and any(plan.swap_in for plan in small.plans)
    assert small.executor.num_computed == large.executor.num_computed
    assert small.tokens("b") == large.tokens("b")


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_prompt_logprobs_are_delivered_once(num_host_blocks: int) -> None:
    engine = Engine(num_blocks=12, num_host_blocks=num_host_blocks, max_num_batched_tokens=8)
    for name in "abc":
        engine.add(name, LONG, max_tokens=18, prompt_logprobs=0)
    engine.finish()
    assert engine.scheduler.stats().preemptions > 0
    for name in "abc":
        tokens = [each[0].token for e in engine.events if e.request_id == name for each in e.prompt_logprobs or ()]
        assert tokens == LONG[1:]
    assert all(event.num_cached == 0 for event in engine.events)


def test_a_beam_search_is_preempted_and_admitted_as_a_whole() -> None:
    small, large = Engine(num_blocks=11), Engine(num_blocks=64)
    for engine in (small, large):
        engine.add("a", LONG, max_tokens=18)
        engine.add("b", LONG[::-1], max_tokens=9, beam_width=3, n=3)
        engine.finish()
    assert small.scheduler.stats().preemptions > 0
    assert [small.tokens("b", i) for i in range(3)] == [large.tokens("b", i) for i in range(3)]


def test_beams_without_room_do_not_keep_an_earlier_prompt_from_taking_theirs() -> None:
    """Beams lack one token and are planned before prompts; blocked, they must let the more urgent prompt go on."""
    engine = Engine(num_blocks=10, policy="priority", long_prefill_token_threshold=2)
    engine.add("beams", [1, 2, 3, 4, 5], max_tokens=10, beam_width=3, priority=2)
    engine.step()
    engine.add("prompt", [*range(10, 30)], max_tokens=4, priority=1)
    for _ in range(60):
        if engine.scheduler.has_work:
            engine.step()
    assert engine.reasons("prompt") == engine.reasons("beams") == {0: "length"}
    assert engine.scheduler.stats().preemptions > 0


def test_a_step_that_preempts_admits_no_sequence() -> None:
    engine = Engine(num_blocks=10, policy="priority")
    engine.add("a", LONG, max_tokens=16, priority=1)
    engine.add("b", LONG[::-1], max_tokens=16, priority=3)
    for _ in range(5):
        engine.step()
    engine.add("c", [5] * 16, max_tokens=1, priority=2)  # would fit where b was
    while not engine.scheduler.stats().preemptions:
        plan = engine.step()
    assert not plan.admitted
    assert [admission.num_prompt for admission in engine.step().admitted] == [16]
    engine.finish()


# ---- going on after a crash


@pytest.mark.parametrize("num_steps", range(1, 12))
def test_a_resumed_request_goes_on_where_it_was(num_steps: int) -> None:
    undisturbed, crashed, resumed = Engine(vocab_size=9), Engine(vocab_size=9), Engine(vocab_size=9)
    for engine in (undisturbed, crashed):
        engine.add("a", LONG, n=3, max_tokens=9, ignore_eos=False)
    undisturbed.finish()
    for _ in range(num_steps):
        if crashed.scheduler.has_work:
            crashed.step()
    delivered = [crashed.tokens("a", i) for i in range(3)]
    params = SamplingParams(seed=1, n=3, max_tokens=9)
    resumed.scheduler.add(Request(id="a", prompt_ids=LONG, params=params, eos_ids=[0], resumed=delivered), 0.0)
    resumed.finish()
    for i in range(3):
        assert delivered[i] + resumed.tokens("a", i) == undisturbed.tokens("a", i)
    assert resumed.reasons("a") == undisturbed.reasons("a")
    assert [event.final for event in resumed.events].count(True) == 1


def test_a_best_of_request_that_delivered_nothing_starts_again() -> None:
    engine = Engine()
    params = SamplingParams(seed=1, n=1, best_of=3)
    engine.scheduler.add(Request(id="a", prompt_ids=[1], params=params, resumed=[[]]), 0.0)  # as the client counts
    assert engine.finish().reasons("a") == {0: "length"}


def test_held_requests_have_nothing_to_resume() -> None:
    with pytest.raises(BadRequest, match="only its best samples"):
        params = SamplingParams(seed=1, n=1, best_of=2)
        Engine().scheduler.add(Request(id="a", prompt_ids=[1], params=params, resumed=[[1], []]), 0.0)
