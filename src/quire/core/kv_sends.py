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


class BlockSender(Protocol):
    """Carries out the sends of plans in threads of its own."""

    def stats(self) -> TransferStats: ...


@dataclass(slots=True)
class _Computed:
    """Blocks that a plan computes. All blocks before them are held, too: a prefix outlives its suffix."""

    request_id: str
    table: list[int]
    next: int  # the first block that is not swapped out


class KVSends:
    """The blocks that are yet to be swapped out, and the host blocks that are being sent."""

    def __init__(self, pool: BlockPool, host: BlockPool, block_size: int, sender: BlockSender) -> None:
        self._pool, self._host, self._size, self._sender = pool, host, block_size, sender
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
        if stop > first:
            computed = _Computed(group.id, seq.block_table[:stop], first)
            self._pending.append(computed)
            for block in computed.table:
                self._pool.hold(block)
        if is_whole:
            del self._next[group.id]
        else:
            self._next[group.id] = max(first, stop)

    def send(self, plan: StepPlan) -> None:
        """Swap out what earlier plans have computed, while host blocks are free."""
        while self.can_send:
            computed = self._pending[0]
            host = self._host.take()
            self._host.hold(host)  # one reference is the plan's
            self._sending.add(host)
            plan.swap_out.append((computed.table[computed.next], host))
            plan.sends.append(BlockSend(host, computed.request_id, computed.next))
            computed.next += 1
            if computed.next == len(computed.table):
                self._pool.release(computed.table)  # the step swaps out before its sequences write
                self._pending.popleft()

    @property
    def can_send(self) -> bool:
        """Whether the next plan sends blocks."""
        return bool(self._pending) and self._host.num_available > 0

    @property
    def waits(self) -> bool:
        """Whether blocks will be sent when others have been."""
        return bool(self._pending)

    def sent(self, host_block: int) -> None:
        """A host block was sent, or could not be."""
        self._sending.remove(host_block)
        self._host.release([host_block])

    def drop(self, request_id: str) -> None:
        """No other engine wants the blocks of this request any more."""
        self._next.pop(request_id, None)
        for computed in [each for each in self._pending if each.request_id == request_id]:
            self._pool.release(computed.table)
            self._pending.remove(computed)

    def stats(self) -> TransferStats:
        return self._sender.stats()

    def check(self) -> tuple[Counter[int], Counter[int]]:
        """-> the references it holds to blocks, and to host blocks"""
        return Counter(block for each in self._pending for block in each.table), Counter(self._sending)
