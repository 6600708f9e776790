"""Draft tokens: how many are verified, what the acceptance rate learns, and that rejected ones leave nothing behind."""

import random
from collections.abc import Callable
from itertools import islice, pairwise
from typing import Any

import pytest

from core.driven import LONG, Engine
from fakes import ASKED_METHOD, make_drafts_free
from quire.core.acceptance import AcceptanceRate, MethodAcceptance, expected_tokens
from quire.core.draft_budget import DraftBudget, chain_probabilities, host_share
from quire.core.draft_policy import (
    ANY_METHOD,
    CPU_TOKEN_COST,
    GPU_TOKEN_COST,
    IDLE_INTERVAL,
    DraftMethod,
    DraftPolicy,
)
from quire.core.draft_quotas import READ_ANYWAY
from quire.core.draft_tree import UNKNOWN_PARENT
from quire.core.limits import SchedulerLimits
from quire.core.params import SamplingParams
from quire.core.plan import UNKNOWN, Proposal, Run, SampledRow, StepOutput, StepPlan
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.step_cost import StepCostModel


def draft_budget(token_cost: float = CPU_TOKEN_COST, **options: Any) -> DraftBudget:
    """Where a step of one token takes 1, and every other adds `token_cost`."""
    made = DraftBudget(CPU_TOKEN_COST, **options)
    for _ in range(200):
        for num_tokens in (1, 3, 9):
            made.step_cost.record_step(num_tokens, 1.0 + token_cost * (num_tokens - 1))
    return made


def test_the_cost_model_is_the_curve_of_the_measured_steps() -> None:
    """Flat up to eight tokens, then steep, and on contexts that grow: the difference of two steps tells the cost."""
    step_cost = StepCostModel(CPU_TOKEN_COST)
    for number in range(300):
        growth = number / 300
        for num_tokens, seconds in ((1, 1.0), (4, 1.03), (8, 1.07), (16, 1.87), (6, 1.05)):
            step_cost.record_step(num_tokens, seconds + growth)
    assert step_cost.seconds(1) == pytest.approx(2.0, rel=0.05)
    assert step_cost.seconds(8) - step_cost.seconds(1) == pytest.approx(0.07, abs=0.03)
    assert step_cost.seconds(16) - step_cost.seconds(8) == pytest.approx(0.8, rel=0.1)
    added = list(islice(step_cost.added_seconds(6), 4))
    assert sum(added[:2]) < 0.04 < 0.15 < sum(added[2:])
    assert step_cost.min_slope(1, 4) < 0.03 and step_cost.min_slope(8, 12) > 0.08


def test_until_steps_differ_a_token_costs_the_prior() -> None:
    step_cost = StepCostModel(0.4)
    assert step_cost.seconds(3) / step_cost.seconds(1) == pytest.approx(1.8)
    for _ in range(50):
        step_cost.record_step(1, 0.02)
    assert step_cost.seconds(2) == pytest.approx(0.028)
    step_cost.record_step(1, 5.0)  # something else held it up
    assert step_cost.seconds(1) < 0.025


def test_one_delayed_step_does_not_make_tokens_dear() -> None:
    step_cost = StepCostModel(0.4)
    for seconds in (1.0, 1.4) * 3:
        step_cost.record_step(1 if seconds == 1.0 else 2, seconds)
    step_cost.record_step(1, 1.0)
    step_cost.record_step(2, 9.0)  # something else held it up
    step_cost.record_step(1, 1.0)
    assert step_cost.seconds(2) - step_cost.seconds(1) < 0.7
    for _ in range(2500):
        step_cost.record_step(1, 1.0)
    assert step_cost.seconds(2) - step_cost.seconds(1) < 0.4  # what seemed dear is tried again in time


def test_a_token_never_costs_less_than_nothing() -> None:
    step_cost = StepCostModel(0.4)
    for _ in range(100):
        step_cost.record_step(2, 9.0)
        step_cost.record_step(8, 1.0)
    assert step_cost.seconds(8) == step_cost.seconds(2)


def test_where_steps_are_padded_only_the_level_is_learnt() -> None:
    step_cost = StepCostModel(0.4, [(1, 1.0), (4, 1.5), (8, 2.0)])
    assert [step_cost.seconds(size) for size in (1, 2, 4, 5, 8, 16)] == [1.0, 1.5, 1.5, 2.0, 2.0, 4.0]
    assert list(islice(step_cost.added_seconds(3), 6)) == [0.0, 0.5, 0.0, 0.0, 0.0, 0.25]
    for _ in range(100):
        step_cost.record_step(4, 2.5)
    assert [step_cost.seconds(size) for size in (1, 8)] == pytest.approx([2.0, 3.0], rel=1e-3)


