"""Blocks that are written as they fill: what one engine was answering goes on at another that reads them."""

from collections import Counter

import pytest

from core.driven import Engine
from core.test_page_tiers import engine as windowed_engine
from fake_tiers import FakeStore
from quire.core import kv_tiers
from quire.core.block_keys import BlockKey, is_page

PROMPT = [3 + i % 9 for i in range(26)]  # six full blocks of 4, and two tokens
MANY = 30  # output tokens


def costly_store(max_delay: int = 0) -> FakeStore:
    """One that write_back leaves alone while steps run."""
    store = FakeStore(max_delay=max_delay)
    store.cost = 10 * kv_tiers.FIRST_SAVING_SECONDS
    return store


def engine(store: FakeStore, num_blocks: int = 64, *, write_through: bool = True) -> Engine:
    return Engine(num_blocks, num_host_blocks=32, store=store, write_through=write_through)


def killed_after(engine: Engine, num_tokens: int, **named: str) -> list[int]:
    """The tokens that a stream has had when its engine dies."""
    engine.add("a", PROMPT, max_tokens=MANY, **named)
    while len(engine.tokens("a")) < num_tokens:
        engine.step()
    return engine.tokens("a")


def resumed(engine: Engine, tokens: list[int], **named: str) -> tuple[list[int], int]:
    """All tokens of the stream, and how many came from the disk."""
    engine.add("a", PROMPT, max_tokens=MANY, resumed=tokens, **named)
    engine.finish()
    return tokens + engine.tokens("a"), engine.scheduler.stats().tiers["disk"].hits


def saves(engine: Engine) -> list[BlockKey]:
    return [key for plan in engine.plans for _, key in plan.saves]


@pytest.fixture(scope="module")
def undisturbed() -> list[int]:
    alone = Engine()
    alone.add("a", PROMPT, max_tokens=MANY)
    return alone.finish().tokens("a")


def test_a_stream_whose_blocks_are_read_at_once_is_in_the_next_step(undisturbed: list[int]) -> None:
    store = costly_store(max_delay=2)
    first = engine(store)
    delivered = killed_after(first, 12)
    first.finish()
    second = engine(store)
    second.add("other", [40] * 9, max_tokens=MANY)
    second.step()
    second.add("a", PROMPT, max_tokens=MANY, resumed=delivered)
    fetches = second.fetch_first()
    assert fetches is not None and len(fetches.fetches) == 1 and not fetches.runs
    assert second.fetch_first() is None
    plan = second.step()
    assert len(plan.admitted) == 1 and len(plan.runs) == 2, "it is computed beside what runs already"
    assert second.finish() and delivered + second.tokens("a") == undisturbed


def test_fetches_are_planned_for_no_more_sequences_than_the_next_step_has_rows_for() -> None:
    store = costly_store()
    first = engine(store)
    for i in range(4):
        first.add(f"{i}", [20 + i] * 18, max_tokens=2)
    first.finish()
    second = Engine(64, num_host_blocks=32, store=store, write_through=True, max_num_seqs=3)
    second.add("other", [40] * 9, max_tokens=MANY)
    second.step()
    for i in range(4):
        second.add(f"{i}", [20 + i] * 18, max_tokens=2)
    fetches = second.fetch_first()
    assert fetches is not None and len(fetches.fetches) == 2
    assert len(second.step().admitted) == 2
    second.finish()


@pytest.mark.parametrize("num_tokens", [2, 3, 8, 19])
def test_a_stream_goes_on_at_another_engine_from_the_blocks_that_were_full(
    undisturbed: list[int], num_tokens: int
) -> None:
    store = costly_store()
    delivered = killed_after(engine(store), num_tokens)
    num_computed = len(PROMPT) + num_tokens - 1  # the last token is not
    tokens, hits = resumed(engine(store), delivered)
    assert tokens == undisturbed
    assert num_computed // 4 * 4 - hits in (0, 4), "but for the last block, which the next plan would have saved"


