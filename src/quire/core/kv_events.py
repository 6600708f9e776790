"""What the prefix cache gains and loses, as events for routers outside of the engine.

A block is named by a hash of its cache namespace and of all tokens up to its end: engines and routers that see the same
tokens compute the same hash."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from quire.core.prefix_tree import Namespace, NamespaceRoot, PrefixNode

HASH_BYTES = 8


@dataclass(slots=True)
class StoredBlocks:
    """Blocks that follow each other."""

    parent: int | None  # hash of the block before the first; None: the first begins its namespace
    namespace: Namespace | None  # where the parent is None
    hashes: list[int] = field(default_factory=list)
    tokens: list[tuple[int, ...]] = field(default_factory=list)  # by block


@dataclass(slots=True)
class RemovedBlocks:
    hashes: list[int]


KVEvent = StoredBlocks | RemovedBlocks


def root_hash(keys: Iterable[str]) -> int:
    """What the first block of a cache namespace follows. `keys` tell the namespace apart; none: that of all."""
    digest = blake2b(digest_size=HASH_BYTES)
    for key in keys:
        encoded = key.encode(errors="surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return int.from_bytes(digest.digest())


def namespace_keys(namespace: Namespace) -> list[str]:
    """The parts of a namespace that are given, each told apart from the others."""
    tenant, salt, adapter = namespace
    named = ((f"tenant:{tenant}", tenant), (salt, salt), (f"adapter:{adapter}", adapter))
    return [key for key, given in named if given]


def block_hashes(root: int, tokens: Sequence[int], block_size: int) -> list[int]:
    """The hash of each full block of `tokens`, which are 32-bit integers."""
    packed, step = array("i", tokens).tobytes(), block_size * 4
    digest, hashes = root.to_bytes(HASH_BYTES), []
    for start in range(0, len(packed) - step + 1, step):
        digest = blake2b(digest + packed[start : start + step], digest_size=HASH_BYTES).digest()
        hashes.append(int.from_bytes(digest))
    return hashes


class KVEvents:
    """Collects what the prefix tree gains and loses until `take()`. Neighbours become one event."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = []

    def stored(self, node: PrefixNode) -> None:
        parent = node.parent
        assert parent is not None
        is_first = isinstance(parent, NamespaceRoot)
        if isinstance(parent, NamespaceRoot) and not parent.hash:
            parent.hash = root_hash(namespace_keys(parent.namespace))
        node.hash = block_hashes(parent.hash, node.tokens, len(node.tokens))[0]
        last = self._events[-1] if self._events else None
        if is_first or not isinstance(last, StoredBlocks) or last.hashes[-1] != parent.hash:
            namespace = parent.namespace if isinstance(parent, NamespaceRoot) else None
            last = StoredBlocks(None if is_first else parent.hash, namespace)
            self._events.append(last)
        last.hashes.append(node.hash)
        last.tokens.append(node.tokens)

    def removed(self, node: PrefixNode) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, RemovedBlocks):
            last.hashes.append(node.hash)
        else:
            self._events.append(RemovedBlocks([node.hash]))

    def take(self) -> list[KVEvent]:
        events, self._events = self._events, []
        return events


@dataclass(slots=True)
class _StoredBlock:
    parent: int | None
    namespace: Namespace | None
    tokens: tuple[int, ...]


class StoredMirror:
    """What is stored after all events so far: a new listener begins with it."""

    def __init__(self) -> None:
        self._blocks: dict[int, _StoredBlock] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            if isinstance(event, RemovedBlocks):
                for name in event.hashes:
                    self._blocks.pop(name, None)
                continue
            parent, namespace = event.parent, event.namespace
            for name, tokens in zip(event.hashes, event.tokens, strict=True):
                self._blocks[name] = _StoredBlock(parent, namespace, tokens)
                parent, namespace = name, None

    def events(self) -> Iterator[StoredBlocks]:
        """A block comes after the one that it follows, unless that one was evicted before it."""
        last: StoredBlocks | None = None
        for name, block in self._blocks.items():
            if last is None or block.parent is None or block.parent != last.hashes[-1]:
                if last is not None:
                    yield last
                last = StoredBlocks(block.parent, block.namespace)
            last.hashes.append(name)
            last.tokens.append(block.tokens)
        if last is not None:
            yield last
