"""Blocks of prompts that this engine computes for others: swapped out once they are computed, and sent from the host.

What one plan computes, the next swaps out. So blocks go while the next chunk of their prompt is computed, and the step
waits for nothing. Blocks are held until they are swapped out, and host blocks until they are sent."""

from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol

from quire.core.block_pool import BlockPool
from quire.core.plan import BlockSend, StepPlan
from quire.core.records import TransferStats
from quire.core.sequence import Sequence
from quire.core.state_slots import StateSlots


class BlockSender(Protocol):
    """Carries out the sends of plans in threads of its own."""

    def stats(self) -> TransferStats: ...


@dataclass(slots=True)
class _Computed:
    """Blocks that a plan computes. All blocks before them are held, too: a prefix outlives its suffix."""

    request_id: str
    table: list[int]
    next: int  # the first block that is not swapped out
    state: int = -1  # the slot of the state behind the last block; -1: none is sent


class KVSends:
    """The blocks that are yet to be swapped out, and the host blocks that are being sent."""

    def __init__(
        self, pool: BlockPool, host: BlockPool, states: StateSlots | None, block_size: int, sender: BlockSender
    ) -> None:
        self._pool, self._host, self._states, self._size, self._sender = pool, host, states, block_size, sender
        self._failed: list[str] = []  # requests whose state found no slot to wait in
        self._next: dict[str, int] = {}  # by request: the first block that is not computed yet
        self._pending: deque[_Computed] = deque()
        self._sending: set[int] = set()  # host blocks

    def add(self, request_id: str, first: int) -> None:
        """Send the blocks of this request's prompt, from `first` on."""
        self._next[request_id] = first

    def note_computed(self, seq: Sequence) -> None:
        """The planned step computes tokens of `seq`. The last block of a prompt is sent as it is, full or not."""
        group = seq.group
        if (first := self._next.get(group.id)) is None:
            return
        is_whole = seq.num_computed >= group.num_prompt
        stop = -(-group.num_prompt // self._size) if is_whole else seq.num_computed // self._size
        sends_state = is_whole and self._states is not None
        if stop > first or sends_state:
            computed = _Computed(group.id, seq.block_table[:stop], first)
            self._pending.append(computed)
            for block in computed.table:
                self._pool.hold(block)
            if sends_state:
                self._lend_state(seq, computed)
        if is_whole:
            del self._next[group.id]
        else:
            self._next[group.id] = max(first, stop)

    def _lend_state(self, seq: Sequence, computed: _Computed) -> None:
        assert self._states is not None
        if self._states.lend(seq.state):
            computed.state = seq.state
        else:
            self._failed.append(seq.group.id)

    @property
    def has_failed(self) -> bool:
        return bool(self._failed)

    def take_failed(self) -> list[str]:
        """Requests whose state cannot be sent."""
        failed, self._failed = self._failed, []
        return failed

    def send(self, plan: StepPlan) -> None:
        """Swap out what earlier plans have computed, while host blocks are free."""
        while self.can_send:
            computed = self._pending[0]
            if computed.next < len(computed.table):
                host = self._host.take()
                self._host.hold(host)  # one reference is the plan's
                plan.swap_out.append((computed.table[computed.next], host))
                self._send(plan, computed, host)
            elif computed.state >= 0:
                assert self._states is not None
                host = self._states.host.take()
                self._states.host.hold(host)
                plan.state_swap_out.append((computed.state, host))
                self._send(plan, computed, self._states.host_id(host))
            if computed.next >= len(computed.table) + (computed.state >= 0):
                self._end(computed)  # the step swaps out before its sequences write
                self._pending.popleft()

    def _send(self, plan: StepPlan, computed: _Computed, host_id: int) -> None:
        self._sending.add(host_id)
        plan.sends.append(BlockSend(host_id, computed.request_id, computed.next))
        computed.next += 1

    def _end(self, computed: _Computed) -> None:
        self._pool.release(computed.table)
        if computed.state >= 0 and self._states is not None:
            self._states.take_back(computed.state)

    @property
    def can_send(self) -> bool:
        """Whether the next plan sends something."""
        if not self._pending:
            return False
        is_state = self._states is not None and self._pending[0].next >= len(self._pending[0].table)
        pool = self._states.host if self._states is not None and is_state else self._host
        return pool.num_available > 0

    @property
    def waits(self) -> bool:
        """Whether blocks will be sent when others have been."""
        return bool(self._pending)

    def sent(self, host_block: int) -> None:
        """A host block or a host slot was sent, or could not be."""
        self._sending.remove(host_block)
        if host_block < self._host.num_blocks:
            self._host.release([host_block])
        elif self._states is not None:
            self._states.host.release(self._states.split_host_ids([host_block])[1])

    def drop(self, request_id: str) -> None:
        """No other engine wants the blocks of this request any more."""
        self._next.pop(request_id, None)
        for computed in [each for each in self._pending if each.request_id == request_id]:
            self._end(computed)
            self._pending.remove(computed)

    def stats(self) -> TransferStats:
        return self._sender.stats()

    def held_blocks(self) -> Counter[int]:
        """The references it holds to blocks."""
        return Counter(block for each in self._pending for block in each.table)

    def check(self) -> Counter[int]:
        """-> the references it holds to host blocks, and to host slots behind them"""
        return Counter(self._sending)
