"""Which of several workers that serve a model takes a request."""

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Protocol

import msgspec

from quire.core.known_prefixes import ApproximatePrefixes, KnownPrefixes, pick_holder
from quire.gateway.config import CacheAware, PolicyName
from quire.gateway.kv_index import KVIndex
from quire.gateway.prefix_index import EventPrefixes, prompt_blocks
from quire.gateway.worker import Worker


class PickContext(msgspec.Struct):
    """What a policy may know of a request."""

    namespace: str  # tenant and model: prefixes are shared within it
    prompt: bytes = b""
    session: str = ""
    blocks: list[int] | None = None  # of its tokens, as KV events name them; None: they are not known
    predicted_hit: float = 0.0  # share of the prompt that the chosen worker knows; set by `cache_aware`


class Policy(Protocol):
    def pick(self, workers: Sequence[Worker], context: PickContext) -> Worker:
        """One of `workers`, of which there is at least one."""


class RoundRobin:
    def __init__(self) -> None:
        self._next = 0

    def pick(self, workers: Sequence[Worker], context: PickContext) -> Worker:
        self._next += 1
        return workers[self._next % len(workers)]


class PowerOfTwo:
    """The less loaded of two drawn at random: nearly as even as the least loaded of all, without herds."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def pick(self, workers: Sequence[Worker], context: PickContext) -> Worker:
        if len(workers) == 1:
            return workers[0]
        first, second = self._rng.sample(workers, 2)
        return first if first.load <= second.load else second


class LeastTokens:
    def pick(self, workers: Sequence[Worker], context: PickContext) -> Worker:
        return min(workers, key=lambda worker: (worker.token_load, worker.num_requests))


class SessionAffinity:
    """Rendezvous hashing: a session stays at its worker, and when one leaves only its sessions move."""

    def __init__(self) -> None:
        self._without_session = PowerOfTwo()

    def pick(self, workers: Sequence[Worker], context: PickContext) -> Worker:
        if not context.session:
            return self._without_session.pick(workers, context)
        session = context.session.encode(errors="replace")
        return max(workers, key=lambda worker: _rank(session, worker))


def _rank(session: bytes, worker: Worker) -> float:
    drawn = int.from_bytes(blake2b(session + b"\0" + worker.name.encode(), digest_size=6).digest()) + 1
    return float((drawn / (1 << 48)) ** (1 / worker.entry.weight))


class CacheAwarePolicy:
    """The worker that knows most of the prompt (`pick_holder`), or else the one with the fewest tokens."""

    def __init__(self, settings: CacheAware, index: KVIndex | None = None) -> None:
        """`index`: of the workers' KV events, for requests whose tokens are known."""
        self._settings = settings
        self.known: KnownPrefixes = ApproximatePrefixes(settings.max_blocks)
        self.exact = EventPrefixes(index, settings.max_blocks) if index is not None else None
        self._least = LeastTokens()

    def pick(self, workers: Sequence[Worker], context: PickContext) -> Worker:
        known, blocks = self.known, context.blocks
        if self.exact is not None and blocks is not None:
            known = self.exact
        else:
            blocks = prompt_blocks(context.namespace, context.prompt)
        holder = pick_holder(known, workers, blocks, self._settings, lambda some: self._least.pick(some, context))
        if holder is not None:
            worker, num_known = holder
        else:
            worker = self._least.pick(workers, context)
            num_known = known.longest(blocks, worker.mask)[0]
        if blocks:
            context.predicted_hit = num_known / len(blocks)
            known.insert(blocks, worker.bit, num_known)
        return worker

    def forget(self, worker: Worker) -> None:
        self.known.forget(worker.bit)
        if self.exact is not None:
            self.exact.forget(worker.bit)


PLAIN_POLICIES: dict[str, Callable[[], Policy]] = {
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "least_tokens": LeastTokens,
    "session": SessionAffinity,
}


def make_policy(name: PolicyName, settings: CacheAware, index: KVIndex | None = None) -> Policy:
    return CacheAwarePolicy(settings, index) if name == "cache_aware" else PLAIN_POLICIES[name]()
