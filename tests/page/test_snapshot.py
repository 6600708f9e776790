"""What can be seen of the engine is what is there, and looking costs what it may cost."""

import time
from array import array

import pytest

from fakes import FakeExecutor
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.snapshot import CACHED, FIRST_OWNER, FREE, Snapshot, take_snapshot
from quire.engine import live_snapshots as watch
from quire.engine.engine import Engine
from quire.engine.messages import LiveSnapshot, decode_from_engine, encode
from quire.engine.options import EngineOptions


def engine(num_blocks: int = 64, ahead: int = 0, window: int = 0, **options: int) -> Engine:
    given = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 16, **options}
    executor = FakeExecutor(num_blocks=num_blocks, vocab_size=500, ahead=ahead, window=window)
    return Engine(executor, EngineOptions(**given))


def request(name: str, num_prompt: int, max_tokens: int, **params: int) -> Request:
    ids = [7] * 32 + [ord(name[-1])] * (num_prompt - 32)  # the first two blocks are the same for all
    return Request(
        id=name, prompt_ids=ids, params=SamplingParams(seed=1, max_tokens=max_tokens, **params), arrival=ord(name[-1])
    )


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot after every step."""
    monkeypatch.setattr(watch, "MIN_INTERVAL", 0.0)
    monkeypatch.setattr(watch, "MAX_SHARE", float("inf"))


def owners(snapshot: Snapshot) -> list[int]:
    return list(array("H", snapshot.owners))


@pytest.mark.parametrize("ahead", [0, 1])
def test_owners_references_and_batches(at_once: None, ahead: int) -> None:
    seen = engine(ahead=ahead)
    seen.watch(True)
    for name in ("a", "b"):
        seen.submit(request(name, 40, 30))
    snapshots = []
    while seen.has_work:
        seen.step()
        if snapshot := seen.snapshot():
            snapshots.append(snapshot)
            assert decode_from_engine(encode(LiveSnapshot(snapshot))) == LiveSnapshot(
                snapshot
            )  # as it arrives in the other process
            held = [block for block, owner in enumerate(owners(snapshot)) if owner >= FIRST_OWNER]
            assert len(held) == snapshot.stats.held_blocks == sum(refs > 0 for refs in snapshot.refs)
            assert owners(snapshot).count(CACHED) == snapshot.stats.cached_blocks
            assert all(snapshot.sequences[owners(snapshot)[block] - FIRST_OWNER] for block in held)
    middle = snapshots[len(snapshots) // 2]
    assert [view.request_id for view in middle.sequences] == ["a", "b"]
    assert sorted(middle.refs)[-2:] == [2, 2], "they begin alike, and share two blocks"
    assert [view.num_cached for view in middle.sequences] == [0, 32]
    assert {view.state for view in middle.sequences} == {"running"}
    assert snapshots[-1].stats.held_blocks == 0 and CACHED in owners(snapshots[-1]) and FREE in owners(snapshots[-1])

    steps = [step for snapshot in snapshots for step in snapshot.steps]
    assert [step.step for step in steps] == sorted({step.step for step in steps})
    chunks = [(chunk.request_id, chunk.start, chunk.count) for step in steps for chunk in step.chunks]
    assert chunks == [("a", 0, 40), ("b", 32, 8)]
    assert max(step.decoding for step in steps) == 2


@pytest.mark.parametrize("window", [0, 40])
def test_every_held_block_has_an_owner(at_once: None, window: int) -> None:
    """Also those behind which a window has closed, and those that wait to be copied."""
    seen = engine(num_blocks=40, window=window)
    seen.watch(True)
    for name in ("a", "b"):
        seen.submit(request(name, 70, 60, n=3))
    num_snapshots = 0
    while seen.has_work:
        seen.step()
        if snapshot := seen.snapshot():
            num_snapshots += 1
            held = [refs > 0 for refs in snapshot.refs]
            assert [owner >= FIRST_OWNER for owner in owners(snapshot)] == held
            assert sum(held) == snapshot.stats.held_blocks
    assert num_snapshots > 60


def test_those_who_wait_and_those_who_had_to_give_way(at_once: None) -> None:
    seen = engine(num_blocks=12, max_num_seqs=3)
    seen.watch(True)
    for name in ("a", "b", "c", "d"):
        seen.submit(request(name, 40, 60))
    states: set[tuple[str, str]] = set()
    preempted: list[str] = []
    while seen.has_work:
        seen.step()
        snapshot = seen.snapshot()
        assert snapshot is not None
        states |= {(view.request_id, view.state) for view in snapshot.sequences}
        preempted += [name for step in snapshot.steps for name in step.preempted]
    assert ("d", "waiting") in states and ("c", "preempted") in states and "c" in preempted
    assert ("a", "preempted") not in states


def test_a_block_held_by_many_has_as_many_references_as_a_byte_holds() -> None:
    seen = engine(num_blocks=600, max_num_seqs=300, max_num_batched_tokens=512)
    for number in range(300):
        seen.submit(
            Request(id=str(number), prompt_ids=[7] * 17, params=SamplingParams(seed=1, max_tokens=8), arrival=number)
        )
    for _ in range(3):
        seen.step()
    snapshot = take_snapshot(seen._scheduler, now=0.0, resident_bytes=0, steps=[])
    assert max(seen._scheduler.kv_blocks.pool.refs) == 300 and max(snapshot.refs) == 255


def test_an_engine_nobody_looks_at_has_nothing_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_SHARE", float("inf"))
    seen = engine()
    seen.submit(request("a", 40, 3))
    while seen.has_work:
        seen.step()
        assert seen.snapshot() is None
    assert seen.idle_timeout is None
    seen.watch(True)
    assert seen.idle_timeout == 0.0 and seen.snapshot() is not None
    assert seen.idle_timeout is None and seen.snapshot() is None, "nothing has changed"
    seen.watch(True)
    assert 0 < (seen.idle_timeout or 0) <= watch.MIN_INTERVAL, "one who comes later has to wait for his turn"
    seen.watch(False)
    assert seen.idle_timeout is None


def test_looking_takes_a_share_of_the_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = engine()
    seen.watch(True)

    def slow(*args: object, **kwargs: object) -> Snapshot:
        time.sleep(0.02)
        return take_snapshot(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(watch, "take_snapshot", slow)
    assert seen.snapshot() is not None
    seen.watch(True)
    assert seen.idle_timeout is not None and seen.idle_timeout > 0.9 * 0.02 / watch.MAX_SHARE


def test_what_is_freed_without_a_step_is_seen(at_once: None) -> None:
    seen = engine()
    seen.submit(request("a", 40, 30))
    seen.watch(True)
    seen.step()
    before = seen.snapshot()
    seen.cancel("a")
    while seen.has_work:
        seen.step()
    after = seen.snapshot()
    assert before is not None and before.stats.held_blocks == 3
    assert after is not None and after.stats.held_blocks == 0
