"""Engines in memory that compute prompts for another, and that are sent what was computed."""

import random

from fake_language import adapter_state, chain
from quire.core.plan import BlockSend, RemotePrefill, StepPlan
from quire.core.records import TransferStats
from quire.core.scheduler import Scheduler


class FakePrefillEngines:
    """`PrefillEngines` in memory: blocks arrive over some steps, and some prefills fail with a block half written."""

    def __init__(self, seed: int = 0, *, failures: float = 0.0, max_blocks: int = 3) -> None:
        self.available = True
        self.swaps_a_step = 2
        self.answers = True  # whether anything arrives
        self.gives_up = False  # whether what does not arrive is given up
        self.num_asked = 0
        self._rng = random.Random(seed)
        self._failures, self._max_blocks = failures, max_blocks
        self._prefills: dict[int, tuple[RemotePrefill, int]] = {}  # by id: blocks that have arrived
        self._given_up: set[int] = set()

    @property
    def is_idle(self) -> bool:
        return not self._prefills

    def cancel(self, prefill_id: int) -> None:
        """What was begun goes on to its end, as at an engine that hears of it too late."""

    def stats(self) -> TransferStats:
        return TransferStats(peers=int(self.available))

    def begin(self, plan: StepPlan, host: list[list[int | None]]) -> None:
        for prefill in plan.prefills:
            assert self.available, "no engine is connected"
            for block in prefill.host_blocks:
                host[block] = [None] * len(host[block])
            self._prefills[prefill.id] = prefill, 0
            self.num_asked += 1

    def advance(self, scheduler: Scheduler, host: list[list[int | None]]) -> None:
        """One step passes: some blocks arrive."""
        assert scheduler.remote is not None
        for prefill_id, (prefill, num_blocks) in list(self._prefills.items()):
            if not self.answers:
                if self.gives_up and prefill_id not in self._given_up:
                    self._given_up.add(prefill_id)
                    scheduler.remote.given_up(prefill_id)
                continue
            size, states = len(host[0]), chain(prefill.tokens, adapter_state(prefill.namespace[2]))
            fails = self._rng.random() < self._failures
            count = self._rng.randint(0, self._max_blocks)
            for index in range(num_blocks, min(num_blocks + count, len(prefill.host_blocks))):
                start = (prefill.first + index) * size
                content: list[int | None] = list(states[start : start + size])
                block = prefill.host_blocks[index]
                is_state = len(host[block]) == 1
                host[block] = [states[-1]] if is_state else content + [None] * (size - len(content))
                num_blocks = index + 1
            self._prefills[prefill_id] = prefill, num_blocks
            if num_blocks and prefill_id not in self._given_up:
                scheduler.remote.arrived(prefill_id, num_blocks)
            if fails and num_blocks < len(prefill.host_blocks):
                block = prefill.host_blocks[num_blocks]
                host[block] = [-1] * len(host[block])  # half of it was written
            if fails or num_blocks == len(prefill.host_blocks):
                del self._prefills[prefill_id]
                scheduler.remote.ended(prefill_id)


class FakeDecodeEngines:
    """A `BlockSender` in memory: what is sent must be what the tokens of the prefill give."""

    def __init__(self, seed: int = 0, max_delay: int = 3) -> None:
        self._rng, self._max_delay = random.Random(seed), max_delay
        self.asked: dict[str, list[int]] = {}  # by request: its tokens
        self.sent: dict[str, list[int]] = {}  # by request: the blocks that were sent, in order
        self._sends: list[tuple[int, BlockSend]] = []  # (steps left, send)

    @property
    def is_idle(self) -> bool:
        return not self._sends

    def stats(self) -> TransferStats:
        return TransferStats(sent_bytes=sum(map(len, self.sent.values())))

    def begin(self, plan: StepPlan, host: list[list[int | None]]) -> None:
        for send in plan.sends:
            size, states = len(host[0]), chain(self.asked[send.request_id])
            is_state = len(host[send.host_block]) == 1
            expected = states[-1:] if is_state else states[send.index * size : (send.index + 1) * size]
            assert host[send.host_block][: len(expected)] == expected, f"{send} sends wrong keys and values"
            self.sent.setdefault(send.request_id, []).append(send.index)
            self._sends.append((self._rng.randint(0, self._max_delay), send))

    def advance(self, scheduler: Scheduler) -> None:
        assert scheduler.sends is not None
        sends, self._sends = self._sends, []
        for left, send in sends:
            if left:
                self._sends.append((left - 1, send))
            else:
                scheduler.sends.sent(send.host_block)
