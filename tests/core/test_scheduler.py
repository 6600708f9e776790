"""The scheduler's promises, one by one. Blocks have 4 slots and token 0 is EOS unless a test says otherwise."""

import pytest

from core.driven import LONG, Engine
from fakes import FakeExecutor
from quire.core.errors import BadRequest, PromptTooLong, QueueFull
from quire.core.limits import SchedulerLimits
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.scheduler import Scheduler

# ---- what is refused


def test_a_prompt_that_leaves_no_room_is_refused_with_its_numbers() -> None:
    with pytest.raises(PromptTooLong, match="120 tokens and max_tokens is 16, and the context holds 128"):
        Engine().add("a", [1] * 120, max_tokens=16)
    with pytest.raises(PromptTooLong, match="128 tokens"):
        Engine().add("a", [1] * 128, max_tokens=None)


def test_a_request_that_could_never_fit_the_pool_is_refused() -> None:
    engine = Engine(num_blocks=5)
    with pytest.raises(BadRequest, match="needs 6 cache blocks of 4 tokens, and there are 5"):
        engine.add("a", [1] * 10, max_tokens=12)
    engine.add("b", [1] * 10, max_tokens=11)  # 20 slots: the last token needs none
    assert len(engine.finish().tokens("b")) == 11
    with pytest.raises(BadRequest, match="for 4 beams"):
        engine.add("c", [1] * 10, max_tokens=6, beam_width=4)


def test_wrong_requests_name_what_is_wrong() -> None:
    engine = Engine(max_num_seqs=2)
    engine.add("a", [1])
    for fault, request in (
        ("id", {"name": "a", "prompt": [1]}),
        ("prompt", {"name": "b", "prompt": []}),
        ("beam_width", {"name": "b", "prompt": [1], "beam_width": 3}),
    ):
        with pytest.raises(BadRequest) as error:
            engine.add(**request)  # type: ignore[arg-type]
        assert error.value.param == fault
    assert list(engine.finish().reasons("a")) == [0]


def test_the_queue_has_an_end() -> None:
    engine = Engine(max_queued=2)
    engine.add("a", [1])
    engine.add("b", [1])
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        engine.add("c", [1])
    engine.step()
    engine.add("c", [1])  # the others run now
    engine.finish()


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadRequest, match="choose from fcfs, priority"):
        Engine(policy="lottery")


# ---- the rule


def test_decoding_goes_before_prompts_and_prompts_go_in_chunks_of_whole_blocks() -> None:
    engine = Engine(max_num_batched_tokens=11)
    engine.add("a", [1, 2, 3])
    engine.step()
    engine.add("b", [4] * 30)
    plan = engine.step()
    assert [(run.start, run.count) for run in plan.runs] == [(3, 1), (0, 8)]
    plan = engine.step()
    assert [(run.start, run.count) for run in plan.runs] == [(4, 1), (8, 8)]


def test_no_waiting_sequence_overtakes_another() -> None:
    """The short request behind a long one waits, though there is room for it."""
    engine = Engine(num_blocks=9)
    engine.add("a", [1, 2, 3, 4, 5, 6], max_tokens=8)
    engine.step()
    engine.add("b", [9] * 29, max_tokens=4)  # 8 blocks; 7 are free
    engine.add("c", [5], max_tokens=2)
    engine.step()
    assert engine.scheduler.stats().waiting == 2
    engine.finish()
    ends = [event.request_id for event in engine.events if event.final]
    assert ends == ["a", "c", "b"]  # c starts together with b, and is shorter


def test_the_priority_policy_lets_urgent_requests_start_first() -> None:
    engine = Engine(policy="priority", max_num_seqs=1)
    engine.add("late", [1], priority=2)
    engine.add("early", [2], priority=1)
    engine.finish()
    assert [event.request_id for event in engine.events if event.final] == ["early", "late"]


def test_prompts_leave_a_step_short_while_others_decode() -> None:
    engine = Engine(step_seconds=0.1)
    prompt = [i % 50 for i in range(60)]
    engine.add("a", prompt, max_tokens=20)
    assert [run.count for run in engine.step().runs] == [60]  # no sequence decodes
    engine.scheduler.step_time.record_step(60, 0.4)  # 15 tokens take 0.1 s
    engine.add("b", [*prompt[:3], 63, *prompt], max_tokens=2)
    assert [run.count for run in engine.step().runs] == [1, 12]  # whole blocks
    engine.scheduler.step_time.record_step(13, 1e9)  # something else held it up: half as fast, and that counts a third
    assert [run.count for run in engine.step().runs] == [1, 8]
    for _ in range(20):
        engine.scheduler.step_time.record_step(1000, 0.1)
    assert [run.count for run in engine.step().runs] == [1, 44]  # the rest
    engine.finish()


