"""States beyond their slots: swapped with a sequence, saved and fetched as checkpoints, sent to other engines."""

import random
from dataclasses import replace

import pytest

from core.driven import Engine
from core.test_kv_tiers import renamed
from core.test_random_workloads import crowd, verify
from core.test_remote_prefills import ask
from fake_peers import FakeDecodeEngines, FakePrefillEngines
from fake_tiers import FakeStore
from quire.core import remote_prefills
from quire.core.block_keys import is_state
from trials import LENGTH

PROMPT = [3 + i % 9 for i in range(26)]  # six full blocks of 4, and two tokens


def engine(num_blocks: int = 20, **options: object) -> Engine:
    given = {"num_host_blocks": 16, "num_slots": 9, "num_host_slots": 6, "max_num_seqs": 3} | options
    return Engine(num_blocks, **given)  # type: ignore[arg-type]


def answer(engine: Engine, name: str, prompt: list[int] = PROMPT) -> tuple[list[int], int]:
    """The tokens of a request, and how many of its prompt tokens were cached."""
    engine.add(name, prompt, max_tokens=6)
    engine.finish()
    return engine.tokens(name), max(event.num_cached for event in engine.events if event.request_id == name)


def others(engine: Engine) -> None:
    """Prompts that evict everything from a pool of 20 blocks and 9 slots."""
    for i in range(5):
        engine.add(f"other {i}", [20 + i] * 30, max_tokens=2)
        engine.finish()


def test_what_the_pool_evicts_comes_back_from_the_disk_with_its_state() -> None:
    store = FakeStore()
    one = engine(store=store)
    cold, _ = answer(one, "cold")
    assert sum(map(is_state, store.blocks)) == 2, "of the prompt, and of the answer"
    others(one)
    assert answer(one, "again") == (cold, 24)
    assert one.scheduler.stats().tiers["disk"].hits == 24
    [fetch] = [fetch for plan in one.plans for fetch in plan.fetches]
    assert len(fetch.blocks) == 7


def test_a_restarted_engine_continues_a_conversation_from_the_end_of_its_last_answer() -> None:
    store = FakeStore()
    first, _ = answer(engine(store=store), "first")
    more = [*PROMPT, *first, 5, 6, 7]
    assert answer(engine(store=store), "second", more)[1] == 28  # seven blocks: the last token is not computed


def test_only_the_state_is_fetched_where_the_blocks_are_in_the_pool() -> None:
    store = FakeStore()
    one = engine(60, store=store, num_slots=3)
    cold, _ = answer(one, "cold")
    for i in range(4):
        one.add(f"other {i}", [20 + i] * 9, max_tokens=1)
        one.finish()
    num_plans = len(one.plans)
    assert answer(one, "again") == (cold, 24)
    [fetch] = [fetch for plan in one.plans[num_plans:] for fetch in plan.fetches]
    assert [is_state(key) for key, _ in fetch.blocks] == [True]


def test_blocks_without_a_state_are_computed_again() -> None:
    store = FakeStore()
    cold, _ = answer(engine(store=store), "cold")
    store.blocks = {key: content for key, content in store.blocks.items() if not is_state(key)}
    restarted = engine(store=store)
    assert answer(restarted, "again") == (cold, 0)
    assert not any(plan.fetches for plan in restarted.plans)


def test_the_host_keeps_states_beside_blocks() -> None:
    one = engine(offload=True, num_host_blocks=60, num_host_slots=20)
    cold, _ = answer(one, "cold")
    others(one)
    num_plans = len(one.plans)
    assert answer(one, "again") == (cold, 24)
    plan = one.plans[num_plans]
    assert len(plan.swap_in) == 6 and len(plan.state_swap_in) == 1 and plan.runs


@pytest.fixture
def asks_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_prefills, "MIN_TOKENS", 5)


@pytest.mark.usefixtures("asks_early")
def test_a_prefill_elsewhere_ends_with_the_state_of_its_last_token() -> None:
    peers = FakePrefillEngines()
    one = engine(num_host_blocks=30, prefill_engines=peers)
    cold, _ = answer(engine(), "cold")
    assert answer(one, "elsewhere") == (cold, 0) and peers.num_asked == 1
    assert sum(run.count for plan in one.plans for run in plan.runs) == 1 + 5  # of the prompt, and of the answer
    assert one.scheduler.kv_blocks.host.num_held == one.scheduler.states.host.num_held == 0  # type: ignore[union-attr]


