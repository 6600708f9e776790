"""KV events: from an engine's prefix tree to the gateway's index, over a network that loses, doubles and reorders."""

import random
from dataclasses import dataclass, field
from itertools import count

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.core.kv_events import KVEvents, block_hashes, root_hash
from quire.core.prefix_tree import EVICTED, PrefixNode, PrefixTree
from quire.engine.kv_batch_log import SNAPSHOT, BatchLog, Numbered
from quire.gateway.kv_batches import AllBlocksCleared, BadKVBatch, BlockRemoved, BlockStored, KVBatch, decode_batch
from quire.gateway.kv_follower import BatchFollower, ReplayRequest
from quire.gateway.kv_index import KVIndex
from trials import rounds

SIZE = 4
CLOCK = count(1)


class Tree:
    """A prefix tree that gains and loses blocks at random, and the log of its events."""

    def __init__(self, buffer_steps: int) -> None:
        self.tree, self.events = PrefixTree(SIZE), KVEvents()
        self.tree.listener = self.events
        self.log = BatchLog(SIZE, buffer_steps, clock=lambda: float(next(CLOCK)))
        self.first = self.log.begin()
        self._ids = count()
        self._nodes: list[PrefixNode] = []

    def change(self, rng: random.Random) -> Numbered:
        for _ in range(rng.randint(1, 4)):
            leaves = [node for node in self._nodes if not node.children]
            if leaves and rng.random() < 0.4:
                self._remove(rng.choice(leaves))
            else:
                parent = rng.choice([None, *self._nodes])
                tokens = tuple(rng.randint(1, 2) for _ in range(SIZE))
                namespace = ("", rng.choice(["", "salt"]), "")
                if (node := self.tree.insert(namespace, parent, tokens, next(self._ids))) is not None:
                    self._nodes.append(node)
        return self.log.append(self.events.take())

    def _remove(self, node: PrefixNode) -> None:
        self._nodes.remove(node)
        self.tree.remove(node.block)

    @property
    def hashes(self) -> set[int]:
        return {node.hash for node in self.tree.walk() if node.block != EVICTED}


@dataclass
class Network:
    """Batches on their way. Some are lost, some come twice, some late; answers come whole or not at all."""

    rng: random.Random
    loss: float
    in_flight: list[Numbered] = field(default_factory=list)

    def send(self, batch: Numbered) -> None:
        for _ in range(self.rng.choice([1, 1, 2])):
            if self.rng.random() >= self.loss:
                self.in_flight.insert(self.rng.randint(max(len(self.in_flight) - 3, 0), len(self.in_flight)), batch)

    def deliver(self, follower: BatchFollower, most: int) -> None:
        for _ in range(min(most, len(self.in_flight))):
            number, payload = self.in_flight.pop(0)
            follower.receive(number, decode_batch(payload))


def ask(engine: Tree, request: ReplayRequest, has_snapshots: bool) -> list[tuple[int, KVBatch]]:
    start = SNAPSHOT if request.start is None else request.start
    replayed = [] if start == SNAPSHOT and not has_snapshots else engine.log.replay(start)
    return [(number, decode_batch(payload)) for number, payload in replayed]


def settle(engine: Tree, follower: BatchFollower, has_snapshots: bool = True) -> None:
    follower.check()
    for _ in range(6):
        if (request := follower.wanted) is not None:
            follower.answered(request, ask(engine, request, has_snapshots))
    assert follower.wanted is None and follower.in_step


