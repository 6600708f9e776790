"""Which adapters can be used in a step: each of those in use has a slot, and there are only so many."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet


class AdapterSlots:
    """An adapter that nobody runs with stays in its slot until another needs it; the one not used for longest goes."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: dict[str, int] = {}  # adapter -> its slot, the one not used for longest first
        self._users: Counter[str] = Counter()  # sequences that run with it

    def has_room(self, adapter: str, wanted: AbstractSet[str] = frozenset()) -> bool:
        """Whether a sequence can run with it now. "" is no adapter.

        `wanted` are adapters that others wait for, who came before. As many of those in use are given up for them as
        have no slot: nobody new runs with these, so they are free once what runs now has ended."""
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
        """Give it a slot, which it has to be put into, unless it has one. There has to be room."""
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
        """A sequence begins to run with it."""
        if adapter:
            assert adapter in self._slots, f"a sequence runs with `{adapter}`, which is in no slot"
            self._users[adapter] += 1

    def release(self, adapter: str) -> None:
        if adapter:
            self._users[adapter] -= 1
            if not self._users[adapter]:
                del self._users[adapter]

    def check(self, running: Iterable[str]) -> None:
        """Given the adapter of every sequence that runs."""
        users = Counter(adapter for adapter in running if adapter)
        assert users == self._users, f"adapters are used {users}, and {self._users} counted"
        assert users.keys() <= self._slots.keys(), "a sequence runs with an adapter that is in no slot"
        assert sorted(self._slots.values()) == list(range(len(self._slots))), "two adapters are in one slot"
        assert len(self._slots) <= self.num_slots, f"{len(self._slots)} adapters in {self.num_slots} slots"
