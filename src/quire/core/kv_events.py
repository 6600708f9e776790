"""What the prefix cache gains and loses, as events for routers outside of the engine.

A block is named by a hash of its cache namespace and of all tokens up to its end: engines and routers that see the same
tokens compute the same hash."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from quire.core.block_keys import BlockKey
from quire.core.prefix_tree import Namespace, NamespaceRoot, PrefixNode

HASH_BYTES = 8
POOL, HOST, DISK = "GPU", "CPU", "DISK"  # where a block is, in vLLM's words: the pool is "GPU" whatever it lies on
MAX_ON_DISK = 1 << 20  # blocks that are told to be on disk


@dataclass(slots=True)
class StoredBlocks:
    """Blocks that follow each other."""

    parent: int | None  # hash of the block before the first; None: the first begins its namespace
    namespace: Namespace | None  # where the parent is None
    hashes: list[int] = field(default_factory=list)
    tokens: list[tuple[int, ...]] = field(default_factory=list)  # by block


@dataclass(slots=True)
class KeptBlocks:
    """Blocks of the pool that are in a tier below it, too."""

    hashes: list[int]
    tier: str


@dataclass(slots=True)
class RemovedBlocks:
    hashes: list[int]
    tier: str = POOL


KVEvent = StoredBlocks | KeptBlocks | RemovedBlocks


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
    """Collects what the prefix tree and the tiers below it gain and lose until `take()`. Neighbours become one event.

    The store evicts blocks from the disk by itself: that is noticed when the pool evicts them, too."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = []
        self._on_disk: set[int] = set()  # blocks that were told to be there
        self.is_on_disk: Callable[[BlockKey], bool] = lambda key: False  # set where there is a disk

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
        self._remove(node.hash, POOL)
        if node.hash in self._on_disk and not self.is_on_disk(node.key):
            self._on_disk.discard(node.hash)
            self._remove(node.hash, DISK)

    def kept(self, hashed: int, tier: str) -> None:
        """A block is in a tier below the pool, too."""
        if not hashed or (tier == DISK and len(self._on_disk) >= MAX_ON_DISK):
            return
        if tier == DISK:
            self._on_disk.add(hashed)
        last = self._events[-1] if self._events else None
        if isinstance(last, KeptBlocks) and last.tier == tier:
            last.hashes.append(hashed)
        else:
            self._events.append(KeptBlocks([hashed], tier))

    def lost(self, hashed: int) -> None:
        """A block is no longer on the host."""
        if hashed:
            self._remove(hashed, HOST)

    def disk_cleared(self) -> None:
        """A tenant's blocks on disk are gone. All are announced as gone: others' are announced again when they are
        used."""
        if self._on_disk:
            self._events.append(RemovedBlocks(list(self._on_disk), DISK))
            self._on_disk.clear()

    def _remove(self, hashed: int, tier: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, RemovedBlocks) and last.tier == tier:
            last.hashes.append(hashed)
        else:
            self._events.append(RemovedBlocks([hashed], tier))

    def take(self) -> list[KVEvent]:
        events, self._events = self._events, []
        return events


@dataclass(slots=True)
class _StoredBlock:
    parent: int | None
    namespace: Namespace | None
    tokens: tuple[int, ...]
    places: set[str] = field(default_factory=lambda: {POOL})


class StoredMirror:
    """The blocks that are stored after all events so far: a new listener begins with these."""

    def __init__(self) -> None:
        self._blocks: dict[int, _StoredBlock] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def places(self) -> dict[int, frozenset[str]]:
        """The places of each block, by its hash: pool, host, disk."""
        return {name: frozenset(block.places) for name, block in self._blocks.items()}

    def apply(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            match event:
                case StoredBlocks():
                    self._store(event)
                case KeptBlocks():
                    for block in filter(None, map(self._blocks.get, event.hashes)):
                        block.places.add(event.tier)
                case RemovedBlocks():
                    self._remove(event)

    def _store(self, event: StoredBlocks) -> None:
        parent, namespace = event.parent, event.namespace
        for name, tokens in zip(event.hashes, event.tokens, strict=True):
            old = self._blocks.get(name)
            self._blocks[name] = _StoredBlock(parent, namespace, tokens)
            if old is not None:
                self._blocks[name].places |= old.places
            parent, namespace = name, None

    def _remove(self, event: RemovedBlocks) -> None:
        for name in event.hashes:
            if (block := self._blocks.get(name)) is not None:
                block.places.discard(event.tier)
                if not block.places:
                    del self._blocks[name]

    def events(self) -> Iterator[KVEvent]:
        """A block comes after the one that it follows, unless that one was evicted before it; then, where they are
        but for the pool."""
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
        for tier in (HOST, DISK):
            if kept := [name for name, block in self._blocks.items() if tier in block.places]:
                yield KeptBlocks(kept, tier)
        if demoted := [name for name, block in self._blocks.items() if POOL not in block.places]:
            yield RemovedBlocks(demoted)