@pytest.mark.trial
@given(
    seed=st.integers(0, 1 << 30),
    loss=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    buffer_steps=st.sampled_from([1, 3, 10_000]),
    restarts=st.sampled_from([0.0, 0.05]),
)
@settings(max_examples=rounds(100), deadline=None, suppress_health_check=list(HealthCheck))
def test_the_index_is_the_engines_after_quiescence(seed: int, loss: float, buffer_steps: int, restarts: float) -> None:
    """Whatever is dropped, doubled, reordered and late, and whenever the engine is restarted."""
    rng = random.Random(seed)
    index = KVIndex(10_000)
    index.follow(3)
    follower = BatchFollower(lambda events: index.apply(3, events))
    engine, network = Tree(buffer_steps), Network(rng, loss)
    network.send(engine.first)
    for _ in range(rng.randint(1, 60)):
        if rng.random() < restarts:  # a connection ends with its engine, and what was on it with them
            engine, network.in_flight = Tree(buffer_steps), []
            follower.disconnected()
            network.send(engine.first)
        network.send(engine.change(rng))
        if rng.random() < 0.7:
            network.deliver(follower, rng.randint(0, 4))
        if rng.random() < 0.3 and (request := follower.wanted) is not None:
            answer = ask(engine, request, True)
            network.deliver(follower, rng.randint(0, 2))
            if rng.random() < 0.8:
                follower.answered(request, answer)
    network.deliver(follower, 1000)
    settle(engine, follower)
    assert index.blocks(3) == engine.hashes
    index.check()


@pytest.mark.trial
@given(seed=st.integers(0, 1 << 30), loss=st.sampled_from([0.0, 0.3, 0.9]))
@settings(max_examples=rounds(50), deadline=None)
def test_an_engine_without_snapshots_is_followed_by_its_replay(seed: int, loss: float) -> None:
    """vLLM's: all is replayed as long as its buffer reaches back to the first batch."""
    rng = random.Random(seed)
    index, engine, network = KVIndex(10_000), Tree(10_000), Network(rng, loss)
    follower = BatchFollower(lambda events: index.apply(0, events))
    network.send(engine.first)
    for _ in range(30):
        network.send(engine.change(rng))
        network.deliver(follower, rng.randint(0, 3))
        if (request := follower.wanted) is not None and rng.random() < 0.5:
            follower.answered(request, ask(engine, request, False))
    network.deliver(follower, 1000)
    settle(engine, follower, has_snapshots=False)
    assert index.blocks(0) == engine.hashes


@pytest.mark.trial
@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=rounds(50), deadline=None)
def test_without_a_replay_nothing_wrong_is_believed(seed: int) -> None:
    """Of an engine that cannot be asked, what was lost is not known, but nothing is believed that was evicted before
    the last gap."""
    rng = random.Random(seed)
    index, engine, network = KVIndex(10_000), Tree(1), Network(rng, 0.3)
    follower = BatchFollower(lambda events: index.apply(0, events), can_ask=False)
    network.send(engine.first)
    for _ in range(30):
        network.send(engine.change(rng))
    network.in_flight.sort(key=lambda batch: batch[0])  # of one connection: in order
    network.deliver(follower, 1000)
    number, payload = engine.change(rng)
    follower.receive(number + 1, decode_batch(payload))  # the one before it is lost
    assert follower.wanted is None and len(index.blocks(0)) <= 4
    index.check()


def test_another_engine_that_counts_further_is_noticed() -> None:
    """By its copy of the last batch that is known, and by a number that was used before."""
    rng = random.Random(1)
    index = KVIndex(100)
    follower = BatchFollower(lambda events: index.apply(0, events))
    first, second = Tree(100), Tree(100)
    settle(first, follower)
    for _ in range(3):
        number, payload = first.change(rng)
        follower.receive(number, decode_batch(payload))
    batches = [second.change(rng) for _ in range(9)]
    follower.receive(batches[-1][0], decode_batch(batches[-1][1]))
    settle(second, follower)
    assert index.blocks(0) == second.hashes != first.hashes
    third = Tree(100)
    number, payload = third.change(rng)
    follower.receive(number, decode_batch(payload))
    settle(third, follower)
    assert index.blocks(0) == third.hashes


