"""Prefixes beyond the pool: saved when they are full, found on the host, fetched from the disk."""

import random
from dataclasses import replace

import pytest

from core.driven import Engine
from core.test_random_workloads import crowd, verify
from fake_tiers import FakeStore
from quire.core import kv_tiers
from quire.core.block_keys import child_key, root_key, tenant_digest
from quire.core.plan import StepPlan
from quire.core.request import Request
from trials import LENGTH

PROMPT = [3 + i % 9 for i in range(26)]  # six full blocks of 4, and two tokens


def others(engine: Engine, count: int = 4) -> None:
    """Prompts that evict everything from a pool of 20 blocks."""
    for i in range(count):
        engine.add(f"other {i}", [20 + i] * 30, max_tokens=2)
        engine.finish()


def answer(engine: Engine, name: str, prompt: list[int] = PROMPT, tenant: str = "") -> tuple[list[int], int]:
    """The tokens of a request, and how many of its prompt tokens were cached."""
    engine.add(name, prompt, max_tokens=6, tenant=tenant)
    engine.finish()
    return engine.tokens(name), max(event.num_cached for event in engine.events if event.request_id == name)


def evict_from_host(engine: Engine, key: bytes) -> None:
    host = engine.scheduler.kv_blocks.host
    block = host.tree.find(key)  # type: ignore[attr-defined]
    del host._cached[block]
    host.tree.remove(block)
    host._free.append(block)
    engine.scheduler.check()


def test_what_the_pool_evicts_comes_back_from_the_disk_with_the_same_tokens() -> None:
    engine = Engine(20, num_host_blocks=16, store=FakeStore())
    cold, _ = answer(engine, "cold")
    others(engine)
    assert answer(engine, "again") == (cold, 24)
    stats = engine.scheduler.stats()
    assert stats.tiers["disk"].hits == 24 and stats.prefix_hits == 24 and "host" not in stats.tiers
    fetched = [fetch for plan in engine.plans for fetch in plan.fetches]
    assert len(fetched) == 1 and len(fetched[0].blocks) == 6


def test_another_engine_finds_what_one_has_saved() -> None:
    store = FakeStore()
    first, second = Engine(64, num_host_blocks=16, store=store), Engine(64, num_host_blocks=16, store=store)
    cold, _ = answer(first, "cold")
    assert answer(second, "warm") == (cold, 24)


def test_a_prefix_that_never_leaves_the_pool_is_kept_on_disk() -> None:
    """Else it would be the oldest there, and what continues it could not be found after a restart."""
    store = FakeStore()
    engine = Engine(64, num_host_blocks=16, store=store)
    engine.scheduler.expire(1000.0)
    answer(engine, "first")
    path = [root_key("", "", "")]
    for i in range(6):
        path.append(child_key(path[-1], tuple(PROMPT[4 * i : 4 * i + 4])))
    del path[0]
    engine.scheduler.expire(1000.0 + kv_tiers.TOUCH_SECONDS / 2)
    answer(engine, "soon")
    assert store.touched == [], "each request touches files"
    engine.scheduler.expire(1000.0 + 2 * kv_tiers.TOUCH_SECONDS)
    answer(engine, "later")
    assert store.touched == path
    answer(engine, "at once")
    assert store.touched == path
    for key in path[2:4]:
        del store.blocks[key]  # other engines needed the room
    engine.scheduler.expire(1000.0 + 4 * kv_tiers.TOUCH_SECONDS)
    answer(engine, "much later")
    assert store.touched == path + path[:2] and all(key in store.blocks for key in path), "it is not saved again"


def test_what_the_pool_evicts_is_swapped_in_from_the_host_without_a_wait() -> None:
    engine = Engine(20, num_host_blocks=60, offload=True)
    cold, _ = answer(engine, "cold")
    others(engine)
    num_plans = len(engine.plans)
    assert answer(engine, "again") == (cold, 24)
    assert len(engine.plans[num_plans].swap_in) == 6 and engine.plans[num_plans].runs
    assert engine.scheduler.stats().tiers["host"].hits == 24


def test_the_host_forgets_the_least_recently_used_first() -> None:
    engine = Engine(12, num_host_blocks=16, offload=True)
    cold, _ = answer(engine, "cold")
    others(engine, 3)
    assert answer(engine, "again") == (cold, 0)
    assert answer(engine, "at once") == (cold, 24)


def test_blocks_on_the_host_and_on_disk_are_put_together() -> None:
    store = FakeStore()
    engine = Engine(20, num_host_blocks=60, offload=True, store=store)
    cold, _ = answer(engine, "cold")
    others(engine)
    key = root_key("", "", "")
    for i in range(4):
        key = child_key(key, tuple(PROMPT[4 * i : 4 * i + 4]))
    evict_from_host(engine, key)
    assert answer(engine, "again") == (cold, 24)
    stats = engine.scheduler.stats().tiers
    assert (stats["host"].hits, stats["disk"].hits) == (12, 12)


def test_tenants_and_salts_do_not_find_each_others_blocks() -> None:
    store = FakeStore()
    engine = Engine(64, num_host_blocks=16, store=store)
    cold, _ = answer(engine, "a", tenant="one")
    assert answer(engine, "b", tenant="two") == (cold, 0)
    assert len({key[:8] for key in store.blocks}) == 2
    assert root_key("a", "bc", "") != root_key("ab", "c", "") != root_key("a", "b", "c")