def test_few_sequences_tell_little_of_what_the_contexts_of_many_take() -> None:
    step_cost = StepCostModel(0.4, [(1, 4.0), (256, 7.0), (512, 12.0)])
    for _ in range(30):
        step_cost.record_step(256, 9.5, 256)
    for _ in range(30):
        step_cost.record_step(1, 4.1, 1)
    assert step_cost.seconds(1) == pytest.approx(4.1)
    step_cost.look_at(64)  # the nearest are 256
    assert step_cost.seconds(256) == pytest.approx(9.5)
    step_cost.record_step(64, 8.0, 64)
    assert step_cost.seconds(64) == pytest.approx(8.0)
    step_cost.look_at(300)  # as many as 256
    assert step_cost.seconds(256) == pytest.approx(9.5) and step_cost.seconds(512) == pytest.approx(14.5)


def test_drafts_fill_the_size_that_a_step_is_padded_to() -> None:
    budget = DraftBudget(GPU_TOKEN_COST, measured=[(4, 1.0), (8, 1.1), (16, 3.0)])
    offers = [chain(0.6, 3)] * 4
    assert budget.choose(offers, 4, 99) == [1] * 4
    assert budget.choose_asked(offers, 4, 99, [0.0] * 4) == [1] * 4
    assert budget.choose([chain(0.2, 3), *offers[1:]], 4, 99) == [0, 2, 1, 1], "the likeliest four"


def chain(rate: float, num_drafts: int) -> list[float]:
    """How likely each draft token and those before it are accepted, all at one rate."""
    return chain_probabilities([rate] * num_drafts)


def test_likely_drafts_and_cheap_tokens_raise_the_number_of_drafts() -> None:
    def alone(rate: float, token_cost: float) -> int:
        return draft_budget(token_cost).choose([chain(rate, 5)], 1, max_drafts=99)[0]

    counts = [alone(rate, 0.4) for rate in (0.2, 0.5, 0.8, 0.9, 0.99)]
    assert counts[0] == 0 and counts[-1] == 5 and all(a <= b for a, b in pairwise(counts))
    counts = [alone(0.6, token_cost) for token_cost in (0.9, 0.4, 0.1, 0.01)]
    assert counts[0] == 0 and counts[-1] == 5 and all(a <= b for a, b in pairwise(counts))


def test_drafts_that_take_time_to_propose_have_to_gain_more() -> None:
    budget = draft_budget(0.05)
    counts = [budget.choose_asked([chain(0.8, 5)], 1, 99, [seconds])[0] for seconds in (0.0, 0.1, 0.3, 0.8)]
    assert counts[0] == 5 and counts[-1] == 0 and all(a >= b for a, b in pairwise(counts))
    assert counts[:1] == budget.choose([chain(0.8, 5)], 1, 99)


def test_a_draft_step_is_worth_it_for_many_sequences_and_not_for_one() -> None:
    """It takes as long for eight as for one: so all get a second draft token, or none."""
    budget, seconds = draft_budget(0.01), [0.5] * 8
    assert budget.choose_asked([chain(0.4, 3)], 1, 99, seconds[:1]) == [0]
    assert set(budget.choose_asked([chain(0.8, 3)] * 8, 8, 99, seconds)) == {1}
    assert budget.choose_asked([chain(0.9, 3)] * 8, 8, 7, seconds) == [1] * 7 + [0]  # no more than there is room for


def test_a_device_that_waits_for_the_host_waits_once_for_any_number_of_drafts() -> None:
    """What one draft does not gain, two may."""
    offers, seconds = [[1.0, 0.9]] * 256, [0.0001] * 256
    tokens = [(size, 1.0 + 0.00295 * (size - 256)) for size in (256, 512, 768)]
    at_once, ahead = (DraftBudget(0.01, depth, tokens) for depth in (0, 1))
    assert set(at_once.choose_asked(offers, 256, 999, seconds)) == {1}
    assert set(ahead.choose_asked(offers, 256, 999, seconds)) == {2}
    for num_drafts in (1, 2):
        accepted = float(num_drafts)
        saved = [each.saved_seconds(accepted, num_drafts, 256, 0.0) for each in (at_once, ahead)]
        assert saved[0] - saved[1] == pytest.approx(host_share(256) / 256 / (1 + accepted))


def test_a_dear_first_token_does_not_hide_cheap_ones_behind_it() -> None:
    """A second token may cost much (another kernel), and three more nothing."""
    step_cost = (budget := DraftBudget(CPU_TOKEN_COST)).step_cost
    for _ in range(100):
        for num_tokens, seconds in ((1, 1.0), (2, 2.0), (4, 2.0), (8, 2.0)):
            step_cost.record_step(num_tokens, seconds)
    one, five = chain(0.95, 1), chain(0.95, 5)
    assert budget.choose([one], 1, 99) == [0] and budget.choose([five], 1, 99) == [5]


def test_in_a_batch_only_likely_drafts_are_verified() -> None:
    """Eight tokens take 3.8 times what one takes: one more has to be worth a ninth of that."""
    offers = [chain(0.7, 5)] * 7 + [chain(0.97, 5)]
    counts = draft_budget(0.4).choose(offers, 8, max_drafts=99)
    assert counts[:7] == [0] * 7 and counts[7] > 0
    assert sum(draft_budget(0.01).choose(offers, 8, max_drafts=6)) == 6  # no more than there is room for