def test_a_slow_pace_leaves_prompts_a_block() -> None:
    engine = Engine(step_seconds=0.1)
    engine.add("a", [1], max_tokens=20)
    engine.step()
    engine.scheduler.step_time.record_step(1, 10.0)
    engine.add("b", LONG, max_tokens=1)
    assert [run.count for run in engine.step().runs] == [1, 4]
    engine.finish()


def test_a_resumed_request_starts_first_and_may_make_a_step_longer() -> None:
    engine = Engine(step_seconds=0.1, max_num_seqs=3)
    engine.add("a", [1], max_tokens=20)
    engine.step()
    engine.scheduler.step_time.record_step(10, 0.25)  # a token takes 25 ms
    engine.add("long", [i % 50 for i in range(60)], max_tokens=1)
    assert [run.count for run in engine.step().runs] == [1, 4]
    engine.add("b", LONG, max_tokens=1)
    engine.add("c", LONG[::-1], resumed=[5, 6, 7], max_tokens=8)
    plan = engine.step()
    assert [engine.scheduler.rows[run.row].group.id for run in plan.runs] == ["a", "long", "c"]
    assert [run.count for run in plan.runs] == [1, 4, 13], "half a second for all, and 0.1 s for those that begin"
    assert [run.count for run in engine.step().runs] == [1, 1, 4]
    engine.finish()


def test_a_row_is_kept_from_admission_to_the_end() -> None:
    engine = Engine()
    for i in range(3):
        engine.add(str(i), [i + 1], max_tokens=2 + i)
    engine.finish()
    assert [len(plan.admitted) for plan in engine.plans] == [3, 0, 0, 0]
    assert [plan.retired for plan in engine.plans] == [[], [], [0], [1]]


# ---- how a sample ends


def test_stop_tokens_end_a_text_and_are_part_of_it() -> None:
    free = Engine(vocab_size=8)
    free.add("a", [5], max_tokens=40)
    tokens = free.finish().tokens("a")
    assert free.reasons("a") == {0: "length"} and len(tokens) == 40
    stop = tokens[6]
    first = tokens.index(stop)
    stopped = Engine(vocab_size=8)
    stopped.add("a", [5], max_tokens=40, stop_token_ids=[stop])
    assert stopped.finish().tokens("a") == tokens[: first + 1]
    assert stopped.reasons("a") == {0: "stop"} and stopped.events[-1].stop_token == stop
    later = Engine(vocab_size=8)
    later.add("a", [5], max_tokens=40, stop_token_ids=[stop], min_tokens=12)
    assert len(later.finish().tokens("a")) > 12


def test_without_max_tokens_the_context_is_filled() -> None:
    engine = Engine(max_model_len=20)
    engine.add("a", [1, 2, 3], max_tokens=None)
    assert len(engine.finish().tokens("a")) == 17 and engine.reasons("a") == {0: "length"}


def test_a_cancelled_sample_leaves_the_others_alone() -> None:
    whole, part = Engine(), Engine()
    for engine in (whole, part):
        engine.add("a", LONG, n=3)
        engine.step()
        engine.step()
    part.events += part.scheduler.cancel("a", 0)
    assert part.scheduler.cancel("a", 0) == []
    whole.finish()
    part.finish()
    assert part.reasons("a") == {0: "cancelled", 1: "length", 2: "length"}
    assert [part.tokens("a", i) for i in (1, 2)] == [whole.tokens("a", i) for i in (1, 2)]
    assert [event.final for event in part.events].count(True) == 1 and part.events[-1].final


def test_cancelling_the_leader_before_its_prompt_is_done_lets_another_lead() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", [3] * 20, n=2, prompt_logprobs=0)
    engine.step()
    engine.events += engine.scheduler.cancel("a", 0)
    engine.finish()
    assert engine.reasons("a") == {0: "cancelled", 1: "length"}
    assert sum(len(event.prompt_logprobs or ()) for event in engine.events) == 19


