"""Prompts that other engines compute: same tokens, no block stranded, nothing half written is read."""

import random
from dataclasses import replace

import pytest

from core.driven import Engine
from core.test_random_workloads import crowd, verify
from fake_peers import FakeDecodeEngines, FakePrefillEngines
from fake_tiers import FakeStore
from quire.core import remote_prefills
from quire.core.params import SamplingParams
from quire.core.request import Request
from trials import rounds

PROMPT = [3 + i % 9 for i in range(27)]  # six full blocks of 4, and three tokens


@pytest.fixture(autouse=True)
def short_prompts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_prefills, "MIN_TOKENS", 4)


def alone(prompt: list[int] = PROMPT, **params: object) -> list[int]:
    engine = Engine(64)
    engine.add("alone", prompt, **params)
    return engine.finish().tokens("alone")


def test_a_prompt_of_another_engine_leaves_one_token_to_compute() -> None:
    engine = Engine(64, num_host_blocks=16, prefill_engines=FakePrefillEngines())
    engine.add("a", PROMPT)
    engine.finish()
    assert engine.tokens("a") == alone()
    runs = [run for plan in engine.plans for run in plan.runs]
    assert (runs[0].start, runs[0].count) == (26, 1)
    assert sum(len(plan.swap_in) for plan in engine.plans) == 7
    stats = engine.scheduler.stats()
    assert stats.transfers is not None
    assert (stats.transfers.prefills, stats.transfers.tokens, stats.transfers.failed) == (1, 26, 0)
    assert stats.prefix_hits == 0, "what another engine computes is no hit"
    assert engine.scheduler.kv_blocks.host.num_held == 0


def test_a_prompt_that_ends_with_a_full_block_leaves_one_token_to_compute() -> None:
    for length in range(24, 29):
        engine = Engine(64, num_host_blocks=16, prefill_engines=FakePrefillEngines())
        engine.add("other", [1, 2], max_tokens=30)
        engine.step()
        engine.add("a", (PROMPT * 2)[:length])
        engine.finish()
        assert engine.tokens("a") == alone((PROMPT * 2)[:length])
        assert max(run.count for plan in engine.plans[1:] for run in plan.runs) == 1


def test_blocks_go_to_the_pool_a_few_a_step_while_others_run() -> None:
    engine = Engine(64, num_host_blocks=16, prefill_engines=FakePrefillEngines(max_blocks=7))
    engine.add("runs", [5, 6, 7], max_tokens=40)
    engine.step()
    engine.add("a", PROMPT)
    engine.finish()
    assert engine.tokens("a") == alone()
    swaps = [len(plan.swap_in) for plan in engine.plans]
    assert max(swaps) == 2 and sum(swaps) == 7
    engine.add("again", PROMPT)
    engine.finish()
    assert engine.tokens("again") == alone()
    assert engine.prefill_engines is not None and engine.prefill_engines.num_asked == 1, "it is in the pool"


def test_only_what_the_pool_lacks_is_asked_for() -> None:
    peers = FakePrefillEngines()
    engine = Engine(64, num_host_blocks=16, prefill_engines=peers)
    engine.add("a", PROMPT[:8])
    engine.finish()
    engine.add("b", PROMPT)
    engine.finish()
    assert engine.tokens("b") == alone()
    assert [(p.first, len(p.host_blocks)) for plan in engine.plans for p in plan.prefills] == [(0, 2), (2, 5)]
    engine.add("c", [*PROMPT, 50, 51, 52, 53, 54])
    engine.finish()
    assert peers.num_asked == 2, "nearly all of it is here"


def test_samples_and_beams_share_a_prompt_that_was_computed_elsewhere() -> None:
    for shape in ({"n": 3}, {"n": 1, "best_of": 3}, {"beam_width": 3, "n": 2}):
        peers = FakePrefillEngines()
        engine, local = Engine(64, num_host_blocks=16, prefill_engines=peers), Engine(64)
        for each in (engine, local):
            each.add("a", PROMPT, **shape)
            each.finish()
        for index in range(3):
            assert engine.tokens("a", index) == local.tokens("a", index)
        assert peers.num_asked == 1


def test_prompt_logprobs_are_computed_here() -> None:
    peers = FakePrefillEngines()
    engine = Engine(64, num_host_blocks=16, prefill_engines=peers)
    engine.add("a", PROMPT, prompt_logprobs=0)
    engine.finish()
    assert engine.tokens("a") == alone() and peers.num_asked == 0
    assert sum(len(event.prompt_logprobs or ()) for event in engine.events) == 26


def test_a_prompt_larger_than_the_host_is_computed_in_part_elsewhere() -> None:
    engine = Engine(64, num_host_blocks=3, prefill_engines=FakePrefillEngines())
    engine.add("a", PROMPT)
    engine.finish()
    assert engine.tokens("a") == alone()
    stats = engine.scheduler.stats().transfers
    assert stats is not None and stats.tokens == 12


def test_without_an_engine_prompts_are_computed_here() -> None:
    peers = FakePrefillEngines()
    peers.available = False
    engine = Engine(64, num_host_blocks=16, prefill_engines=peers)
    engine.add("a", PROMPT)
    engine.finish()
    assert engine.tokens("a") == alone() and peers.num_asked == 0


