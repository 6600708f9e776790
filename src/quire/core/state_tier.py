"""Checkpoints of states beyond the slots: which are saved, and the deepest that a waiting sequence could start from.

A checkpoint of a prompt is saved as its blocks are, that of an answer when the answer ends. It is found by the key of
the block that it follows, on the host and on disk."""

from collections import Counter
from collections.abc import Sequence as Many

from quire.core.block_keys import BlockKey, state_key
from quire.core.plan import StepPlan
from quire.core.prefix_tree import NO_STATE, PrefixNode
from quire.core.sequence import Sequence
from quire.core.state_slots import StateSlots

MAX_STATE_SAVES = 4  # in one plan: the next step waits until they are copied


class StateTier:
    """The states' part of `KVTiers`. All host slots in `_saving` are references it holds."""

    def __init__(self, states: StateSlots, *, keep: bool, has_store: bool) -> None:
        self._states, self._keep, self._has_store = states, keep, has_store
        self._unsaved: dict[PrefixNode, None] = {}
        self._saving: set[int] = set()  # host slots that the store writes
        states.checkpoint_kept = self._note

    def _note(self, node: PrefixNode) -> None:
        if node.key:
            self._unsaved[node] = None

    @property
    def has_unsaved(self) -> bool:
        """Whether the next plan saves checkpoints."""
        host = self._states.host
        return bool(self._unsaved) and host.num_available > host.num_blocks // 2  # the others are for fetches

    @property
    def waits_to_save(self) -> bool:
        return bool(self._unsaved) and bool(self._saving)

    def save_next(self, plan: StepPlan) -> bool:
        """Swap out the checkpoint that waits longest. -> whether it is still there, and not on the host yet"""
        node = next(iter(self._unsaved))
        del self._unsaved[node]
        key, states = state_key(node.key), self._states
        if node.state == NO_STATE or states.host_index.find(key) is not None:
            return False
        host = states.host.take()
        plan.state_swap_out.append((node.state, host))
        if self._keep:
            states.host_index.insert(key, host)
        if self._has_store:
            states.host.hold(host)
            self._saving.add(host)
            plan.saves.append((states.host_id(host), key))
        return True

    def saved(self, host: int) -> None:
        self._saving.remove(host)
        self._states.host.release([host])

    def touch(self, path: Many[PrefixNode]) -> None:
        """What is used in the slots is not the next to be evicted from the host."""
        for node in path:
            if node.state != NO_STATE and (host := self._states.host_index.find(state_key(node.key))) is not None:
                self._states.host.touch(host)

    def find_on_host(self, keys: Many[BlockKey]) -> tuple[int, int]:
        """(how many of these blocks the deepest state on the host follows, its host slot); (0, -1): there is none"""
        for depth in range(len(keys) if self._keep else 0, 0, -1):
            if (host := self._states.host_index.find(state_key(keys[depth - 1]))) is not None:
                return depth, host
        return 0, NO_STATE

    def start_from_host(self, seq: Sequence, host: int, num_tokens: int) -> None:
        """Let a sequence that is being admitted continue from a state on the host."""
        states = self._states
        states.host.hold(host)
        if seq.state >= 0:
            states.pool.release([seq.state])
            seq.state = NO_STATE
        seq.host_state, seq.num_computed = host, num_tokens

    def check(self) -> Counter[int]:
        """-> the references it holds to host slots"""
        return Counter(self._saving)


def depth_of_checkpoint(path: Many[PrefixNode]) -> int:
    """How many blocks of a path the last checkpoint on it follows."""
    return next((depth for depth in range(len(path), 0, -1) if path[depth - 1].state != NO_STATE), 0)
