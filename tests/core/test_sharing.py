"""Prompts, and samples of one prompt, that share blocks."""

import pytest

from core.driven import LONG, Engine


def test_a_second_request_finds_the_prompt_and_the_text_of_the_first() -> None:
    engine = Engine()
    engine.add("a", LONG)
    text = engine.finish().tokens("a")
    computed = engine.executor.num_computed
    engine.add("b", [*LONG, *text, 1])  # the next turn of a chat
    engine.finish()
    assert engine.events[-1].num_cached == 16  # of 19 tokens: the four full blocks that were computed
    assert engine.executor.num_computed - computed == 3 + 7
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (10 + 19, 16)


def test_the_last_token_of_a_fully_cached_prompt_is_computed_with_its_block() -> None:
    engine = Engine()
    for name in ("a", "b"):
        engine.add(name, LONG[:8], max_tokens=1)
        engine.finish()
    assert [event.num_cached for event in engine.events] == [0, 4]


def test_requests_of_one_step_share_what_the_first_of_them_computes() -> None:
    engine = Engine()
    engine.add("a", [*LONG, 1], max_tokens=2)
    engine.add("b", [*LONG, 2], max_tokens=2)
    plan = engine.step()
    assert [(run.start, run.count) for run in plan.runs] == [(0, 11), (8, 3)]
    assert plan.admitted[0].blocks[:2] == plan.admitted[1].blocks[:2]
    engine.finish()


def test_prompts_that_advance_side_by_side_compute_each_block_once() -> None:
    engine = Engine(long_prefill_token_threshold=8)
    prompt = [i % 50 for i in range(65)]
    engine.add("a", prompt, max_tokens=1)
    engine.add("b", prompt, max_tokens=1)
    engine.finish()
    assert engine.executor.num_computed == 66  # the last token of each, and 64 between them


def test_tenants_share_nothing() -> None:
    engine = Engine()
    for name, tenant in (("a", ""), ("b", "other"), ("c", "other")):
        engine.add(name, LONG, tenant=tenant, max_tokens=1)
        engine.finish()
    assert [event.num_cached for event in engine.events] == [0, 0, 8]


def test_without_prefix_caching_nothing_is_kept() -> None:
    engine = Engine(prefix_caching=False)
    for name in ("a", "b"):
        engine.add(name, LONG, max_tokens=1)
        engine.finish()
    assert engine.events[-1].num_cached == 0 and engine.scheduler.stats().cached_blocks == 0


def test_old_prefixes_are_evicted_from_their_ends() -> None:
    engine = Engine(num_blocks=6)
    engine.add("a", [*range(1, 18)], max_tokens=1)  # four full blocks and one token
    engine.finish()
    engine.add("b", [30] * 9, max_tokens=1)  # three blocks: one was free, one never cached, one is evicted
    engine.finish()
    engine.add("c", [*range(1, 18)], max_tokens=1)
    engine.finish()
    assert engine.events[-1].num_cached == 12


@pytest.mark.parametrize("num_prompt", [8, 9, 10])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_samples_fork_from_the_prompt_of_the_first(num_prompt: int, prefix_caching: bool) -> None:
    engine = Engine(prefix_caching=prefix_caching)
    engine.add("a", LONG[:num_prompt], n=3)
    first, second = engine.step(), engine.step()
    assert [run.count for run in first.runs] == [num_prompt]
    assert [(run.start, run.count) for run in second.runs] == [(num_prompt, 1)] + [(num_prompt - 1, 1)] * 2
    assert len(second.copies) == (0 if num_prompt == 9 else 2)  # 8 tokens before the last: nothing to copy
    engine.finish()
    assert len({tuple(engine.tokens("a", i)) for i in range(3)}) == 3
    assert engine.reasons("a") == {0: "length", 1: "length", 2: "length"}


def test_more_samples_than_rows_take_turns() -> None:
    engine, wide = Engine(max_num_seqs=2), Engine(max_num_seqs=8)
    for each in (engine, wide):
        each.add("a", LONG, n=5)
        each.finish()
    assert [engine.tokens("a", i) for i in range(5)] == [wide.tokens("a", i) for i in range(5)]


def test_best_of_delivers_the_most_likely_samples_at_the_end() -> None:
    every, best = Engine(), Engine()
    every.add("a", LONG, n=5, logprobs=0)
    best.add("a", LONG, n=2, best_of=5)
    every.finish()
    best.finish()
    totals = {e.index: e.cumulative_logprob for e in every.events if e.finish_reason}
    order = sorted(totals, key=lambda index: -(totals[index] or 0.0))
    assert [event.index for event in best.events] == [0, 1]
    assert [event.tokens for event in best.events] == [every.tokens("a", i) for i in order[:2]]
    assert [event.cumulative_logprob for event in best.events] == [totals[i] for i in order[:2]]
    assert all(event.logprobs is None for event in best.events)
    assert [event.final for event in best.events] == [False, True]
    assert [event.num_unseen for event in best.events] == [0, sum(len(every.tokens("a", i)) for i in order[2:])]