def test_written_back_it_computes_all_but_the_first_block_again(undisturbed: list[int]) -> None:
    store = costly_store()
    delivered = killed_after(engine(store, write_through=False), 19)
    assert resumed(engine(store, write_through=False), delivered) == (undisturbed, 4)


def test_every_block_is_written_once(undisturbed: list[int]) -> None:
    store = costly_store()
    first, second = engine(store), engine(store)
    delivered = killed_after(first, 19)
    assert resumed(second, delivered)[0] == undisturbed
    second.add("b", PROMPT, max_tokens=MANY)  # in the pool now
    second.finish()
    counts = Counter(saves(second))
    assert len(counts) == (len(PROMPT) + MANY - 1) // 4 - (len(PROMPT) + 18) // 4 + 1, "what arrived is not saved again"
    assert set((counts + Counter(saves(first))).values()) == {1}


def test_a_writer_that_hangs_makes_no_step_wait_and_is_skipped(undisturbed: list[int]) -> None:
    store = costly_store()
    store.hangs = True
    one = engine(store, 20)
    for number in range(7):
        one.add(str(number), [20 + number] * 30, max_tokens=9)
        while one.scheduler.groups.has_work:
            assert one.step().runs, "a step waits for the disk"
    assert len(saves(one)) == 16, "more than half of the host blocks wait for the disk"
    one.add("a", PROMPT, max_tokens=MANY)
    while one.scheduler.groups.has_work:
        one.step()
    assert one.tokens("a") == undisturbed
    num_skipped = one.scheduler.stats().tiers["disk"].skipped_blocks
    assert num_skipped > 20
    store.hangs = False
    one.finish()
    stats = one.scheduler.stats().tiers["disk"]
    num_full = 7 * (38 // 4) + (len(PROMPT) + MANY - 1) // 4
    assert len(saves(one)) + stats.skipped_blocks == num_full and one.scheduler.kv_blocks.host.num_held == 0


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"salt": "b"}])
def test_other_tenants_and_salts_find_nothing(undisturbed: list[int], other: dict[str, str]) -> None:
    store = costly_store()
    delivered = killed_after(engine(store), 19, tenant="a", salt="a")
    assert resumed(engine(store), delivered, **{"tenant": "a", "salt": "a"} | other) == (undisturbed, 0)


def test_adapters_are_told_apart_by_their_numbers() -> None:
    store = costly_store()
    one, other = engine(store).scheduler.tiers, engine(store).scheduler.tiers
    assert one is not None and other is not None
    one.adapters["x"], other.adapters["x"] = "digest 1", "digest 2"
    assert one._root_key(("", "", "x")) != other._root_key(("", "", "x")) != other._root_key(("", "", ""))


def test_window_pages_are_written_as_they_fill() -> None:
    alone = windowed_engine()
    alone.add("a", PROMPT, max_tokens=MANY)
    expected, store = alone.finish().tokens("a"), costly_store()
    delivered = killed_after(windowed_engine(store=store, write_through=True), 19)
    assert sum(map(is_page, store.blocks)) >= 10
    tokens, hits = resumed(windowed_engine(store=store, write_through=True), delivered)
    assert tokens == expected and hits >= 40


def test_what_waits_for_the_disk_together_is_compared_with_computing_it_together() -> None:
    """The last of many would else be computed: the queue of reads is longer than one prompt takes."""
    store = FakeStore()
    first = engine(store)
    for number in range(4):
        first.add(str(number), [10 * number + i % 9 for i in range(26)], max_tokens=1)
    first.finish()
    second = engine(store)
    tiers = second.scheduler.tiers
    assert tiers is not None
    tiers.record_prefill(10_000, 100.0)  # 24 tokens take 0.24 s
    store.read_seconds = lambda num_blocks: 0.02 * (num_blocks + tiers._fetched_keys.total())  # type: ignore[method-assign]
    for number in range(4):
        second.add(str(number), [10 * number + i % 9 for i in range(26)], max_tokens=1)
    second.finish()
    assert second.scheduler.stats().tiers["disk"].hits == 4 * 24
