"""Window pages on disk: saved where prompts start from, and fetched with the blocks up to there."""

import random
from dataclasses import replace
from typing import Any

import pytest

from core.driven import Engine
from core.test_kv_tiers import renamed
from core.test_random_workloads import crowd, verify
from fake_tiers import FakeStore
from quire.core.block_keys import is_page
from trials import LENGTH

WINDOW = 10  # tokens: four blocks of 4 have them, wherever it ends
PROMPT = [3 + i * i % 19 for i in range(50)]  # twelve full blocks, and two tokens
NEEDED = 2 * 4 + 4  # pages of two sequences and a step


def engine(num_blocks: int = 40, num_pages: int = 2 * NEEDED, **options: Any) -> Engine:
    given = {"num_host_blocks": 40, "max_num_seqs": 2, "max_num_batched_tokens": 16} | options
    return Engine(num_blocks, num_pages=num_pages, page_window=WINDOW, **given)


def answer(engine: Engine, name: str, prompt: list[int] = PROMPT, max_tokens: int = 6) -> tuple[list[int], int]:
    """The tokens of a request, and how many of its prompt tokens were cached."""
    engine.add(name, prompt, max_tokens=max_tokens)
    engine.finish()
    return engine.tokens(name), max(event.num_cached for event in engine.events if event.request_id == name)


def others(engine: Engine, count: int = 5) -> None:
    for i in range(count):
        answer(engine, f"other {i}", [20 + i] * 40, max_tokens=2)


def hits(engine: Engine) -> int:
    return engine.scheduler.stats().tiers["disk"].hits


def test_a_restarted_engine_starts_behind_the_last_window_of_a_prompt() -> None:
    store = FakeStore()
    cold, _ = answer(engine(store=store), "cold")
    pages = sum(map(is_page, store.blocks))
    assert 3 <= pages <= 5, "of a prompt of twelve blocks and an answer of one, the pages of their last windows"
    restarted = engine(store=store)
    assert answer(restarted, "again") == (cold, 48) and hits(restarted) == 48
    [fetch] = [fetch for plan in restarted.plans for fetch in plan.fetches]
    assert [is_page(key) for key, _ in fetch.blocks] == [False] * 12 + [True] * 3
    assert restarted.scheduler.kv_blocks.host.num_held == 0


def test_a_conversation_goes_on_behind_its_last_answer() -> None:
    store = FakeStore()
    ids, num_before = PROMPT, 0
    for turn in range(4):  # each in a new engine
        tokens, num_cached = answer(engine(store=store), f"turn {turn}", ids, max_tokens=15)
        assert num_cached == num_before // 4 * 4
        num_before = len(ids) + 14  # the last token of an answer is not computed
        ids = [*ids, *tokens, 5, 6, 7]


def test_blocks_in_the_pool_whose_pages_are_gone_are_read_again_with_them() -> None:
    store = FakeStore()
    one = engine(200, num_pages=NEEDED, store=store)
    cold, _ = answer(one, "cold")
    others(one)
    num_plans = len(one.plans)
    assert answer(one, "again") == (cold, 48) and hits(one) == 48
    [fetch] = [fetch for plan in one.plans[num_plans:] for fetch in plan.fetches]
    assert [is_page(key) for key, _ in fetch.blocks] == [False] * 3 + [True] * 3
    assert not [swap for plan in one.plans[num_plans:] for swap in plan.swap_in], "their blocks are in the pool"


def test_a_hit_ends_where_the_last_window_is() -> None:
    store = FakeStore()
    answer(engine(store=store), "cold")
    longer = [*PROMPT[:49], *range(30, 60)]  # twelve blocks are stored
    assert answer(engine(store=store), "longer", longer)[1] == 48
    shorter = [*PROMPT[:40], *range(30, 60)]  # ten of them, whose window was passed
    assert answer(engine(store=store), "shorter", shorter)[1] == 0
    assert answer(engine(store=store), "branches here", [*PROMPT[:40], *range(60, 63)])[1] == 0


def test_where_prompts_branch_the_window_is_saved_too() -> None:
    store = FakeStore()
    one = engine(store=store)
    for i in range(2):  # the second one branches
        answer(one, f"branch {i}", [*PROMPT[:40], *[50 + i] * 20])
    restarted = engine(store=store)
    assert answer(restarted, "third", [*PROMPT[:40], *[60] * 20])[1] == 40


def test_pages_that_are_lost_let_the_prompt_be_computed() -> None:
    store = FakeStore()
    cold, _ = answer(engine(store=store), "cold")
    pages = [key for key in store.blocks if is_page(key)]
    for lost in (pages, pages[:1]):
        some = FakeStore()
        some.blocks = {key: content for key, content in store.blocks.items() if key not in lost}
        assert answer(engine(store=some), "again")[0] == cold


def test_a_page_that_cannot_be_read_lets_the_prompt_be_computed() -> None:
    store = FakeStore()
    cold, _ = answer(engine(store=store), "cold")
    restarted = engine(store=store)
    restarted.add("again", PROMPT, max_tokens=6)
    restarted.step()
    assert restarted.plans[0].fetches
    store.blocks = {key: content for key, content in store.blocks.items() if not is_page(key)}
    restarted.finish()
    assert restarted.tokens("again") == cold and hits(restarted) == 0
    assert restarted.scheduler.kv_blocks.host.num_held == 0


@pytest.mark.trial
def test_crowded_pools_with_a_disk_give_the_tokens_of_undisturbed_runs() -> None:
    disk = preemptions = 0
    for seed in range(8 * LENGTH):
        setting, workload = crowd(seed)
        rng, store = random.Random(seed), FakeStore(seed, failures=0.1 * (seed % 2))
        setting = replace(
            setting, prefix_caching=True, num_host_blocks=rng.choice([8, 60, 200]), store=store,
            page_window=rng.choice([1, 4, 9, 20]), ahead=rng.choice([0, 0, 1]), pipelined=seed % 3 == 0,
            write_through=seed % 4 > 1,
        )  # fmt: skip
        again = [replace(each, step=each.step + 70, request=renamed(each.request, "again")) for each in workload]
        for served in (workload + again, [replace(each, request=renamed(each.request, "")) for each in workload]):
            stats = verify(setting, served).stats()  # the second engine starts with what the first has saved
            disk += stats.tiers["disk"].hits
            preemptions += stats.preemptions
    assert preemptions > 20 and disk > 30, (preemptions, disk)