def test_what_comes_twice_or_late_is_no_reason_to_ask() -> None:
    rng = random.Random(2)
    follower, engine = BatchFollower(lambda events: None), Tree(100)
    settle(engine, follower)
    batches = [engine.change(rng) for _ in range(3)]
    for number, payload in (*batches, *batches[::-1]):
        follower.receive(number, decode_batch(payload))
    assert follower.wanted is None and follower.num_gaps == 0


def test_what_is_left_of_an_engine_that_is_gone_is_not_taken() -> None:
    """A batch of it that waited for one before it has a number that the next engine comes to."""
    rng = random.Random(3)
    index = KVIndex(100)
    follower = BatchFollower(lambda events: index.apply(0, events))
    first = Tree(100)
    settle(first, follower)
    left = [first.change(rng) for _ in range(4)][-1]
    second = Tree(100)
    follower.receive(left[0], decode_batch(left[1]))
    settle(second, follower)
    for _ in range(left[0] + 2):
        number, payload = second.change(rng)
        follower.receive(number, decode_batch(payload))
    assert follower.in_step and index.blocks(0) == second.hashes


# -- the format


def stored(**changes: object) -> dict[str, object]:
    fields = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return fields | changes


def indexed(*events: object) -> KVIndex:
    index = KVIndex(100)
    index.apply(0, decode_batch(msgspec.msgpack.encode([1.5, list(events), 0])).events)
    index.check()
    return index


PLAIN = block_hashes(root_hash([]), [1, 2, 3, 4], 2)


def test_batches_of_all_versions_of_vllm_are_read() -> None:
    """Maps in newer ones, arrays with ever more fields in older ones; hashes are numbers or bytes."""
    removed = {"type": "BlockRemoved", "block_hashes": [12], "medium": "GPU", "group_idx": 0}
    assert indexed(stored(), removed).blocks(0) == {PLAIN[0]}
    old = ["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None]
    assert indexed(old, ["BlockRemoved", [12]]).blocks(0) == {PLAIN[0]}
    assert indexed([*old, "GPU", None, [None, None], 0]).blocks(0) == set(PLAIN)
    in_bytes = stored(block_hashes=[b"a" * 32], token_ids=[1, 2], extra_keys=[None])
    child = stored(block_hashes=[b"b" * 32], parent_block_hash=b"a" * 32, token_ids=[3, 4], extra_keys=[None])
    assert indexed(in_bytes, child).blocks(0) == set(PLAIN)
    assert not indexed(stored(), ["AllBlocksCleared"]).blocks(0)
    assert not indexed(stored(), {"type": "AllBlocksCleared"}).blocks(0)


def test_blocks_of_other_kinds_do_not_count() -> None:
    assert not indexed(stored(group_idx=1), {"type": "SomethingNew"}).blocks(0)


def removed(medium: str, *names: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": medium}


def test_a_block_counts_until_it_is_in_no_tier() -> None:
    """vLLM tells what it offloads by names alone."""
    kept = stored(medium="CPU", token_ids=[], block_size=0, extra_keys=None)
    index = indexed(stored(), kept, removed("GPU", 11, 12))
    assert index.blocks(0) == set(PLAIN) == set(index.demoted)
    index = indexed(stored(), kept, removed("GPU", 11, 12), removed("CPU", 12))
    assert index.blocks(0) == {PLAIN[0]}
    index = indexed(stored(), kept, removed("CPU", 11, 12))
    assert index.blocks(0) == set(PLAIN) and not index.demoted
    index = indexed(stored(), kept, removed("GPU", 11, 12), stored())
    assert index.blocks(0) == set(PLAIN) and not index.demoted, "it is in the pool again"
    assert not indexed(kept).blocks(0), "nothing is known of them but names"
    assert indexed(stored(medium="DISK")).demoted.keys() == set(PLAIN)
    assert indexed(stored(), removed("CPU", 11)).blocks(0) == set(PLAIN)
    with pytest.raises(BadKVBatch, match="medium"):
        indexed(stored(medium=3))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "keep", "remove"]),
            st.sampled_from(["GPU", "CPU", "DISK", "?"]),
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
def test_places_are_those_of_a_plain_model(steps: list[tuple[str, str, int]]) -> None:
    index, places = KVIndex(100), dict[int, set[str]]()
    for kind, medium, number in steps:
        if kind == "store":
            event = stored(block_hashes=[number], token_ids=[number, number], medium=medium, extra_keys=[None])
            places.setdefault(number, set()).add(medium)
        elif kind == "keep":
            event = stored(block_hashes=[number], token_ids=[], medium="CPU", extra_keys=None)
            if number in places:
                places[number].add("CPU")
        else:
            event = removed(medium, number)
            places.get(number, set()).discard(medium)
            places = {name: held for name, held in places.items() if held}
        index.apply(0, decode_batch(msgspec.msgpack.encode([1.5, [event], 0])).events)
        index.check()
    named = {number: block_hashes(root_hash([]), [number, number], 2)[0] for number in range(6)}
    assert index.blocks(0) == {named[number] for number in places}
    assert index.demoted.keys() == {named[number] for number, held in places.items() if "GPU" not in held}