def test_drafts_that_did_not_run_update_the_acceptance_rate() -> None:
    method = MethodAcceptance(0.5)
    known = AcceptanceRate(method)
    assert known.rate == 0.5
    known.update([4, 5], [4])
    assert known.rate > 0.5
    for _ in range(20):
        known.update([4, 5], [9])
    assert known.rate < 0.15
    assert 0.1 < AcceptanceRate(method).rate < 0.45  # the next sequence starts with what the method has shown
    for _ in range(20):
        known.update([4, 5, 6], [4, 5, 6, 7])
    assert known.rate > 0.9


def test_every_position_of_a_chain_has_a_rate_of_its_own() -> None:
    method = MethodAcceptance(0.6)
    good, bad = AcceptanceRate(method), AcceptanceRate(method)
    for _ in range(60):
        good.update([1, 2, 3], [1, 2, 9])
    first, second, third = good.position_rates(3)
    assert first > 0.95 and second > 0.95 and third < 0.1
    assert AcceptanceRate(method).position_rates(3) == pytest.approx(method.position_rates), "where it starts"
    assert good.accepted_tokens(2) > 1.8 and good.accepted_tokens(3) < good.accepted_tokens(2) + 0.1
    for _ in range(8):
        bad.update([1, 2], [9])
    assert bad.position_rates(1)[0] < 0.6 < good.position_rates(1)[0]
    for _ in range(30_000):
        good.update([1, 2], [1, 2, 3])
    assert good.position_rates(3)[2] > 0.5, "what was not tried for long is forgotten"


def test_a_sequence_waits_for_its_token_if_drafts_gain_more_than_the_steps_it_misses() -> None:
    ahead = draft_budget(0.01, ahead=1)
    assert ahead.should_wait(1.3) and not ahead.should_wait(0.9) and not draft_budget().should_wait(0.0)


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
            for rate in seq.rates.values():
                rate.update([1] * 30, [1] * 30)  # whatever was rejected
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


def test_drafts_have_room_of_their_own_while_no_prompt_comes() -> None:
    _, quick = engines(max_num_batched_tokens=20, max_draft_tokens=20, max_num_seqs=4)
    for name in ("a", "b", "c", "d"):
        quick.add(name, LONG, max_tokens=100)
    plans = [quick.step() for _ in range(10)]
    assert 20 < max(plan.num_tokens for plan in plans) <= 40
    quick.add("e", [30 + i for i in range(40)], max_tokens=1)  # no row is free for it
    assert any(quick.step().num_tokens > 20 for _ in range(3))
    while not quick.reasons("e"):
        plan = quick.step()
        if any(run.count - len(run.drafts) > 1 for run in plan.runs):
            assert plan.num_tokens <= 20 and plan.num_drafts <= 10


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


def test_trees_that_only_the_device_knows_are_verified_and_teach() -> None:
    """As many nodes of them as were worth it of those before; the rate and the confidences are learnt as of others."""
    plain, quick = engines(accuracy=0.8, trees=True, unknown_trees=True)
    for engine in (plain, quick):
        engine.add("a", LONG, max_tokens=60, n=2)
        engine.finish()
    assert [quick.tokens("a", sample) for sample in (0, 1)] == [plain.tokens("a", sample) for sample in (0, 1)]
    assert len(quick.plans) < 0.8 * len(plain.plans)
    runs = [run for plan in quick.plans for run in plan.runs if run.parents]
    assert len(runs) > 5 and not any(UNKNOWN in run.drafts or UNKNOWN_PARENT in run.parents for run in runs)
    speculation = quick.scheduler.speculation
    assert speculation is not None
    method = speculation._methods[ANY_METHOD]
    assert method.num_trials > 10 and method._calibration and 0 < method._tree[-1] < method._tree[0] < 1


def test_an_unknown_tree_is_as_likely_as_those_before() -> None:
    method = MethodAcceptance(0.5, tree_nodes=8)
    rate = AcceptanceRate(method)
    assert rate.probabilities_of_unknown(3) == [1.0, 1.0, 1.0]
    rate.update_tree([1, 2, 3], [-1, -1, 0], [0.2, 0.7, 0.5], [4])
    first = rate.probabilities_of_unknown(3)
    assert first == pytest.approx([0.7, 0.2, 0.1])
    for _ in range(60):
        rate.update_tree([1, 2, 3], [-1, -1, 0], [0.2, 0.7, 0.5], [4])
    later = rate.probabilities_of_unknown(5)
    assert later == sorted(later, reverse=True) and later[0] < 0.4 and later[3:] == later[2:3] * 2


def test_of_an_unknown_tree_that_may_be_too_deep_fewer_nodes_are_verified() -> None:
    _, quick = engines()
    quick.add("a", LONG, max_tokens=40)
    quick.step()
    (seq,) = quick.scheduler.groups.running.items
    assert quick.scheduler.speculation is not None
    for left, most in ((6, 12), (4, 3)):
        seq.group.length = seq.num_known + left
        seq.proposals = [Proposal(ANY_METHOD, [UNKNOWN] * 12, [UNKNOWN_PARENT] * 12)]
        tree, probabilities = quick.scheduler.speculation._offer(seq, seq.proposals[0])
        assert len(tree.tokens) == len(tree.parents) == len(probabilities) == most


