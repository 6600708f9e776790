"""Prompts that other engines compute: their blocks arrive in host blocks while the sequence waits.

A waiting sequence asks for the keys and values of all its known tokens but the last, whose logits it needs. Then it is
admitted like one that was swapped out, and lacks one token, as if it had been running all the time. While others run,
what has arrived goes on to the pool some blocks a step, as prefixes that no sequence holds yet."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from quire.core.block_pool import BlockPool
from quire.core.plan import RemotePrefill, StepPlan
from quire.core.prefix_tree import PrefixNode, PrefixTree
from quire.core.records import TransferStats
from quire.core.sequence import NEVER, Sequence
from quire.core.state_slots import StateSlots, depth_of_checkpoint

MIN_TOKENS = 64  # fewer are computed here: they do not make a step long
MIN_SHARE = 4  # with fewer than one in so many missing, they are computed here: the other engine may have none of them
MAX_PREFILLS = 3  # of one sequence; then it computes what is missing


class PrefillEngines(Protocol):
    """Engines that compute prompts for this one. They carry out the prefills of plans."""

    swaps_a_step: int  # blocks that may go on to the pool beside the steps of other sequences

    @property
    def available(self) -> bool:
        """Whether one is connected."""

    def cancel(self, prefill_id: int) -> None:
        """Nothing waits for this prefill any more. Its end is still reported."""

    def stats(self) -> TransferStats:
        """All but what is counted here."""


@dataclass(slots=True)
class _PrefillInFlight:
    prefill: RemotePrefill
    seq: Sequence
    began: float
    num_here: int  # leading tokens that are computed without it
    num_blocks: int = 0  # blocks that have arrived
    num_seen: int = 0  # of these, looked at for the pool


class RemotePrefills:
    """Which sequences wait for other engines. All host blocks that it names are references it holds."""

    def __init__(
        self,
        tree: PrefixTree,
        pool: BlockPool,
        host: BlockPool,
        states: StateSlots | None,
        engines: PrefillEngines,
        prefix_caching: bool,
    ) -> None:
        self._tree, self._pool, self._host, self._states, self._engines = tree, pool, host, states, engines
        self._prefix_caching = prefix_caching
        self._size = tree.block_size
        self._in_flight: dict[int, _PrefillInFlight] = {}
        self._ids = count()
        self._full_in = -1  # the step in which a sequence found too few host blocks
        self._stats = TransferStats()
        self.now = 0.0  # time.monotonic() of the last `Scheduler.expire`

    def awaits_blocks(self, seq: Sequence, plan: StepPlan) -> bool:
        """Whether a waiting sequence waits for blocks of another engine. Asks for them if that pays."""
        if seq.prefill is not None:
            self._promote_new(self._in_flight[seq.prefill.id], plan)
            return True
        takes = seq.group.takes_arrived_blocks(seq)
        if seq.num_computed or not (takes or seq.num_arrived):
            return False
        path = self._match(seq)
        if seq.num_arrived and len(path) < seq.first_arrived(self._size):
            self._drop_arrived(seq)  # what precedes them was evicted meanwhile
        if not takes:
            return False
        first = max(len(path) * self._size, seq.num_arrived) // self._size
        num_usable = depth_of_checkpoint(path) if self._states else len(path)
        num_here = max(num_usable * self._size, seq.num_arrived)
        if self._pays(seq, len(seq.tokens) - 1 - num_here) and self._ask(seq, first, num_here, plan):
            return True
        num_left = sum(index >= len(path) for index in seq.host_blocks)
        if not plan.runs or num_left <= self._engines.swaps_a_step:
            return False  # the plan that admits it swaps them in
        return self._promote(seq, seq.host_blocks, path, plan) > 0  # else the pool is full

    def _pays(self, seq: Sequence, num_missing: int) -> bool:
        is_long = num_missing >= max(MIN_TOKENS, len(seq.tokens) / MIN_SHARE)
        return is_long and seq.num_prefills < MAX_PREFILLS and self._engines.available

    def _ask(self, seq: Sequence, first: int, num_here: int, plan: StepPlan) -> bool:
        """Ask for the blocks from `first` on. -> whether `seq` waits: for them, or for host blocks"""
        num_tokens = len(seq.tokens) - 1
        num_blocks = -(-num_tokens // self._size) - first
        if self._full_in == plan.step:
            return True  # a sequence before it waits for host blocks
        if self._states and not self._states.host.num_available:
            if self.has_waiting:
                self._full_in = plan.step
                return True
            return False
        if num_blocks > self._host.num_available:
            if self.has_waiting:
                self._full_in = plan.step
                return True  # other prefills will end and give host blocks back
            num_blocks = self._host.num_available
            num_tokens = (first + num_blocks) * self._size
        if num_tokens <= num_here:
            return False
        host_blocks = [self._host.take() for _ in range(num_blocks)]
        if self._states:
            host_blocks.append(self._states.host_id(self._states.host.take()))
        group = seq.group
        seq.prefill = RemotePrefill(next(self._ids), seq.tokens[:num_tokens], group.namespace, first, host_blocks)
        seq.num_prefills += 1
        self._in_flight[seq.prefill.id] = _PrefillInFlight(seq.prefill, seq, self.now, num_here)
        self._stats.prefills += 1
        plan.prefills.append(seq.prefill)
        return True

    def _match(self, seq: Sequence) -> list[PrefixNode]:
        if not self._prefix_caching:
            return []
        last = (len(seq.tokens) - 1) // self._size
        return self._tree.match(seq.group.namespace, None, seq.tokens, 0, last)

    def _drop_arrived(self, seq: Sequence) -> None:
        self._host.release(list(seq.host_blocks.values()))
        seq.host_blocks, seq.num_arrived, seq.num_fetched, seq.num_remote = {}, 0, 0, 0
        if self._states:
            self._states.drop_host_state(seq)

    def _release_host(self, ids: list[int]) -> None:
        if self._states is None:
            self._host.release(ids)
            return
        blocks, slots = self._states.split_host_ids(ids)
        self._host.release(blocks)
        self._states.host.release(slots)

    # ---- what the other engines report

    def arrived(self, prefill_id: int, num_blocks: int) -> None:
        """The first `num_blocks` of a prefill are whole."""
        self._in_flight[prefill_id].num_blocks = num_blocks

    def ended(self, prefill_id: int) -> None:
        """No more blocks of a prefill come: its host blocks are not written any more."""
        ended = self._in_flight.pop(prefill_id)
        blocks, num_blocks, seq = ended.prefill.host_blocks, ended.num_blocks, ended.seq
        if seq.prefill is not ended.prefill:  # the sequence has ended, or waits no longer
            self._release_host(blocks)
            return
        seq.prefill = None
        if self._states and num_blocks < len(blocks):
            num_blocks = 0  # nothing can be continued from without the state
        self._release_host(blocks[num_blocks:])
        arrived = blocks[:num_blocks]
        if self._states and arrived:
            self._states.drop_host_state(seq)
            [seq.host_state] = self._states.split_host_ids([arrived.pop()])[1]
        seq.host_blocks |= dict(enumerate(arrived, ended.prefill.first))
        if num_blocks:
            covered = (ended.prefill.first + num_blocks) * self._size
            seq.num_arrived = min(covered, len(ended.prefill.tokens))
            num_tokens = seq.num_arrived - ended.num_here
            seq.num_remote += num_tokens
            self._stats.tokens += num_tokens
        self._stats.failed += num_blocks < len(blocks)
        self._stats.wait_seconds += self.now - ended.began

    def given_up(self, prefill_id: int) -> None:
        """The engine of a prefill does not answer, and may still write: the sequence goes on, and the host blocks stay
        held."""
        flight = self._in_flight[prefill_id]
        if flight.seq.prefill is flight.prefill:
            flight.seq.prefill = None
            self._stats.failed += 1

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended. Its host blocks are released when the other engine is done with them."""
        assert seq.prefill is not None
        self._engines.cancel(seq.prefill.id)
        seq.prefill = None

    # ---- host to pool

    def _promote_new(self, flight: _PrefillInFlight, plan: StepPlan) -> None:
        """Let what has arrived while the sequence waits go on."""
        if flight.num_blocks > flight.num_seen:
            first, seq = flight.prefill.first, flight.seq
            blocks = [host for host in flight.prefill.host_blocks[: flight.num_blocks] if host < self._host.num_blocks]
            arrived = dict(enumerate(blocks, first))
            if not self._promote(seq, seq.host_blocks | arrived, self._match(seq), plan):
                flight.num_seen = flight.num_blocks

    def _promote(self, seq: Sequence, arrived: dict[int, int], path: list[PrefixNode], plan: StepPlan) -> int:
        """Swap host blocks, by index, into the pool, behind the blocks of `path`: some, or all if no sequence runs.

        The host blocks stay: what is evicted again before the sequence is admitted is not lost. -> how many"""
        if not self._prefix_caching:
            return 0
        size, start = self._size, len(path)
        stop = min(start + self._engines.swaps_a_step if plan.runs else NEVER, (len(seq.tokens) - 1) // size)
        held = [node.block for node in path]
        for block in held:
            self._pool.hold(block)  # what is taken next evicts none of them
        for index in range(start, stop):
            if index not in arrived or not self._pool.num_available:
                break
            tokens = tuple(seq.tokens[index * size : (index + 1) * size])
            block = self._pool.take()
            node = self._tree.insert(seq.group.namespace, path[-1] if path else None, tokens, block)
            assert node is not None, "a block is in the tree, and was not found there"
            plan.swap_in.append((arrived[index], block))
            self._host.hold(arrived[index])
            path.append(node)
            held.append(block)
        self._pool.release(held)
        return len(path) - start

    # ---- seen from outside

    @property
    def has_waiting(self) -> bool:
        """Whether sequences wait for other engines."""
        return any(each.seq.prefill is each.prefill for each in self._in_flight.values())

    def stats(self) -> TransferStats:
        own = self._stats
        return replace(
            self._engines.stats(),
            prefills=own.prefills,
            failed=own.failed,
            tokens=own.tokens,
            wait_seconds=own.wait_seconds,
            in_flight=len(self._in_flight),
        )

    def check(self) -> Counter[int]:
        """Assert every invariant. -> the references it holds to host blocks"""
        refs: Counter[int] = Counter()
        for each in self._in_flight.values():
            refs.update(each.prefill.host_blocks)
            assert each.num_blocks <= len(each.prefill.host_blocks), "more blocks have arrived than were asked for"
            waits = each.seq.prefill is each.prefill
            assert not waits or not (each.seq.ended or each.seq.running), "what has ended, or runs, waits for an engine"
        return refs
