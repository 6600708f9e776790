"""Which replica a request goes to."""

from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter
from random import Random

from quire.planning.replica import Replica
from quire.planning.workload import Arrival

_load = attrgetter("load")
Router = Callable[[Sequence[Replica], Arrival, int], Replica]

PREFIX_TOKENS = 16  # of a prompt, by which its replica is chosen
MAX_IMBALANCE = 16  # requests that this replica may have more than the least busy one


def round_robin(replicas: Sequence[Replica], arrival: Arrival, number: int) -> Replica:
    return replicas[number % len(replicas)]


def least_busy(replicas: Sequence[Replica], arrival: Arrival, number: int) -> Replica:
    """The fewest requests in flight."""
    return min(replicas, key=_load)


def power_of_two(replicas: Sequence[Replica], arrival: Arrival, number: int) -> Replica:
    """The less busy of two that are drawn."""
    rng = Random(number)
    return min(rng.choice(replicas), rng.choice(replicas), key=_load)


def by_prefix(replicas: Sequence[Replica], arrival: Arrival, number: int) -> Replica:
    """The replica that prompts with these first tokens went to, unless it is much busier than the least busy."""
    chosen = replicas[hash(tuple(islice(arrival.prompt_ids, PREFIX_TOKENS))) % len(replicas)]
    least = least_busy(replicas, arrival, number)
    return least if chosen.load > least.load + MAX_IMBALANCE else chosen


ROUTERS: dict[str, Router] = {
    "round-robin": round_robin,
    "least-busy": least_busy,
    "power-of-two": power_of_two,
    "prefix": by_prefix,
}