def test_salts_adapters_and_images_tell_blocks_apart() -> None:
    salted = indexed(stored(extra_keys=[["pepper"], None])).blocks(0)
    assert salted == set(block_hashes(root_hash(["pepper"]), [1, 2, 3, 4], 2))
    adapter = indexed(stored(lora_name="l", extra_keys=[["l"], ["l"]])).blocks(0)
    image = indexed(stored(extra_keys=[None, [["image-hash", 0]]])).blocks(0)
    assert image & set(PLAIN) == {PLAIN[0]} and not (salted | adapter) & set(PLAIN) and not salted & adapter


def test_the_gateways_own_tenant_is_no_difference() -> None:
    event = decode_batch(msgspec.msgpack.encode([1.0, [stored(extra_keys=[["tenant:gateway", "s"], None])]])).events
    index = KVIndex(10)
    index.apply(0, event, own_key="tenant:gateway")
    index.apply(1, event, own_key="tenant:other")
    assert index.blocks(0) == set(block_hashes(root_hash(["s"]), [1, 2, 3, 4], 2)) != index.blocks(1)


@pytest.mark.parametrize(
    "batch",
    [
        7,
        [],
        [1.0],
        [1.0, 5],
        ["x", []],
        [1.0, [5]],
        [1.0, [stored(block_hashes=[])]],
        [1.0, [stored(block_hashes=["a", "b"])]],
        [1.0, [stored(token_ids=[1, 2, 3])]],
        [1.0, [stored(token_ids=[1, 2, 3, 1 << 40])]],
        [1.0, [stored(token_ids=[1, 2, 3, "x"])]],
        [1.0, [stored(parent_block_hash=[1])]],
        [1.0, [stored(block_size=None)]],
        [1.0, [["BlockStored"]]],
    ],
)
def test_a_batch_that_is_none_is_refused(batch: object) -> None:
    with pytest.raises(BadKVBatch):
        decode_batch(msgspec.msgpack.encode(batch))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_refused(data: bytes) -> None:
    try:
        decode_batch(data)
    except BadKVBatch:
        return


def test_an_index_is_bounded_and_forgets_workers() -> None:
    index = KVIndex(1)
    events = [BlockStored([1, 2], None, [1, 2, 3, 4], 2, [[], []])]
    index.apply(0, events)
    index.apply(1, events)
    assert index.num_blocks(0) == index.num_blocks(1) == 1
    index.forget(0)
    index.check()
    assert index.blocks(1) == {PLAIN[0]} and index.longest(PLAIN, 3) == (1, 2)
    index.apply(1, [BlockRemoved([1, 99]), AllBlocksCleared()])
    assert index.longest(PLAIN, 3) == (0, 0) and not index.holders
