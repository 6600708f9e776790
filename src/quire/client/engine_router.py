"""Which engine of a group has a request: the one with its prefix, and another when that one dies or is full."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from quire.client.engine_client import EngineClient
from quire.client.inflight import GenerateStream, InFlight
from quire.client.submissions import is_suspect
from quire.core.known_prefixes import ApproximatePrefixes, pick_holder
from quire.core.kv_events import block_hashes, namespace_keys, root_hash
from quire.core.records import SchedulerStats
from quire.core.request import Request

log = logging.getLogger("quire.engine")

BLOCK_TOKENS = 64  # of the blocks that are remembered
MAX_BLOCKS = 1 << 18


@dataclass(frozen=True, slots=True)
class RouterThresholds:
    """When the cache decides. Names and meanings are those of the gateway's policy `cache_aware`."""

    cache_threshold: float = 0.5
    balance_abs_threshold: int = 8  # lower than a gateway's: one engine computes all of its requests in each step
    balance_rel_threshold: float = 1.5


THRESHOLDS = RouterThresholds()


class _Member:
    """An engine as routing sees it."""

    def __init__(self, client: EngineClient, bit: int) -> None:
        self.client, self.bit, self.mask = client, bit, 1 << bit

    @property
    def load(self) -> float:
        return self.client.num_in_flight


class EngineRouter:
    """From `started` on, requests also move from engine to engine."""

    def __init__(self, clients: Sequence[EngineClient], thresholds: RouterThresholds = THRESHOLDS) -> None:
        self._members = [_Member(client, bit) for bit, client in enumerate(clients)]
        self._thresholds = thresholds
        self._known = ApproximatePrefixes(MAX_BLOCKS)

    def started(self) -> None:
        """The cache that an engine has is what is remembered of it, as far as it goes."""
        info = self._members[0].client.info
        num_blocks = len(self._members) * info.num_blocks * info.block_size // BLOCK_TOKENS
        self._known = ApproximatePrefixes(min(max(num_blocks, 1), MAX_BLOCKS))
        if len(self._members) > 1:
            for member in self._members:
                member.client.on_death = partial(self._engine_died, member)
                member.client.on_step = partial(self._stepped, member)

    # -- where a request begins

    def pick(self, request: Request, adapter: str) -> EngineClient:
        """The engine that has most of the prompt cached, unless that is little or it is far busier than others."""
        members = self._open()
        root = root_hash(namespace_keys((request.tenant, request.salt, adapter)))
        blocks = block_hashes(root, request.prompt_ids, BLOCK_TOKENS) if len(members) > 1 else []
        holder = pick_holder(self._known, members, blocks, self._thresholds, _least_busy)
        member = holder[0] if holder is not None else _least_busy(members)
        self._known.insert(blocks, member.bit)
        return member.client

    def least_busy(self) -> EngineClient:
        return min(self._open(), key=lambda member: (member.client.tokens_in_flight, member.load)).client

    def _open(self) -> list[_Member]:
        """The engines that take a request now; where none does, those that are the nearest to it."""
        best = min(_openness(member.client) for member in self._members)
        return [member for member in self._members if _openness(member.client) == best]

    # -- where it goes on

    def _engine_died(self, dead: _Member) -> None:
        """The requests of an engine that died go on elsewhere at once, but for those that it may have died of: these
        wait for its successor, so that they take no other engine with them. So do those that were taken from all
        others."""
        self._known.forget(dead.bit)
        others = [member for member in self._members if member is not dead and member.client.state == "ready"]
        num_moved = 0
        for request in _unsuspected(dead.client) if others else []:
            able = [member for member in others if _can_adopt(member.client, request)]
            if able:
                _move(request, dead.client, _least_busy(able).client)
                num_moved += 1
        if num_moved:
            log.warning("an engine died: %d of its requests go on in others", num_moved)

    def _stepped(self, member: _Member, scheduler: SchedulerStats) -> None:
        """The first request that waits there goes to an engine where none waits."""
        if not scheduler.waiting or member.client.state != "ready":
            return
        waiting = [request for request in _waiting(member.client) if not request.left]
        for other in self._members:
            if not waiting or not _has_room(other.client):
                continue
            request = min(waiting, key=lambda request: request.live.request.priority)
            if _can_adopt(other.client, request):
                _move(request, member.client, other.client)
                waiting.remove(request)


def _unsuspected(client: EngineClient) -> list[InFlight]:
    """Requests of which no engine can have died."""
    return [request for request in client.in_flight.values() if not is_suspect(request)]


def _waiting(client: EngineClient) -> Iterator[GenerateStream]:
    """Requests that no step has begun to compute, the oldest first."""
    for request in client.in_flight.values():
        if isinstance(request, GenerateStream) and request.waiting and not request.live.admitted:
            yield request


def _has_room(client: EngineClient) -> bool:
    """A request that came now would be computed at once, as far as the last step told."""
    if client.state != "ready" or client.scheduler.waiting or client.num_in_flight >= client.options.max_num_seqs:
        return False
    return next(_waiting(client), None) is None


def _openness(client: EngineClient) -> int:
    """0 is best."""
    if client.state != "ready":
        return 2 if client.state != "stopped" else 3
    return int(client.num_in_flight >= client.info.max_requests)


def _least_busy(members: Sequence[_Member]) -> _Member:
    return min(members, key=lambda member: (member.load, member.client.tokens_in_flight))


def _can_adopt(client: EngineClient, request: InFlight) -> bool:
    """Not where it has been already. An adapter that was unloaded meanwhile is only where its requests are."""
    key = request.live.request.adapter if isinstance(request, GenerateStream) else ""
    return not client.has_left(request) and (not key or key in client.adapters.named)


def _move(request: InFlight, source: EngineClient, target: EngineClient) -> None:
    source.release(request)
    target.adopt(request)