def test_the_state_is_sent_behind_the_last_block() -> None:
    peers = FakeDecodeEngines()
    one = engine(decode_engines=peers, max_num_batched_tokens=8)
    ask(one, "a", PROMPT)
    ask(one, "b", PROMPT, first=5)
    one.finish()
    assert peers.sent == {"a": list(range(8)), "b": list(range(5, 8))}
    assert one.scheduler.states is not None and one.scheduler.states.host.num_held == 0


@pytest.mark.trial
@pytest.mark.parametrize("tiers", ["disk", "host", "both"])
def test_crowded_pools_with_tiers_give_the_tokens_of_undisturbed_runs(tiers: str) -> None:
    disk = host = preemptions = 0
    for seed in range(6 * LENGTH):
        setting, workload = crowd(seed)
        store = FakeStore(seed, failures=0.1 * (seed % 2)) if tiers != "host" else None
        rng = random.Random(seed)
        setting = replace(setting, prefix_caching=True, num_host_blocks=rng.choice([8, 60, 200]), num_slots=12)
        setting = replace(setting, num_host_slots=rng.choice([1, 4, 30]), store=store, offload=tiers != "disk")
        again = [replace(each, step=each.step + 70, request=renamed(each.request, "again")) for each in workload]
        for served in (workload + again, [replace(each, request=renamed(each.request, "")) for each in workload]):
            stats = verify(setting, served).stats()  # the second engine starts with what the first has saved
            disk += stats.tiers["disk"].hits if store else 0
            host += stats.tiers["host"].hits if tiers != "disk" else 0
            preemptions += stats.preemptions
    assert preemptions > 20
    assert (disk > 30) == (tiers != "host") and (host > 10) == (tiers != "disk"), (disk, host)


@pytest.mark.trial
@pytest.mark.usefixtures("asks_early")
def test_crowded_pools_with_prefill_engines_give_the_tokens_of_undisturbed_runs() -> None:
    preemptions = tokens = failed = 0
    for seed in range(10 * LENGTH):
        setting, workload = crowd(seed)
        peers = FakePrefillEngines(seed, failures=0.2 * (seed % 3))
        rng = random.Random(seed)
        slots = {"num_slots": rng.choice([5, 12, 40]), "num_host_slots": rng.choice([1, 4, 30])}
        store = FakeStore(seed) if seed % 4 == 0 else None
        setting = replace(setting, prefill_engines=peers, num_host_blocks=rng.choice([5, 200]), store=store, **slots)
        stats = verify(setting, workload).stats()
        assert stats.transfers is not None
        preemptions += stats.preemptions
        tokens += stats.transfers.tokens
        failed += stats.transfers.failed
    assert preemptions > 20 and tokens > 300 and failed > 10


@pytest.mark.trial
def test_crowded_prefill_engines_send_every_state_or_say_that_they_cannot() -> None:
    for seed in range(10 * LENGTH):
        rng = random.Random(seed)
        peers = FakeDecodeEngines(seed)
        sizes = {"num_host_blocks": rng.randint(1, 8), "num_host_slots": rng.randint(1, 3), "num_slots": 7}
        one = Engine(rng.randint(10, 16), decode_engines=peers, max_num_batched_tokens=8, **sizes)  # type: ignore[arg-type]
        expected = {}
        for i in range(12):
            prompt = PROMPT[: rng.randint(0, 8)] + [rng.randint(1, 3) for _ in range(rng.randint(4, 20))]
            if rng.random() < 0.3:
                one.add(f"own {i}", prompt, max_tokens=6)
            else:
                first = rng.randint(0, (len(prompt) - 1) // 4)
                ask(one, f"prefill {i}", prompt, first)
                expected[f"prefill {i}"] = list(range(first, -(-len(prompt) // 4) + 1))
            for _ in range(rng.randint(0, 3)):
                one.step()
        one.finish()
        assert one.scheduler.sends is not None and one.scheduler.states is not None
        for failed in one.scheduler.sends.take_failed():
            expected[failed].pop()
        assert {name: sent for name, sent in peers.sent.items() if sent} == {n: e for n, e in expected.items() if e}
        assert one.scheduler.kv_blocks.host.num_held == one.scheduler.kv_blocks.pool.num_held == 0
        assert one.scheduler.states.host.num_held == 0