def test_a_tree_has_no_more_nodes_than_a_word_has_bits() -> None:
    _, quick = engines(max_num_batched_tokens=400)
    quick.add("a", LONG, max_tokens=100)
    quick.step()
    (seq,) = quick.scheduler.groups.running.items
    seq.proposals = [Proposal(ANY_METHOD, [1] * 90, [-1] * 90, [0.5] * 90)]
    (run,) = quick.scheduler.schedule().runs
    assert len(run.drafts) == len(run.parents) == 63


def test_of_a_tree_the_likeliest_nodes_are_verified_whatever_their_order() -> None:
    _, quick = engines()
    quick.add("a", LONG, max_tokens=40)
    quick.step()
    (seq,) = quick.scheduler.groups.running.items
    # 5 -> 7 | 8, 6 -> 9: only the path of 6 and 9 is likely
    seq.proposals = [Proposal(ANY_METHOD, [5, 7, 8, 6, 9], [-1, 0, 0, -1, 3], [0.06, 0.1, 0.05, 0.8, 0.7])]
    (run,) = quick.scheduler.schedule().runs
    assert run.drafts == [6, 9, 5] and run.parents == [-1, 0, -1]


def test_confidences_are_measured() -> None:
    """A head that is too sure of itself, and one that is not sure enough; then a sequence that differs."""
    method = MethodAcceptance(0.5)
    for number in range(300):
        AcceptanceRate(method).update_tree([1, 2], [-1, -1], [0.9, 0.05], [1 if number % 2 else 2])
    first, second = AcceptanceRate(method).probabilities([-1, -1], [0.9, 0.05])
    assert first == pytest.approx(0.5, abs=0.06) and second == pytest.approx(0.5, abs=0.06)
    assert AcceptanceRate(method).rate == pytest.approx(0.5, abs=0.06)
    failing = AcceptanceRate(method)
    for _ in range(12):
        failing.update_tree([1, 2], [-1, -1], [0.9, 0.05], [3])
    assert failing.probabilities([-1], [0.9])[0] < 0.25
    below = AcceptanceRate(method).probabilities([-1, 0, 1], [0.9, 0.9, 0.9])
    assert below == sorted(below, reverse=True) and below[2] < below[0]


def test_siblings_raise_the_rate_of_a_level() -> None:
    method = MethodAcceptance(0.5, tree_nodes=8)
    known = AcceptanceRate(method)
    for number in range(400):
        token = number % 4  # the likeliest child, then another, then none
        known.update_tree([0, 1, 2], [-1, -1, -1], [0.25] * 3, [token])
        method.add_tree([0, 1, 2], [-1, -1, -1], [token])
    assert known.rate == pytest.approx(0.25, abs=0.12) and method.mean_nodes == pytest.approx(3, abs=0.1)
    assert method.rescue_rate == pytest.approx(2 / 3, abs=0.05) and known.level_rate > 0.6


def asked_for(curve: Callable[[int], float], rate: float, rescue_rate: float, num_sequences: int) -> list[int]:
    """The quotas of a head with trees of 16 nodes, once costs and rates are measured."""
    policy = DraftPolicy((DraftMethod(ASKED_METHOD, 3, cost=0.05, tree_nodes=16, tree_steps=(1, 4, 8)),))
    engine = Engine(256, policy_of_drafts=policy, max_num_batched_tokens=512, max_num_seqs=64)
    speculation = engine.scheduler.speculation
    assert speculation is not None
    quotas, chance = speculation._quotas[0], random.Random(3)
    for _ in range(400):
        num_tokens = chance.choice([1, 2, 4, 8, 16, 32, 64, 128])
        speculation.budget.step_cost.record_step(num_tokens, curve(num_tokens))
        quotas._draft_cost.record_step(num_tokens, 0.05 * curve(num_tokens))
        token = 1 if chance.random() < rate else 2 if chance.random() < rescue_rate else 3
        AcceptanceRate(quotas._acceptance).update([1], [token])
        quotas._acceptance.add_tree([1, *[2] * 15], [-1] * 16, [token])
    for number in range(num_sequences):
        engine.add(str(number), [7, number], max_tokens=90)
    return [run.quotas.get(ASKED_METHOD, 0) for run in engine.scheduler.schedule().runs]


def test_a_tree_is_asked_for_where_it_pays_and_a_chain_elsewhere() -> None:
    gpu, cpu = CURVES["a GPU"], CURVES["a CPU"]
    assert asked_for(gpu, 0.6, 0.6, 1) == [16]
    assert asked_for(gpu, 0.6, 0.02, 1) == [3]  # siblings are seldom right
    assert asked_for(cpu, 0.7, 0.6, 1) in ([1], [2])  # every node costs a third of a step
    assert asked_for(cpu, 0.2, 0.6, 1) == [0]
    many = asked_for(gpu, 0.8, 0.6, 32)
    assert max(many) <= 3 and sum(many) > 0  # 32 trees are 544 tokens


# -- methods that take time -------------------------------------------------------------------------------------------

SECONDS = 0.01  # of a step of one token


