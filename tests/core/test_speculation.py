"""Draft tokens: how many are verified, what the acceptance rate learns, and that rejected ones leave nothing behind."""

from itertools import pairwise
from typing import Any

import pytest

from core.driven import LONG, Engine
from fakes import make_drafts_free
from quire.core.draft_budget import PRIOR_TOKEN_COST, AcceptanceRate, DraftBudget, StepCostModel


def acceptance(rate: float) -> AcceptanceRate:
    made = AcceptanceRate()
    made.rate = rate
    return made


def draft_budget(token_cost: float = PRIOR_TOKEN_COST, **options: Any) -> DraftBudget:
    """Where a step of one token takes 1, and every other adds `token_cost`."""
    made = DraftBudget(**options)
    for _ in range(200):
        for num_tokens in (1, 3, 9):
            made.step_cost.record_step(num_tokens, 1.0 + token_cost * (num_tokens - 1))
    return made


def test_the_cost_model_is_a_line_through_the_measured_steps() -> None:
    step_cost = draft_budget(token_cost=0.25).step_cost
    assert step_cost.seconds_per_token == pytest.approx(0.25, rel=0.05)
    assert step_cost.seconds(1) == pytest.approx(1.0, rel=0.1) and step_cost.seconds(9) == pytest.approx(3.0, rel=0.05)


def test_until_steps_differ_a_token_costs_the_prior() -> None:
    step_cost = StepCostModel()
    assert step_cost.seconds_per_token / step_cost.seconds(1) == PRIOR_TOKEN_COST
    for _ in range(50):
        step_cost.record_step(1, 0.02)
    assert step_cost.seconds_per_token == pytest.approx(0.02 * PRIOR_TOKEN_COST)
    step_cost.record_step(1, 5.0)  # something else held it up
    assert step_cost.seconds(1) < 0.025


def test_a_token_never_costs_more_than_its_share_or_less_than_nothing() -> None:
    step_cost = StepCostModel()
    for _ in range(100):
        step_cost.record_step(2, 1.0)
        step_cost.record_step(8, 9.0)
    assert step_cost.seconds_per_token <= step_cost.seconds(5) / 4
    for _ in range(200):
        step_cost.record_step(2, 9.0)
        step_cost.record_step(8, 1.0)
    assert step_cost.seconds_per_token == 0.0


def test_likely_drafts_and_cheap_tokens_raise_the_number_of_drafts() -> None:
    def alone(rate: float, token_cost: float) -> int:
        return draft_budget(token_cost).choose([(acceptance(rate), 5)], 1, max_drafts=99)[0]

    counts = [alone(rate, 0.4) for rate in (0.2, 0.5, 0.8, 0.9, 0.99)]
    assert counts[0] == 0 and counts[-1] == 5 and all(a <= b for a, b in pairwise(counts))
    counts = [alone(0.6, token_cost) for token_cost in (0.9, 0.4, 0.1, 0.01)]
    assert counts[0] == 0 and counts[-1] == 5 and all(a <= b for a, b in pairwise(counts))


def test_in_a_batch_only_likely_drafts_are_verified() -> None:
    """Eight tokens take 3.8 times what one takes: one more has to be worth a ninth of that."""
    offers = [(acceptance(0.7), 5)] * 7 + [(acceptance(0.97), 5)]
    counts = draft_budget(0.4).choose(offers, 8, max_drafts=99)
    assert counts[:7] == [0] * 7 and counts[7] > 0
    assert sum(draft_budget(0.01).choose(offers, 8, max_drafts=6)) == 6  # no more than there is room for


def test_drafts_that_did_not_run_update_the_acceptance_rate() -> None:
    known = acceptance(0.5)
    known.update([4, 5], [4])
    assert known.rate > 0.5
    for _ in range(20):
        known.update([4, 5], [9])
    assert known.rate < 0.05
    for _ in range(20):
        known.update([4, 5, 6], [4, 5, 6, 7])
    assert known.rate > 0.95


def test_a_sequence_waits_for_its_token_if_drafts_gain_more_than_the_steps_it_misses() -> None:
    ahead = draft_budget(0.01, ahead=1)
    assert ahead.should_wait(acceptance(0.9), [1, 2, 3]) and not ahead.should_wait(acceptance(0.4), [1, 2, 3])
    assert not ahead.should_wait(acceptance(1.0), [])


# -- a scheduler with drafts ------------------------------------------------------------------------------------------


def engines(accuracy: float = 1.0, **options: Any) -> tuple[Engine, Engine]:
    """Without drafts, and with."""
    plain, quick = Engine(**options), Engine(num_drafts=5, accuracy=accuracy, **options)
    make_drafts_free(quick.scheduler.speculation)
    return plain, quick


def test_accepted_drafts_save_steps() -> None:
    plain, quick = engines()
    for engine in (plain, quick):
        engine.add("a", LONG, max_tokens=24)
        engine.finish()
    assert quick.tokens("a") == plain.tokens("a") and len(quick.plans) < 0.6 * len(plain.plans)
    stats = quick.scheduler.stats()
    assert stats.accepted_tokens == stats.draft_tokens == sum(stats.accepted_at) > 0
    assert stats.drafts == sum(any(run.drafts for run in plan.runs) for plan in quick.plans)
    assert stats.draft_tokens == sum(plan.num_drafts for plan in quick.plans)


