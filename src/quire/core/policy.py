"""Scheduling policies. A policy gives a request its key, once: the smaller key runs earlier and is preempted later.

A resumed request goes before others: a client has read a part of its answer, and waits for the next token."""

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter

from quire.core.errors import BadRequest
from quire.core.request import Request
from quire.core.sequence import PolicyKey, Sequence

Policy = Callable[[Request, int], PolicyKey]


def fcfs(request: Request, number: int) -> PolicyKey:
    """First come, first served; `number` counts submissions and decides ties."""
    return (not any(request.resumed), request.arrival, number)


def priority(request: Request, number: int) -> PolicyKey:
    """The lower priority number first, then first come, first served."""
    return (request.priority, not any(request.resumed), request.arrival, number)


def fair(request: Request, number: int) -> PolicyKey:
    """The lower priority number first, then the tenant that has had least of its share; core/fair_order.py counts."""
    return (request.priority, not any(request.resumed), 0.0, request.arrival, number)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority, "fair": fair}


def find_policy(name: str) -> Policy:
    if name not in POLICIES:
        raise BadRequest(
            f"there is no scheduling policy `{name}`", f"choose from {', '.join(POLICIES)}", param="policy"
        )
    return POLICIES[name]


_KEY = attrgetter("key")


class PolicyQueue:
    """Sequences in policy order. Keys are distinct, so bisection by key locates a sequence."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.items)

    def push(self, seq: Sequence) -> None:
        insort(self.items, seq, key=_KEY)

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self.items, seq.key, key=_KEY)
        assert self.items[index] is seq, f"the queue has another sequence at the position of {seq.key}"
        del self.items[index]

    def sort(self) -> None:
        """Keys have changed."""
        self.items.sort(key=_KEY)

    def check(self) -> None:
        keys = [seq.key for seq in self.items]
        assert keys == sorted(set(keys)), f"the queue is out of order: {keys}"