def asked(
    method: DraftMethod, *, seconds_per_draft: float, num_requests: int = 1, **options: Any
) -> tuple[Engine, int, float]:
    """Sequences of 90 tokens, one after the other, with one method that is not free. -> the engine, the draft tokens
    that were proposed, and the share of the time that they took"""
    engine = Engine(num_drafts=5, policy_of_drafts=DraftPolicy((method,)), **options)
    scheduler = engine.scheduler
    num_proposed, spent, total, left = 0, 0.0, 0.0, num_requests
    while scheduler.has_work or left:
        if not scheduler.has_work:
            engine.add(str(left), [7, left], max_tokens=90)
            left -= 1
        plan = scheduler.schedule()
        output = engine.executor.run(plan)
        for row in output.sampled:
            row.proposals = [one for one in row.proposals if one.method == method.name]
            for one in row.proposals:
                num_proposed += len(one.tokens)
                output.draft_steps[method.name] = [(1, seconds_per_draft)] * len(one.tokens)
        output.draft_seconds = sum(seconds for _, seconds in output.draft_steps.get(method.name, []))
        engine.events += scheduler.update(output)
        seconds = SECONDS * (1 + 0.4 * (plan.num_tokens - 1)) + output.draft_seconds
        scheduler.record_step(plan, seconds)
        spent, total = spent + output.draft_seconds, total + seconds
    return engine, num_proposed, spent / total


def test_a_method_that_pays_is_asked_and_one_that_does_not_is_tried_now_and_then() -> None:
    cheap = DraftMethod(ASKED_METHOD, 5, acceptance=0.7, cost=0.05)
    engine, num_proposed, _ = asked(cheap, seconds_per_draft=0.05 * SECONDS)
    assert engine.scheduler.stats().accepted_tokens > 50 and num_proposed > 60
    dear = DraftMethod(ASKED_METHOD, 5, acceptance=0.7, cost=0.9)
    engine, num_proposed, share = asked(dear, seconds_per_draft=0.9 * SECONDS, num_requests=12)
    assert 0 < num_proposed < 20 and share <= 0.01


def test_a_method_that_seemed_dear_is_found_to_be_cheap() -> None:
    """Its cost is measured on what the allowance pays for; then it is used."""
    method = DraftMethod(ASKED_METHOD, 5, acceptance=0.7, cost=0.6)
    engine, num_proposed, _ = asked(method, seconds_per_draft=0.02 * SECONDS, num_requests=8)
    assert num_proposed > 20 and engine.scheduler.stats().accepted_tokens > 10


def test_a_method_whose_drafts_fail_takes_a_hundredth_of_the_time() -> None:
    method = DraftMethod(ASKED_METHOD, 5, acceptance=0.7, cost=0.05)
    engine, num_proposed, share = asked(method, seconds_per_draft=0.2 * SECONDS, num_requests=20, accuracy=0.0)
    assert 0 < num_proposed < 200 and share < 0.02  # the first few are drafted on the prior
    assert engine.scheduler.stats().draft_tokens < 20


def test_a_method_that_does_not_answer_is_asked_less_and_less() -> None:
    """Every step that asks waits for its token: with async scheduling, none could be planned ahead."""
    policy = DraftPolicy((DraftMethod(ASKED_METHOD, 3, acceptance=0.8, cost=0.05),))
    engine = Engine(num_drafts=3, policy_of_drafts=policy)
    engine.add("mute", [7, 1], max_tokens=90)
    asked_steps, scheduler = [], engine.scheduler
    while scheduler.has_work:
        plan = scheduler.schedule()
        asked_steps += [plan.step] if plan.runs and plan.runs[0].quotas else []
        output = engine.executor.run(plan)
        for row in output.sampled:
            row.proposals = []
        scheduler.update(output)
        scheduler.record_step(plan, SECONDS)
    assert asked_steps[:2] == [0, 2] and 3 < len(asked_steps) < 9
    assert all(later >= 2 * sooner for sooner, later in pairwise(asked_steps[1:]))


def test_a_step_in_which_drafts_were_compiled_teaches_nothing() -> None:
    engine = Engine(policy_of_drafts=DraftPolicy((DraftMethod(ASKED_METHOD, 3, cost=0.05),)))
    speculation = engine.scheduler.speculation
    assert speculation is not None
    cost = speculation.budget.step_cost
    for num_tokens, seconds, is_timed in ((1, 0.01, True), (4, 0.5, False), (4, 0.0001, False), (1, 0.01, True)):
        plan = StepPlan(0, [Run(0, 0, num_tokens)])
        drafted = {ASKED_METHOD: [(1, seconds)]}
        speculation.record_drafting(StepOutput(0, [], is_timed=is_timed, draft_steps=drafted))
        speculation.record_step(plan, seconds, gap=0.0, has_prompts=False)
    assert cost.seconds(1) == pytest.approx(0.01) and cost.seconds(4) < 0.03
    assert speculation._quotas[0]._draft_cost.seconds(1) == pytest.approx(0.01)