def test_a_reset_forgets_all_tiers_of_one_tenant() -> None:
    store = FakeStore()
    engine = Engine(64, num_host_blocks=40, store=store, offload=True)
    cold, _ = answer(engine, "a", tenant="one")
    answer(engine, "b", tenant="two")
    assert engine.scheduler.reset_prefix_cache("one")
    assert all(key[:8] == tenant_digest("two") for key in store.blocks) and store.blocks
    assert answer(engine, "c", tenant="one") == (cold, 0)


def test_a_disk_that_is_slower_than_computing_is_left_alone() -> None:
    store = FakeStore()
    engine = Engine(20, num_host_blocks=16, store=store)
    cold, _ = answer(engine, "cold")
    others(engine)
    assert engine.scheduler.tiers is not None
    engine.scheduler.tiers.record_prefill(10_000, 100.0)  # 24 tokens take 0.24 s
    store.seconds = 0.25
    assert answer(engine, "again") == (cold, 0) and store.num_read == 0
    others(engine)
    store.seconds = 0.23
    assert answer(engine, "at last") == (cold, 24)


def test_saving_waits_for_idle_moments_where_it_slows_steps_down_and_hits_do_not_pay() -> None:
    store = FakeStore()
    store.cost = kv_tiers.FIRST_SAVING_SECONDS / 2
    engine = Engine(64, num_host_blocks=32, store=store)
    engine.add("a", PROMPT, max_tokens=20)
    while engine.scheduler.groups.has_work:
        engine.step()
    assert sum(len(plan.saves) for plan in engine.plans) == 2, "it takes more than its share"
    engine.finish()
    assert sum(len(plan.saves) for plan in engine.plans) == 11
    engine.scheduler.record_step(StepPlan(0, []), 2 * store.cost / kv_tiers.SAVING_SHARE)
    engine.add("b", PROMPT[::-1], max_tokens=20)
    num_plans = len(engine.plans)
    while engine.scheduler.groups.has_work:
        engine.step()
    assert 2 <= sum(len(plan.saves) for plan in engine.plans[num_plans:]) <= 3


def test_a_sequence_goes_on_when_the_disk_takes_longer_than_computing() -> None:
    store = FakeStore()
    engine = Engine(20, num_host_blocks=16, store=store)
    cold, _ = answer(engine, "cold")
    others(engine)
    store.hangs = True
    engine.scheduler.expire(10.0)
    engine.add("again", PROMPT, max_tokens=6)
    engine.step()
    assert not engine.plans[-1].runs and engine.plans[-1].fetches
    engine.scheduler.expire(11.9)
    engine.step()
    assert not engine.plans[-1].runs, "it does not wait"
    engine.scheduler.expire(12.1)
    while engine.scheduler.groups.has_work:
        engine.step()
    assert engine.tokens("again") == cold
    store.hangs = False
    engine.finish()
    assert engine.scheduler.kv_blocks.host.num_held == 0


def test_requests_for_one_prefix_read_it_once() -> None:
    store = FakeStore(max_delay=2)
    engine = Engine(40, num_host_blocks=32, store=store)
    cold, _ = answer(engine, "cold")
    others(engine, 8)
    for i in range(5):
        engine.add(f"again {i}", PROMPT, max_tokens=6)
    engine.finish()
    assert [engine.tokens(f"again {i}") for i in range(5)] == [cold] * 5
    assert store.num_read == 6


def test_a_cancelled_wait_strands_no_block() -> None:
    store = FakeStore(max_delay=5)
    engine = Engine(20, num_host_blocks=16, store=store)
    answer(engine, "cold")
    others(engine)
    for i in range(6):
        engine.add(f"again {i}", PROMPT, max_tokens=6)
        engine.step()
        engine.scheduler.cancel(f"again {i}")
        engine.scheduler.check()
    engine.finish()
    assert engine.scheduler.kv_blocks.host.num_held == 0


def test_nothing_goes_beyond_the_pool_where_every_layer_has_a_window() -> None:
    setting, workload = crowd(3, max_tokens=43)
    store = FakeStore()
    setting = replace(setting, num_blocks=20, window=6, store=store, num_host_blocks=20, prefix_caching=True)
    assert verify(setting, workload).tiers is None and not store.blocks


@pytest.mark.trial
@pytest.mark.parametrize("tiers", ["disk", "host", "both"])
def test_crowded_pools_with_tiers_give_the_tokens_of_undisturbed_runs(tiers: str) -> None:
    """Every step checks that each block is in exactly the places that claim it, and every run what it reads."""
    disk = host = preemptions = 0
    for seed in range(6 * LENGTH):
        setting, workload = crowd(seed)
        store = FakeStore(seed, failures=0.1 * (seed % 2)) if tiers != "host" else None
        size = random.Random(seed).choice([8, 60, 200])
        setting = replace(setting, prefix_caching=True, num_host_blocks=size, store=store, offload=tiers != "disk")
        again = [replace(each, step=each.step + 70, request=renamed(each.request, "again")) for each in workload]
        for served in (workload + again, [replace(each, request=renamed(each.request, "")) for each in workload]):
            stats = verify(setting, served).stats()  # the second engine starts with what the first has saved
            disk += stats.tiers["disk"].hits if store else 0
            host += stats.tiers["host"].hits if tiers != "disk" else 0
            preemptions += stats.preemptions
    assert preemptions > 20
    assert (disk > 30) == (tiers != "host") and (host > 30) == (tiers != "disk")


def renamed(request: Request, suffix: str) -> Request:
    return replace(request, id=f"{request.id} {suffix}")
