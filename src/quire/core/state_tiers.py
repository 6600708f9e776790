"""Checkpoints of states beyond the slots, beside the blocks they follow: on the host and on disk.

A checkpoint of a prompt is saved as its blocks are, that of an answer when the answer ends. A waiting sequence gets the
deepest state that there is, and the blocks up to it."""

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import islice

from quire.core.block_keys import BlockKey, state_key
from quire.core.block_pool import BlockPool
from quire.core.host_index import HostIndex
from quire.core.kv_tiers import MAX_FETCHES, BlockStore, FetchInFlight, KVTiers, TierOptions
from quire.core.plan import StepPlan
from quire.core.prefix_tree import NO_STATE, PrefixNode, PrefixTree
from quire.core.sequence import Sequence
from quire.core.state_slots import StateSlots, depth_of_checkpoint

MAX_STATE_SAVES = 4  # in one plan: the step waits until they are copied


@dataclass(frozen=True, slots=True)
class _Found:
    """The deepest state for a sequence: how many of its blocks it follows, and where it is."""

    depth: int
    host: int = NO_STATE  # host slot
    key: BlockKey = b""  # on disk


class StateTiers(KVTiers):
    """`KVTiers` of a model with state slots."""

    def __init__(
        self,
        states: StateSlots,
        slot_bytes: int,
        tree: PrefixTree,
        host: BlockPool,
        index: HostIndex,
        store: BlockStore | None,
        options: TierOptions,
    ) -> None:
        super().__init__(tree, host, index, store, options)
        self._states, self._slot_bytes = states, slot_bytes
        self._blocks_a_state = slot_bytes / max(options.block_bytes, 1)  # blocks that have the bytes of a state
        self._unsaved_states: dict[PrefixNode, None] = {}
        self._saving_states: set[int] = set()  # host slots that the store writes
        states.checkpoint_kept = self._note_state

    # ---- slots to host and disk

    def _note_state(self, node: PrefixNode) -> None:
        if node.key:
            self._unsaved_states[node] = None

    @property
    def _can_save_states(self) -> bool:
        host = self._states.host
        return bool(self._unsaved_states) and host.num_available > host.num_blocks // 2  # the others are for fetches

    @property
    def has_unsaved(self) -> bool:
        return super().has_unsaved or self._can_save_states or self._states.has_unwritten

    @property
    def waits_to_save(self) -> bool:
        return super().waits_to_save or (bool(self._unsaved_states) and bool(self._saving_states))

    def save(self, plan: StepPlan, is_idle: bool) -> None:
        super().save(plan, is_idle)
        cost = self._save_seconds(is_idle) * self._blocks_a_state
        while self._can_save_states and len(plan.state_swap_out) < MAX_STATE_SAVES:
            if cost and self._saving_seconds <= 0:
                return
            self._save_next(plan, cost)

    def _save_next(self, plan: StepPlan, cost: float) -> None:
        """Swap out the checkpoint that waits longest, if it is still there and not on the host yet."""
        node = next(iter(self._unsaved_states))
        del self._unsaved_states[node]
        key, states = state_key(node.key), self._states
        if node.state == NO_STATE or states.host_index.find(key) is not None:
            return
        self._saving_seconds -= cost
        host = states.host.take()
        plan.state_swap_out.append((states.place_of(node), host))
        if self._keep:
            states.host_index.insert(key, host)
            self._host_stats.written_bytes += self._slot_bytes
        if self._store is not None:
            states.host.hold(host)
            self._saving_states.add(host)
            plan.saves.append((states.host_id(host), key))

    def saved(self, host: int) -> None:
        if host < self._host.num_blocks:
            super().saved(host)
            return
        slot = host - self._host.num_blocks
        self._saving_states.remove(slot)
        self._states.host.release([slot])

    # ---- host to slots

    def touch(self, path: Many[PrefixNode]) -> None:
        super().touch(path)
        for node in path if self._keep else ():
            if node.state != NO_STATE and (host := self._states.host_index.find(state_key(node.key))) is not None:
                self._states.host.touch(host)

    def hold_host_hits(self, seq: Sequence, start: int) -> None:
        """Hold the deepest state on the host, and the host blocks up to it, if it is deeper than the checkpoint that
        `seq` starts from."""
        if not self._keep or seq.host_state >= 0 or not seq.group.takes_arrived_blocks(seq):
            return
        size, keys = self._tree.block_size, self._path_keys(seq, start)
        held, _ = self._hold_leading(iter(keys[start:]))
        found = self._find_on_host(keys[: start + len(held)], seq.num_computed // size)
        num_held = min(max(found.depth - start, 0), len(held)) if found.host >= 0 else 0
        self._host.release(held[num_held:])
        if found.host >= 0:
            seq.host_blocks, seq.num_arrived = dict(enumerate(held[:num_held], start)), found.depth * size
            seq.num_gained = seq.num_arrived - seq.num_computed
            seq.num_computed = seq.num_arrived
            self._states.start_from_host(seq, found.host)

    def _path_keys(self, seq: Sequence, start: int) -> list[BlockKey]:
        """The keys of all full blocks of a waiting sequence, whose first `start` are in the pool."""
        path, node = [], seq.node if start else None
        for _ in range(start):
            assert node is not None
            path.append(node.key)
            node = node.parent
        return [*reversed(path), *self._keys(seq, seq.node if start else None, start)]

    def _find_on_host(self, keys: Many[BlockKey], have: int) -> _Found:
        """`have`: blocks that a checkpoint here follows."""
        for depth in range(len(keys), have if self._keep else len(keys), -1):
            if (host := self._states.host_index.find(state_key(keys[depth - 1]))) is not None:
                return _Found(depth, host)
        return _Found(have)

    # ---- disk to host

    def _find(self, keys: Many[BlockKey], have: int) -> _Found:
        assert self._store is not None
        found = self._find_on_host(keys, have)
        for depth in range(len(keys), found.depth, -1):
            if stored := self._store.find([state_key(keys[depth - 1])]):
                return _Found(depth, key=stored[0])
        return found

    def _plan_fetch(
        self, seq: Sequence, path: Many[PrefixNode], held: list[int], stored: list[BlockKey], plan: StepPlan
    ) -> bool:
        """Blocks behind the deepest state are of no use: their tokens are computed again for the states."""
        start, have = len(path), depth_of_checkpoint(path)
        on_host = islice(self._keys(seq, path[-1] if path else None, start), len(held))
        found = self._find([*(node.key for node in path), *on_host, *stored], have)
        num_held = min(len(held), max(found.depth - start, 0))
        self._host.release(held[num_held:])
        del held[num_held:], stored[max(found.depth - start - num_held, 0) :]
        seconds = self._seconds_to_compute(found.depth - have)
        pays = bool(stored or found.key) and self._is_quicker(found, len(stored), seconds)
        is_fetched = found.key in self._fetched_keys
        if not pays or is_fetched or not self._fits(found, len(stored)):
            self._host.release(held)
            waits = pays and bool(self._fetched_keys)  # for another sequence that fetches it, or gives host blocks back
            seq.num_fetches = seq.num_fetches if waits else MAX_FETCHES
            return waits
        blocks = [(key, self._host.take()) for key in stored]
        if found.key:
            blocks.append((found.key, self._states.host_id(self._states.host.take())))
        else:
            self._states.host.hold(found.host)
            seq.host_state = found.host
        seq.host_blocks = dict(enumerate(held, start))
        size = self._tree.block_size
        self._fetch(seq, blocks, plan, found.depth * size, (found.depth - have) * size, seconds)
        return True

    def _is_quicker(self, found: _Found, num_blocks: int, seconds: float) -> bool:
        """Than computing, which takes `seconds`, or an unknown time."""
        assert self._store is not None
        num_blocks += int(self._blocks_a_state) if found.key else 0
        return not seconds or self._store.read_seconds(num_blocks) <= seconds

    def _fits(self, found: _Found, num_blocks: int) -> bool:
        return num_blocks <= self._host.num_available and (not found.key or self._states.host.num_available > 0)

    def _take_arrived(self, ended: FetchInFlight, blocks: list[int], missing: int) -> None:
        seq = ended.seq
        if missing:  # nothing can be continued from without the state
            self._release_host(blocks)
            self.drop_arrived(seq)
            return
        blocks, slots = self._states.split_host_ids(blocks)
        if slots:
            [seq.host_state] = slots
        seq.host_blocks |= dict(enumerate(blocks, ended.first))
        seq.num_arrived, seq.num_fetched, seq.num_gained = ended.num_tokens, ended.num_gained, ended.num_gained

    def _release_host(self, ids: list[int]) -> None:
        blocks, slots = self._states.split_host_ids(ids)
        self._host.release(blocks)
        self._states.host.release(slots)

    def drop_arrived(self, seq: Sequence) -> None:
        super().drop_arrived(seq)
        self._states.drop_host_state(seq)

    # ---- seen from outside

    def _num_hits(self, seq: Sequence) -> int:
        """Also tokens of blocks in the pool that no state followed."""
        return seq.num_gained if seq.host_state >= 0 else 0

    def clear(self, tenant: str) -> None:
        super().clear(tenant)
        self._states.host.drop_cached(tenant)

    def check(self) -> Counter[int]:
        refs = super().check()
        refs.update(self._states.host_id(host) for host in self._saving_states)
        return refs