def test_output_of_a_request_cancelled_while_its_step_runs_is_dropped() -> None:
    engine = Engine()
    engine.add("a", LONG)
    engine.add("b", LONG[::-1])
    plan = engine.scheduler.schedule()
    events = engine.scheduler.cancel("a")
    assert [(event.finish_reason, event.final) for event in events] == [("cancelled", True)]
    engine.events += engine.scheduler.update(engine.executor.run(plan))
    assert engine.tokens("a") == []
    engine.finish()
    engine.add("c", LONG)  # what a computed is of use
    engine.finish()
    assert engine.events[-1].num_cached == 8


def test_deadlines_end_requests_as_cancelled() -> None:
    scheduler = Scheduler(SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64), 16)
    for name, deadline in (("a", 5.0), ("b", 9.0), ("c", 1.0)):
        params = SamplingParams(seed=0)
        scheduler.add(Request(id=name, prompt_ids=[1], params=params, deadline=deadline), now=2.0)
    assert scheduler.expire(4.9) == []
    (event,) = scheduler.expire(5.0)
    assert (event.request_id, event.finish_reason, event.final) == ("a", "cancelled", True)
    assert "deadline" in event.reason
    executor = FakeExecutor(num_blocks=16)
    events = scheduler.update(executor.run(scheduler.schedule()))
    assert (events[0].request_id, events[0].finish_reason) == ("c", "cancelled")  # was too late when it came


# ---- adapters


def adapted(name: str, adapter: str, prompt: int = 8) -> Request:
    params = SamplingParams(seed=1, max_tokens=4)
    return Request(id=name, prompt_ids=[5] * prompt, params=params, adapter=adapter, arrival=float(ord(name)))


def test_adapters_take_slots_and_a_sequence_that_waits_for_one_is_skipped() -> None:
    scheduler = Scheduler(
        SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64), 64, num_adapters=2
    )
    for name, adapter in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "z"), ("e", "")):
        scheduler.add(adapted(name, adapter), 0.0)
    executor = FakeExecutor(num_blocks=64)
    plan = scheduler.schedule()
    assert plan.adapters == [(0, "x"), (1, "y")]
    assert [admission.adapter for admission in plan.admitted] == [0, 1, 0, -1]  # d waits for a slot, and e need not
    slots = []
    while scheduler.has_work:
        scheduler.update(executor.run(plan))
        scheduler.check()
        plan = scheduler.schedule()
        slots += plan.adapters
    assert slots == [(1, "z")]  # y was used less recently than x
    assert not scheduler.uses("x")
    scheduler.update(executor.run(plan))
    scheduler.add(adapted("f", "x"), 0.0)
    assert scheduler.uses("x")
    plan = scheduler.schedule()
    assert plan.adapters == [] and plan.admitted[0].adapter == 0  # it is still there


def test_a_skipped_sequence_does_not_starve() -> None:
    """However many requests come for the adapters in use, one of these adapters gives its slot to the waiting one."""
    scheduler = Scheduler(
        SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64), 64, num_adapters=2
    )
    executor = FakeExecutor(num_blocks=64)
    names = iter("abcdefghijklmnopqrstuvwxyz")
    for adapter in ("x", "y", "z", "x", "y"):
        scheduler.add(adapted(next(names), adapter), 0.0)
    admitted: list[str] = []
    for _ in range(8):  # what runs ends after four steps, and two come in each
        plan = scheduler.schedule()
        admitted += [scheduler.rows[admission.row].group.adapter for admission in plan.admitted]
        scheduler.update(executor.run(plan))
        scheduler.check()
        for adapter in ("x", "y"):
            scheduler.add(adapted(next(names), adapter), 0.0)
    assert admitted[:4] == ["x", "y", "y", "y"], "x was used less recently, so no new sequence starts with it"
    assert "z" in admitted and admitted.index("z") < admitted.index("x", 1)


def test_adapters_share_no_prefixes() -> None:
    scheduler = Scheduler(
        SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=128), 64, num_adapters=2
    )
    executor = FakeExecutor(num_blocks=64)
    cached = []
    for name, adapter in (("a", ""), ("b", "x"), ("c", "y"), ("d", "x"), ("e", "")):
        scheduler.add(adapted(name, adapter, prompt=40), 0.0)
        while scheduler.has_work:
            events = scheduler.update(executor.run(scheduler.schedule()))
        cached.append(events[-1].num_cached)
    assert cached == [0, 0, 0, 32, 32]