def test_rejected_drafts_leave_no_block_and_no_prefix() -> None:
    plain, quick = engines(accuracy=0.0)
    for engine in (plain, quick):
        engine.add("a", LONG, max_tokens=24)
    assert quick.scheduler.speculation is not None
    while quick.scheduler.has_work:
        for seq in quick.scheduler.groups.running.items:
            seq.acceptance.rate = 0.9  # whatever was rejected
        quick.step()
        for seq in quick.scheduler.groups.running.items:
            assert len(seq.block_table) == -(-seq.num_computed // 4) and seq.num_computed == len(seq.tokens) - 1
    plain.finish()
    assert quick.tokens("a") == plain.tokens("a")
    assert quick.scheduler.speculation.num_draft_tokens > 20 and quick.scheduler.speculation.num_accepted < 5
    for engine in (plain, quick):  # the tree holds the text, and nothing else
        engine.add("b", [*LONG, *plain.tokens("a")], max_tokens=1)
        engine.finish()
    assert quick.events[-1].num_cached == plain.events[-1].num_cached > 24


def test_a_sequence_ends_inside_an_accepted_draft() -> None:
    for params in ({"max_tokens": 7}, {"stop_token_ids": list(range(8, 24)), "min_tokens": 3, "max_tokens": 40}):
        plain, quick = engines()
        for engine in (plain, quick):
            engine.add("a", LONG, logprobs=0, n=2, **params)
            engine.finish()
        for sample in (0, 1):
            assert quick.tokens("a", sample) == plain.tokens("a", sample)
        assert quick.reasons("a") == plain.reasons("a")
        ends = [[(e.index, e.stop_token, e.cumulative_logprob) for e in engine.events if e.finish_reason]
                for engine in (plain, quick)]  # fmt: skip
        assert sorted(ends[0], key=str) == sorted(ends[1], key=str)
        for event in quick.events:
            assert len(event.logprobs or ()) == len(event.tokens)


def test_drafts_take_no_blocks_that_prompts_have_reserved() -> None:
    """The blocks of a prompt are reserved when it is admitted: drafts take only blocks beyond these."""
    _, quick = engines(num_blocks=9, max_num_batched_tokens=8)
    quick.add("a", LONG, max_tokens=20)
    for _ in range(3):
        quick.step()
    quick.add("b", [30 + i for i in range(16)], max_tokens=2)
    tight = 0
    while quick.scheduler.has_work:
        kv_blocks = quick.scheduler.kv_blocks
        prefilling = [seq for seq in quick.scheduler.groups.running.items if len(seq.tokens) - seq.num_computed > 1]
        spare = kv_blocks.pool.num_available - sum(map(kv_blocks.num_reserved_blocks, prefilling))
        for run in quick.step().runs:
            for_drafts = len(run.new_blocks) - (run.start % 4 == 0)
            assert not run.drafts or for_drafts <= max(spare, 0)
        tight += bool(prefilling) and spare <= 0
    assert tight and len(quick.tokens("a")) == 20 and len(quick.tokens("b")) == 2


def test_drafts_leave_half_of_a_step_to_prompts() -> None:
    _, quick = engines(max_num_batched_tokens=10, max_num_seqs=4)
    quick.add("a", LONG, max_tokens=30)
    quick.step()
    quick.step()
    quick.add("b", [30 + i for i in range(40)], max_tokens=1)
    while not quick.reasons("b"):
        plan = quick.step()
        assert plan.num_drafts <= 4 and plan.num_tokens <= 10
        assert any(run.count - len(run.drafts) > 1 for run in plan.runs) or quick.reasons("b")


# -- trees of drafts --------------------------------------------------------------------------------------------------


def test_trees_give_the_same_tokens_in_fewer_steps() -> None:
    plain, quick = engines(accuracy=0.8, trees=True)
    for engine in (plain, quick):
        engine.add("a", LONG, max_tokens=40, n=2)
        engine.finish()
    assert [quick.tokens("a", sample) for sample in (0, 1)] == [plain.tokens("a", sample) for sample in (0, 1)]
    assert len(quick.plans) < 0.8 * len(plain.plans)
    runs = [run for plan in quick.plans for run in plan.runs if run.parents]
    assert len(runs) > 5 and all(len(run.parents) == len(run.drafts) for run in runs)


def test_a_tree_has_no_more_nodes_than_a_word_has_bits() -> None:
    _, quick = engines(max_num_batched_tokens=400)
    quick.add("a", LONG, max_tokens=100)
    quick.step()
    (seq,) = quick.scheduler.groups.running.items
    seq.drafts, seq.draft_parents, seq.acceptance.rate = [1] * 90, [-1] * 90, 1.0
    (run,) = quick.scheduler.schedule().runs
    assert len(run.drafts) == len(run.parents) == 63