def test_what_a_device_waits_for_the_host_is_measured() -> None:
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, block_size=4, max_model_len=64, max_queued=9)
    policy = DraftPolicy((DraftMethod(ASKED_METHOD, 3, cost=0.05),))
    speculation = Scheduler(limits, 40, ahead=1, drafts=policy).speculation
    assert speculation is not None
    budget = speculation.budget
    plan = StepPlan(0, [Run(0, 0, 1), Run(1, 0, 1), Run(2, 0, 1)])
    speculation.record_drafting(StepOutput(0, [], device_seconds=0.01))
    speculation.record_step(plan, 0.012, gap=0.0, has_prompts=False)  # planned ahead: the device did not wait
    assert budget.step_cost.seconds(3) == pytest.approx(0.01)
    assert budget._wait(3) == pytest.approx(host_share(3) * 0.01, rel=0.05)
    for _ in range(60):
        speculation.record_drafting(StepOutput(0, [], draft_seconds=0.003, device_seconds=0.01))
        speculation.record_step(plan, 0.012, gap=0.005, has_prompts=False)
    assert budget._wait(3) == pytest.approx(0.004, rel=0.01)
    assert budget._wait(64) == pytest.approx(host_share(64) * budget.step_cost.seconds(64))  # not measured
    speculation.record_step(plan, 9.0, gap=0.005, has_prompts=False)  # something else held the host up
    assert budget._wait(3) < 0.02


def test_drafts_beside_prompts_gain_what_the_larger_steps_to_come_would_not() -> None:
    """With async scheduling a sequence misses a step for its drafts if it does not wait for them."""
    sizes = [(size, 0.004 + 2e-5 * size) for size in range(8, 512, 8)]
    at_once, ahead = (DraftBudget(0.01, depth, sizes) for depth in (0, 1))
    offers, seconds = [[0.95, 0.9]] * 16, [1e-5] * 16
    assert set(at_once.choose_asked(offers, 16, 99, seconds, num_coming=240)) == {2}, "nobody misses a step"
    assert set(ahead.choose_asked(offers, 16, 99, seconds, num_coming=1)) == {2}
    assert set(ahead.choose_asked(offers, 16, 99, seconds, num_coming=240)) == {0}
    assert set(ahead.choose_asked([[0.9, 0.1]] * 16, 16, 99, seconds, num_coming=1)) == {0}, "less than the missed one"


def test_another_sequence_is_tried_each_time_where_it_misses_a_step() -> None:
    for ahead in (0, 1):
        limits = SchedulerLimits(
            max_num_seqs=4, max_num_batched_tokens=64, block_size=4, max_model_len=256, max_queued=9
        )
        policy = DraftPolicy((DraftMethod(ASKED_METHOD, 3, acceptance=0.01, cost=0.05),), GPU_TOKEN_COST)
        scheduler = Scheduler(limits, 200, ahead=ahead, drafts=policy)
        for name in "abc":
            params = SamplingParams(max_tokens=200, seed=0)
            scheduler.add(Request(id=name, prompt_ids=[5, 6, 7], params=params, eos_ids=[]), 0.0)
        asked = []
        for _ in range(150):
            plan = scheduler.schedule()
            asked += [run.row for run in plan.runs if run.quotas]
            drafted = {run.row: [Proposal(ASKED_METHOD, [1])] for run in plan.runs if run.quotas}
            sampled = [SampledRow(run.row, [9], proposals=drafted.get(run.row, [])) for run in plan.runs]
            scheduler.update(StepOutput(plan.step, sampled))
            scheduler.record_step(plan, 1.0)
        assert len(asked) > 5 and (max(map(asked.count, asked)) < 0.5 * len(asked)) == (ahead == 1), asked


def test_where_no_drafts_pay_they_are_looked_for_less_often() -> None:
    """To ask takes the host time. Where there are none, a free method is asked all the same; so it is when drafts pay
    again."""
    policy = DraftPolicy((DraftMethod(ASKED_METHOD, 3, acceptance=0.01, cost=0.5), DraftMethod("free", 3)))
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, block_size=4, max_model_len=512, max_queued=9)
    scheduler = Scheduler(limits, 200, drafts=policy)
    params = SamplingParams(max_tokens=400, seed=0)
    scheduler.add(Request(id="a", prompt_ids=[5, 6, 7], params=params, eos_ids=[]), 0.0)
    asks_free: list[bool] = []
    for number in range(190):
        plan = scheduler.schedule()
        (run,) = plan.runs
        asks_free.append(run.asks_free)
        drafts = [] if number < 40 or not run.asks_free else [1, 1] if number < 120 else [9, 9]
        proposals = [Proposal("free", drafts)] if drafts else []
        tokens = [9] * (1 + len(run.drafts) if number > 120 else 1)
        scheduler.update(StepOutput(plan.step, [SampledRow(run.row, tokens, proposals=proposals)]))
        scheduler.record_step(plan, 1.0)
    assert all(asks_free[:40]), "there was nothing that could not pay"
    assert sum(asks_free[80:120]) == 40 // IDLE_INTERVAL, asks_free
    assert all(asks_free[-20:]), asks_free


