"""Routing by KV events: the worker that holds most of a prompt."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from quire.core.block_pool import BlockPool
from quire.core.kv_events import KVEvents, block_hashes, root_hash
from quire.core.prefix_tree import PrefixTree
from quire.engine.kv_batch_log import BatchLog
from quire.gateway.config import CacheAware, Faults, WorkerEntry
from quire.gateway.kv_batches import BlockRemoved, BlocksKept, BlockStored, decode_batch
from quire.gateway.kv_index import KVIndex
from quire.gateway.policies import CacheAwarePolicy, PickContext, Policy, RoundRobin
from quire.gateway.prefix_index import EXPECTED_SECONDS, EventPrefixes
from quire.gateway.worker import Worker

SIZE = 4


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def prefixes() -> Iterator[tuple[EventPrefixes, KVIndex, Clock]]:
    index, clock = KVIndex(1000), Clock()
    index.follow(0)
    index.follow(1)
    yield EventPrefixes(index, 1000, clock), index, clock


def held(index: KVIndex, worker: int, tokens: list[int]) -> None:
    names: list[int | bytes] = list(block_hashes(root_hash([]), tokens, 2))
    index.apply(worker, [BlockStored(names, None, tokens, 2, [[] for _ in names])])


def test_the_worker_that_holds_most_is_found(prefixes: tuple[EventPrefixes, KVIndex, Clock]) -> None:
    known, index, _ = prefixes
    tokens = list(range(20))
    blocks = block_hashes(root_hash([]), tokens, 2)
    held(index, 0, tokens[:6])
    held(index, 1, tokens[:14])
    assert known.longest(blocks, 3) == (7, 2) and known.longest(blocks, 1) == (3, 1)
    index.clear(1)
    assert known.longest(blocks, 3) == (3, 1)


def test_a_pool_is_asked_before_a_tier_and_a_tier_before_none(
    prefixes: tuple[EventPrefixes, KVIndex, Clock],
) -> None:
    known, index, _ = prefixes
    tokens = list(range(20))
    blocks = block_hashes(root_hash([]), tokens, 2)
    names: list[int | bytes] = list(blocks)
    for worker in (0, 1):
        held(index, worker, tokens)
    index.apply(0, [BlocksKept(names, "DISK"), BlockRemoved(names)])
    assert known.longest(blocks, 3) == (10, 2), "both have it, one of them at hand"
    index.apply(1, [BlockRemoved(names)])
    assert known.longest(blocks, 3) == (10, 1), "reading it is quicker than computing it"
    index.apply(0, [BlockRemoved(names, "DISK")])
    assert known.longest(blocks, 3) == (0, 0) and not index.demoted


def test_what_was_just_sent_is_expected_for_a_while(prefixes: tuple[EventPrefixes, KVIndex, Clock]) -> None:
    """Requests of the same prompt that come together go to one worker, before its events have come."""
    known, index, clock = prefixes
    tokens = list(range(20))
    blocks = block_hashes(root_hash([]), tokens, 2)
    held(index, 0, tokens[:6])
    known.insert(blocks, 0, 3)
    assert known.longest(blocks, 3) == (10, 1)
    for _ in range(2):
        clock.now += EXPECTED_SECONDS + 1
        known.insert(block_hashes(5, [1, 2], 2), 1, 0)
    assert known.longest(blocks, 3) == (3, 1), "it did not come: only what events say counts"


def test_a_worker_without_events_has_what_it_was_sent(prefixes: tuple[EventPrefixes, KVIndex, Clock]) -> None:
    known, index, _ = prefixes
    blocks = block_hashes(root_hash([]), list(range(20)), 2)
    known.insert(blocks, 2, 0)
    assert known.longest(blocks, 7) == (10, 4) and known.longest(blocks, 3) == (0, 0)
    held(index, 0, list(range(20)))
    assert known.longest(blocks, 7) == (10, 5)


def test_what_conversations_share_is_where_they_part(prefixes: tuple[EventPrefixes, KVIndex, Clock]) -> None:
    known, index, _ = prefixes
    shared = list(range(8))
    held(index, 0, shared)
    for own in range(100, 103):
        blocks = block_hashes(root_hash([]), [*shared, own, own, own, own], 2)
        assert known.num_shared(blocks[:4]) == 0
        for _ in range(5):  # the same one again is no other conversation
            known.insert(blocks, 0, known.longest(blocks, 1)[0])
    assert known.num_shared(blocks) == 4


class EngineCache:
    """The prefix cache of an engine, with the tree and the pool of the scheduler, and its events."""

    def __init__(self, num_blocks: int) -> None:
        self.tree = PrefixTree(SIZE)
        self.pool, self.events, self.log = BlockPool(num_blocks, self.tree), KVEvents(), BatchLog(SIZE, 10)
        self.tree.listener = self.events

    def serve(self, tokens: list[int]) -> int:
        """-> how many leading blocks it had"""
        path = self.tree.match(("", "", ""), None, tokens, 0, len(tokens) // SIZE)
        table = [node.block for node in path]
        for block in table:
            self.pool.hold(block)
        node = path[-1] if path else None
        for place in range(len(path), len(tokens) // SIZE):
            table.append(self.pool.take())
            piece = tuple(tokens[place * SIZE : (place + 1) * SIZE])
            node = self.tree.insert(("", "", ""), node, piece, table[-1])
        self.pool.release(table)
        return len(path)


def hit_rate(policy: Policy, num_workers: int, num_blocks: int, index: KVIndex) -> float:
    """Of conversations that take turns at random and begin anew now and then, all with the same instructions; 16
    requests are in flight."""
    rng = random.Random(5)
    workers = make_workers(num_workers)
    caches = [EngineCache(num_blocks // num_workers) for _ in workers]

    def more(count: int) -> list[int]:
        return [rng.randrange(50_000) for _ in range(count * SIZE)]

    instructions = more(16)
    talks = [instructions + more(4) for _ in range(80)]
    hits = total = 0
    in_flight: list[tuple[Worker, int]] = []
    for _ in range(600):
        number = rng.randrange(len(talks))
        tokens = talks[number]
        worker = policy.pick(workers, PickContext("t", blocks=block_hashes(root_hash([]), tokens, SIZE)))
        worker.begin(len(tokens))
        in_flight.append((worker, len(tokens)))
        if len(in_flight) > 16:
            ended, size = in_flight.pop(0)
            ended.end(size)
        cache = caches[worker.bit]
        hits += cache.serve(tokens)
        total += len(tokens) // SIZE
        index.apply(worker.bit, decode_batch(cache.log.append(cache.events.take())[1]).events)
        talks[number] = tokens + more(2) if len(tokens) < 60 * SIZE else instructions + more(4)
    return hits / total


def make_workers(count: int) -> list[Worker]:
    async def made() -> list[Worker]:
        entries = [WorkerEntry(url=f"http://h{number}:1", models=["m"]) for number in range(count)]
        return [Worker(entry, Faults(), bit) for bit, entry in enumerate(entries)]

    return asyncio.run(made())


def test_routing_by_events_hits_nearly_as_often_as_one_large_cache() -> None:
    """There is room for half of the conversations: what was evicted counts."""
    num_blocks, index = 1600, KVIndex(10_000)
    for worker in range(4):
        index.follow(worker)
    one = hit_rate(RoundRobin(), 1, num_blocks, KVIndex(10_000))
    exact = hit_rate(CacheAwarePolicy(CacheAware(), index), 4, num_blocks, index)
    turns = hit_rate(RoundRobin(), 4, num_blocks, KVIndex(10_000))
    assert exact > 0.97 * one > turns, f"one {one:.3f}, by events {exact:.3f}, round_robin {turns:.3f}"
