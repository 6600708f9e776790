"""The slots of LoRA adapters: an adapter that a step uses is in one of a fixed number of slots."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet


class AdapterSlots:
    """An unused adapter stays in its slot until another needs it; the least recently used one is evicted."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: dict[str, int] = {}  # adapter -> its slot, the least recently used first
        self._users: Counter[str] = Counter()  # running sequences by adapter

    def has_room(self, adapter: str, wanted: AbstractSet[str] = frozenset()) -> bool:
        """Whether a sequence can start with this adapter now. "" is no adapter.

        `wanted` are adapters that earlier sequences wait for. For each of them without a slot, the least recently used
        adapter in a slot takes no new sequences: its slot is free once those that run with it have ended."""
        if not adapter:
            return True
        if adapter in wanted:
            return False
        if adapter in self._slots:
            return adapter not in list(self._slots)[: len(wanted - self._slots.keys())]
        return len(self._users) < self.num_slots

    def __getitem__(self, adapter: str) -> int:
        return self._slots[adapter] if adapter else -1

    def assign_slot(self, adapter: str) -> int | None:
        """The slot that the adapter has to be loaded into; None if it is in one. Requires `has_room`."""
        if not adapter:
            return None
        if (slot := self._slots.pop(adapter, None)) is not None:
            self._slots[adapter] = slot
            return None
        slot = len(self._slots)
        if slot == self.num_slots:
            slot = self._slots.pop(next(other for other in self._slots if other not in self._users))
        self._slots[adapter] = slot
        return slot

    def hold(self, adapter: str) -> None:
        """A sequence starts to run with this adapter."""
        if adapter:
            assert adapter in self._slots, f"a sequence runs with `{adapter}`, which is in no slot"
            self._users[adapter] += 1

    def release(self, adapter: str) -> None:
        if adapter:
            self._users[adapter] -= 1
            if not self._users[adapter]:
                del self._users[adapter]

    def check(self, running: Iterable[str]) -> None:
        """Assert every invariant, given the adapter of every running sequence."""
        users = Counter(adapter for adapter in running if adapter)
        assert users == self._users, f"adapters are used {users}, and {self._users} counted"
        assert users.keys() <= self._slots.keys(), "a sequence runs with an adapter that is in no slot"
        assert sorted(self._slots.values()) == list(range(len(self._slots))), "two adapters are in one slot"
        assert len(self._slots) <= self.num_slots, f"{len(self._slots)} adapters in {self.num_slots} slots"