def test_a_head_reads_few_sequences_where_its_drafts_never_pay() -> None:
    method = DraftMethod(ASKED_METHOD, 3, acceptance=0.01, cost=0.5, reads_along=True)
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, block_size=4, max_model_len=256, max_queued=99)
    scheduler = Scheduler(limits, 200, drafts=DraftPolicy((method,)))
    read: list[bool] = []
    for number in range(200):
        params = SamplingParams(max_tokens=8, seed=0)
        scheduler.add(Request(id=str(number), prompt_ids=[5, 6, 7], params=params, eos_ids=[]), 0.0)
        while scheduler.has_work:
            plan = scheduler.schedule()
            read += [admission.reads_along for admission in plan.admitted]
            unread = {admission.row for admission in plan.admitted if not admission.reads_along}
            assert not any(run.quotas for run in plan.runs if run.row in unread)
            scheduler.update(StepOutput(plan.step, [SampledRow(run.row, [9]) for run in plan.runs]))
            scheduler.record_step(plan, 1.0)
    assert all(read[:20]), "nothing is known yet"
    assert sum(read[100:196]) == 96 // READ_ANYWAY, read


def test_a_fixed_length_is_used_whatever_it_costs() -> None:
    engine = Engine(num_drafts=5, policy_of_drafts=DraftPolicy(per_batch_size=((1, 1, 2), (2, 8, 0))), accuracy=0.0)
    engine.add("a", LONG, max_tokens=40)
    engine.step()
    for _ in range(20):
        seq = engine.scheduler.groups.running.items[0]
        offered = max((len(one.tokens) for one in seq.proposals), default=0)
        assert engine.step().num_drafts == min(offered, 2)
    engine.add("b", LONG[1:], max_tokens=40)
    engine.step()
    for _ in range(10):
        assert engine.step().num_drafts == 0


def test_of_several_proposals_the_likeliest_is_verified() -> None:
    engine = Engine(num_drafts=5)
    make_drafts_free(speculation := engine.scheduler.speculation)
    assert speculation is not None
    engine.add("a", LONG, max_tokens=40)
    engine.step()
    [seq] = engine.scheduler.groups.running.items
    seq.proposals = [Proposal(ANY_METHOD, [1, 2, 3, 4]), Proposal(ASKED_METHOD, [5, 6, 7])]
    for _ in range(12):
        speculation._rate(seq, ANY_METHOD).update([0], [1])
        speculation._rate(seq, ASKED_METHOD).update([1], [1])
    [run] = engine.step().runs
    assert run.drafts == [5, 6, 7]


def test_expected_tokens_by_hand() -> None:
    assert expected_tokens(0.5, 2) == pytest.approx(1.75) and expected_tokens(1.0, 3) == 4


def test_an_answer_tells_what_was_verified() -> None:
    _, quick = engines(accuracy=0.7)
    quick.add("a", LONG, max_tokens=40)
    quick.add("b", LONG, max_tokens=40, n=1, best_of=3)
    quick.finish()
    stats = quick.scheduler.stats()
    verified = [pair for event in quick.events for pair in event.verified]
    assert len(verified) == stats.drafts and sum(tokens for tokens, _ in verified) == stats.draft_tokens
    assert sum(accepted for _, accepted in verified) == stats.accepted_tokens


# -- on a virtual clock -----------------------------------------------------------------------------------------------

CURVES: dict[str, Callable[[int], float]] = {
    "a CPU": lambda num_tokens: 1.0 + 0.36 * (num_tokens - 1),
    "a GPU": lambda num_tokens: 1.0 + 0.002 * num_tokens + 0.02 * max(num_tokens - 16, 0),
    "a kernel for one token": lambda num_tokens: 1.0 if num_tokens == 1 else 1.5 + 0.3 * num_tokens,
}


def seconds_of(curve: str, num_sequences: int, accuracy: float, policy: DraftPolicy | None, draft: float) -> float:
    """What 16 requests take; the times of steps vary by a tenth."""
    engine = Engine(
        256, num_drafts=5 if policy else 0, accuracy=accuracy, policy_of_drafts=policy, max_num_seqs=num_sequences
    )
    chance, total = random.Random(5), 0.0
    names = {method.name for method in policy.methods} if policy else set()
    for number in range(16):
        engine.add(str(number), [7, number], max_tokens=50 + number)
    while engine.scheduler.has_work:
        plan = engine.scheduler.schedule()
        output = engine.executor.run(plan)
        for row in output.sampled:
            row.proposals = [proposal for proposal in row.proposals if proposal.method in names]
        longest = max((run.quotas.get(ASKED_METHOD, 0) for run in plan.runs), default=0)
        num_asked = sum(ASKED_METHOD in run.quotas for run in plan.runs)
        if longest:
            step = draft * CURVES[curve](num_asked)
            output.draft_steps = {ASKED_METHOD: [(num_asked, step)] * longest}
            output.draft_seconds = longest * step
        engine.scheduler.update(output)
        seconds = CURVES[curve](plan.num_tokens) * chance.uniform(0.95, 1.05) + output.draft_seconds
        engine.scheduler.record_step(plan, seconds)
        total += seconds
    return total


