"""What the prefix tree gains and loses, as events."""

import random

from core.driven import LONG, Engine
from fake_tiers import FakeStore
from quire.core.kv_events import (
    DISK,
    HOST,
    POOL,
    KVEvents,
    RemovedBlocks,
    StoredBlocks,
    StoredMirror,
    block_hashes,
    namespace_keys,
    root_hash,
)
from quire.core.prefix_tree import EVICTED, PrefixNode


def listened(num_blocks: int = 64, **options: object) -> tuple[Engine, KVEvents]:
    engine, events = Engine(num_blocks, **options), KVEvents()  # type: ignore[arg-type]
    engine.scheduler.kv_blocks.tree.listener = events
    return engine, events


def tree_hashes(engine: Engine) -> set[int]:
    """Computed from the tokens of each path, without what events have noted."""

    def hashed(node: PrefixNode) -> int:
        parent = node.parent
        assert parent is not None
        above = hashed(parent) if parent.parent else root_hash(namespace_keys(parent.namespace))  # type: ignore[attr-defined]
        return block_hashes(above, node.tokens, len(node.tokens))[0]

    return {hashed(node) for node in engine.scheduler.kv_blocks.tree.walk() if node.block != EVICTED}


def test_blocks_that_follow_each_other_are_one_event() -> None:
    engine, events = listened()
    engine.add("a", [*LONG, 17, 18], max_tokens=1)
    engine.finish()
    [stored] = events.take()
    assert isinstance(stored, StoredBlocks) and stored.parent is None and stored.namespace == ("", "", "")
    assert stored.tokens == [(7, 8, 9, 10), (11, 12, 13, 14), (15, 16, 17, 18)]
    assert stored.hashes == block_hashes(root_hash([]), [*LONG, 17, 18], 4)
    engine.add("b", [*LONG, 17, 18, 1, 2, 3, 4], max_tokens=1)
    engine.finish()
    [more] = events.take()
    assert isinstance(more, StoredBlocks) and more.parent == stored.hashes[-1] and more.tokens == [(1, 2, 3, 4)]


def test_namespaces_have_hashes_of_their_own() -> None:
    parts = [("", "", ""), ("x", "", ""), ("", "x", ""), ("", "", "x"), ("x", "x", ""), ("x", "x", "x")]
    assert len({root_hash(namespace_keys(part)) for part in parts}) == len(parts)
    assert root_hash(["ab", "c"]) != root_hash(["a", "bc"])


def test_what_is_evicted_and_reset_is_removed() -> None:
    engine, events = listened(num_blocks=6)
    engine.add("a", LONG, max_tokens=1, tenant="t")
    engine.finish()
    [stored] = events.take()
    assert isinstance(stored, StoredBlocks) and stored.namespace == ("t", "", "")
    engine.scheduler.reset_prefix_cache("t")
    [removed] = events.take()
    assert removed == RemovedBlocks(stored.hashes[::-1]), "a suffix before its prefix"
    assert not tree_hashes(engine)


def test_events_tell_what_the_tree_holds() -> None:
    """With few blocks and shared prefixes, also of sliding windows, and in any order of storing and evicting."""
    rng = random.Random(5)
    for window in (0, 0, 0, 6):
        engine, events = listened(num_blocks=rng.randint(12, 30))
        if window:
            from quire.core.limits import SchedulerLimits
            from quire.core.scheduler import Scheduler

            limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128, block_size=4)
            engine.scheduler = Scheduler(limits, 20, window=window)
            engine.scheduler.kv_blocks.tree.listener = events
        mirror = StoredMirror()
        for number in range(40):
            prompt = [1, 2, 3, 4, 5, 6, 7, 8][: rng.randint(0, 8)] + [
                rng.randint(1, 3) for _ in range(rng.randint(1, 9))
            ]
            engine.add(str(number), prompt, max_tokens=rng.randint(1, 9), tenant=rng.choice(["", "t"]))
            for _ in range(rng.randint(0, 6)):
                if engine.scheduler.has_work:
                    engine.step()
            mirror.apply(events.take())
            assert {name for event in mirror.events() for name in event.hashes} == tree_hashes(engine)
        assert len(mirror)


def test_events_tell_what_tiers_hold() -> None:
    """What the pool evicts is still told to be on the host or on disk, where it is."""
    rng, store = random.Random(6), FakeStore()
    engine, events = listened(num_blocks=20, num_host_blocks=24, store=store, offload=True)
    tiers = engine.scheduler.tiers
    assert tiers is not None
    tiers.tell(events)
    mirror, num_demoted = StoredMirror(), 0
    for number in range(60):
        prompt = [1, 2, 3, 4, 5, 6, 7, 8][: rng.randint(0, 8)] + [rng.randint(1, 3) for _ in range(rng.randint(1, 12))]
        engine.add(str(number), prompt, max_tokens=rng.randint(1, 9), tenant=rng.choice(["", "t"]))
        engine.finish()
        if number == 40:
            engine.scheduler.reset_prefix_cache("t")
        mirror.apply(events.take())
        places = {tier: {name for name, at in mirror.places().items() if tier in at} for tier in (POOL, HOST, DISK)}
        assert places[POOL] == tree_hashes(engine)
        assert places[HOST] == set(tiers._index._hashes.values())
        assert len(places[DISK]) <= len(store.blocks)
        num_demoted += len((places[HOST] | places[DISK]) - places[POOL])
    assert num_demoted and places[DISK]
    again = StoredMirror()
    again.apply(mirror.events())
    assert again.places() == mirror.places(), "a new listener knows the same"
    store.blocks.clear()
    engine.scheduler.reset_prefix_cache("")
    engine.scheduler.reset_prefix_cache("t")
    mirror.apply(events.take())
    assert not len(mirror)