def test_a_prefill_that_fails_is_asked_again_and_then_computed_here() -> None:
    peers = FakePrefillEngines(seed=1, failures=1.0, max_blocks=2)
    engine = Engine(64, num_host_blocks=16, prefill_engines=peers)
    engine.add("a", PROMPT)
    engine.finish()
    assert engine.tokens("a") == alone()
    assert peers.num_asked == remote_prefills.MAX_PREFILLS
    asked = [prefill.first for plan in engine.plans for prefill in plan.prefills]
    assert asked == sorted(asked) and asked[-1] > 0, "what has arrived is not asked for again"


def test_an_engine_that_does_not_answer_keeps_its_host_blocks_until_it_ends() -> None:
    peers = FakePrefillEngines()
    peers.answers, peers.gives_up = False, True
    engine = Engine(64, num_host_blocks=16, prefill_engines=peers)
    engine.add("a", PROMPT)
    engine.step()
    peers.available = False
    while engine.scheduler.has_work:
        engine.step()
    assert engine.tokens("a") == alone()
    assert engine.scheduler.kv_blocks.host.num_held == 7
    peers.answers = True
    engine.finish()
    assert engine.scheduler.kv_blocks.host.num_held == 0


def test_a_cancelled_wait_strands_no_block() -> None:
    engine = Engine(64, num_host_blocks=30, prefill_engines=FakePrefillEngines())
    for i in range(6):
        engine.add(f"a{i}", PROMPT[i:])
        engine.step()
        engine.scheduler.cancel(f"a{i}")
        engine.scheduler.check()
    engine.finish()
    assert engine.scheduler.kv_blocks.host.num_held == 0


def ask(engine: Engine, name: str, tokens: list[int], first: int = 0) -> None:
    """As a decode engine does."""
    assert engine.decode_engines is not None and engine.scheduler.sends is not None
    engine.decode_engines.asked[name] = tokens
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    engine.scheduler.add(Request(id=name, prompt_ids=tokens, params=params), 0.0)
    engine.scheduler.sends.add(name, first)


@pytest.mark.parametrize("num_host_blocks", [2, 30])
def test_blocks_are_sent_while_the_next_chunk_is_computed(num_host_blocks: int) -> None:
    peers = FakeDecodeEngines()
    engine = Engine(64, num_host_blocks=num_host_blocks, decode_engines=peers, max_num_batched_tokens=8)
    ask(engine, "a", PROMPT)
    ask(engine, "b", [*PROMPT[:12], *PROMPT[:9]], first=2)
    engine.finish()
    assert peers.sent == {"a": list(range(7)), "b": list(range(2, 6))}
    first = next(plan for plan in engine.plans if plan.sends)
    assert first.runs, "nothing is computed while blocks are sent"
    assert engine.scheduler.kv_blocks.host.num_held == engine.scheduler.kv_blocks.pool.num_held == 0


def test_a_dropped_prefill_strands_no_block() -> None:
    peers = FakeDecodeEngines()
    engine = Engine(64, num_host_blocks=2, decode_engines=peers, max_num_batched_tokens=8)
    assert engine.scheduler.sends is not None
    for i in range(5):
        ask(engine, f"a{i}", PROMPT[i:])
        for _ in range(i):
            engine.step()
        engine.scheduler.cancel(f"a{i}")
        engine.scheduler.sends.drop(f"a{i}")
        engine.scheduler.check()
    engine.finish()
    assert engine.scheduler.kv_blocks.host.num_held == engine.scheduler.kv_blocks.pool.num_held == 0


@pytest.mark.trial
def test_crowded_pools_with_prefill_engines_give_the_tokens_of_undisturbed_runs() -> None:
    preemptions = tokens = failed = 0
    for seed in range(rounds(25)):
        setting, workload = crowd(seed)
        peers = FakePrefillEngines(seed, failures=0.2 * (seed % 3))
        size = random.Random(seed).choice([5, 30, 200])
        store = FakeStore(seed) if seed % 4 == 0 else None
        setting = replace(setting, prefill_engines=peers, num_host_blocks=size, store=store)
        stats = verify(setting, workload).stats()
        assert stats.transfers is not None
        preemptions += stats.preemptions
        tokens += stats.transfers.tokens
        failed += stats.transfers.failed
    assert preemptions > 25 and tokens > 500 and failed > 25


@pytest.mark.trial
def test_crowded_prefill_engines_send_every_block() -> None:
    """Prefills for others and answers of its own on a pool that holds about three of them."""
    for seed in range(rounds(20)):
        rng = random.Random(seed)
        peers = FakeDecodeEngines(seed)
        engine = Engine(
            rng.randint(10, 16), num_host_blocks=rng.randint(1, 8), decode_engines=peers, max_num_batched_tokens=8
        )
        expected = {}
        for i in range(12):
            prompt = PROMPT[: rng.randint(0, 8)] + [rng.randint(1, 3) for _ in range(rng.randint(4, 20))]
            if rng.random() < 0.3:
                engine.add(f"own {i}", prompt, max_tokens=6)
            else:
                first = rng.randint(0, (len(prompt) - 1) // 4)
                ask(engine, f"prefill {i}", prompt, first)
                expected[f"prefill {i}"] = list(range(first, -(-len(prompt) // 4)))
            for _ in range(rng.randint(0, 3)):
                engine.step()
        engine.finish()
        assert peers.sent == expected
        assert engine.scheduler.kv_blocks.host.num_held == engine.scheduler.kv_blocks.pool.num_held == 0