@pytest.mark.parametrize("num_sequences", [1, 8])
@pytest.mark.parametrize("curve", CURVES)
def test_drafts_cost_at_most_two_percent_and_gain_where_they_can(curve: str, num_sequences: int) -> None:
    """Of every accuracy, by a method that is free, by one that takes time, and by both."""
    without = seconds_of(curve, num_sequences, 0.0, None, 0.0)
    free, dear = DraftMethod(max_tokens=5), DraftMethod(ASKED_METHOD, 5, acceptance=0.7, cost=0.3)
    for methods in ((free,), (dear,), (free, dear)):
        for accuracy in (0.0, 0.3, 0.95):
            policy = DraftPolicy(methods, GPU_TOKEN_COST if curve == "a GPU" else CPU_TOKEN_COST)
            taken = seconds_of(curve, num_sequences, accuracy, policy, draft=0.3)
            assert taken < 1.02 * without, f"{[one.name for one in methods]} at {accuracy}: {taken / without:.3f}"
            if accuracy == 0.95 and (methods == (free,) or curve == "a GPU"):
                assert taken < (0.8 if num_sequences == 1 else 0.995) * without


def test_sequences_whose_drafts_came_apart_are_verified_together() -> None:
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, block_size=4, max_model_len=64, max_queued=9)
    asked_for_three = DraftPolicy((DraftMethod(cost=0.1),), GPU_TOKEN_COST, per_batch_size=((1, 4, 3),))
    scheduler = Scheduler(limits, 40, ahead=1, drafts=asked_for_three)
    make_drafts_free(scheduler.speculation)

    def request(name: str) -> Request:
        return Request(id=name, prompt_ids=[5, 6, 7], params=SamplingParams(max_tokens=40, seed=0), eos_ids=[])

    def update(plan: StepPlan) -> None:
        """One token each, and drafts behind it that will be wrong."""
        sampled = [SampledRow(run.row, [9], proposals=[Proposal(ANY_METHOD, [1, 2, 3])]) for run in plan.runs]
        scheduler.update(StepOutput(plan.step, sampled))

    def rows(plan: StepPlan) -> list[int]:
        return [run.row for run in plan.runs if run.drafts]

    scheduler.add(request("first"), 0.0)
    update(scheduler.schedule())
    alone = scheduler.schedule()
    scheduler.add(request("second"), 0.0)
    assert rows(alone) == [0] and not scheduler.awaits_output
    prompt = scheduler.schedule()
    assert scheduler.awaits_output, "all are in flight"
    update(alone)
    assert scheduler.awaits_output, "drafts of the second come with its first token"
    update(prompt)
    assert not scheduler.awaits_output
    assert rows(scheduler.schedule()) == [0, 1]


def beside_one_without_drafts(token_seconds: float = 0.0) -> Scheduler:
    """A plan in flight verifies drafts of `long`. `short` is in it without any: near its end a sequence gets none."""
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, block_size=4, max_model_len=64, max_queued=9)
    sizes = tuple((size, 1.0 + token_seconds * (size - 1)) for size in (1, 2, 4, 5, 8))
    policy = DraftPolicy((DraftMethod(cost=0.1),), GPU_TOKEN_COST, ((1, 4, 3),), step_seconds=sizes)
    scheduler = Scheduler(limits, 40, ahead=1, drafts=policy)
    make_drafts_free(scheduler.speculation)
    for name, max_tokens in (("long", 40), ("short", 3)):
        params = SamplingParams(max_tokens=max_tokens, seed=0)
        scheduler.add(Request(id=name, prompt_ids=[5, 6, 7], params=params, eos_ids=[]), 0.0)
    prompts = scheduler.schedule()
    proposals = {0: [Proposal(ANY_METHOD, [1, 2, 3])]}
    sampled = [SampledRow(run.row, [9], proposals=proposals.get(run.row, [])) for run in prompts.runs]
    scheduler.update(StepOutput(prompts.step, sampled))
    plan = scheduler.schedule()
    assert [len(run.drafts) for run in plan.runs] == [3, 0]
    return scheduler


@pytest.mark.parametrize("token_seconds", [0.0, 1.0])
def test_a_sequence_without_drafts_waits_for_the_others_where_one_step_takes_less_than_two(
    token_seconds: float,
) -> None:
    assert beside_one_without_drafts(token_seconds).awaits_output == (token_seconds == 0.0)


def test_nobody_waits_for_drafts_of_a_sequence_that_was_cancelled_meanwhile() -> None:
    scheduler = beside_one_without_drafts()
    scheduler.cancel("long")
    assert not scheduler.awaits_output
    assert [run.row for run in scheduler.schedule().runs] == [1]
    scheduler.check()


def test_unknown_drafts_teach_how_many_were_accepted() -> None:
    known, unknown = (AcceptanceRate(MethodAcceptance(0.5, 0)) for _ in range(2))
    for drafts, tokens in (([1, 2, 3], [1, 2, 3, 4]), ([1, 2, 3], [1, 5]), ([1, 2, 3], [6])):
        known.update(drafts, tokens)
        unknown.update([UNKNOWN] * len(drafts), tokens)
        assert unknown.rate == known.rate
