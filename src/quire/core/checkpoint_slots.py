"""Checkpoints that are smaller than the states they are made of: in bf16 or int8, in slots of their own.

A sequence runs from a state slot in fp32. A checkpoint is written to its slot by the plan after the one that computes
its state, and a sequence that continues from one reads it into a state slot first."""

from collections import Counter
from collections.abc import Iterable

from quire.core.block_pool import BlockPool
from quire.core.plan import Run, StepPlan
from quire.core.prefix_tree import NO_STATE, PrefixNode, PrefixTree
from quire.core.sequence import Sequence
from quire.core.state_slots import StateIndex, StateSlots


class CheckpointSlots(StateSlots):
    """`StateSlots` of which nodes name none: they name checkpoint slots. Plans number these behind the state slots."""

    def __init__(
        self,
        num_slots: int,
        max_num_seqs: int,
        tree: PrefixTree,
        num_host_slots: int,
        first_host_id: int,
        num_checkpoint_slots: int,
        small_host_slots: bool,
    ) -> None:
        """`small_host_slots`: host slots are of checkpoints, and states of running sequences do not go there."""
        super().__init__(num_slots, max_num_seqs, tree, num_host_slots, first_host_id)
        self.max_running = min(max_num_seqs, (num_slots - 1) // 2)  # two of each, and one to be sent or for drafts
        self.pool = BlockPool(num_slots, StateIndex())
        self.checkpoints = BlockPool(num_checkpoint_slots, self.index)
        self._small_host_slots = small_host_slots
        self._unwritten: dict[PrefixNode, int] = {}  # -> state slot, which is held until it is written
        self._to_keep: set[PrefixNode] = set()  # of these: to go beyond the slots
        self._read: list[int] = []  # checkpoint slots that the plan in the making, or the last one, reads
        self._plan = StepPlan(0, [])

    @property
    def has_unwritten(self) -> bool:
        return bool(self._unwritten)

    def begin_plan(self, plan: StepPlan) -> None:
        super().begin_plan(plan)
        self._plan = plan
        self.checkpoints.release(self._read)
        self._read = []
        for node, slot in self._unwritten.items():
            self._write(node, slot, plan)
        self._unwritten, self._to_keep = {}, set()
        self._order_superseded()

    def _write(self, node: PrefixNode, slot: int, plan: StepPlan) -> None:
        """The plan writes the checkpoint before its runs, so that they may have the state slot."""
        self.pool.release([slot])
        if not self.checkpoints.num_available:
            return
        checkpoint = self._take_of(self.checkpoints)
        self.index.add(checkpoint, node)
        self.checkpoints.release([checkpoint])
        super()._supersede_above(node)
        plan.checkpoints.append((slot, self.place_of(node)))
        if node in self._to_keep:
            self.checkpoint_kept(node)

    def place_of(self, node: PrefixNode) -> int:
        return self.pool.num_blocks + node.state

    def has_checkpoint(self, node: PrefixNode) -> bool:
        return super().has_checkpoint(node) or node in self._unwritten

    def can_continue(self, seq: Sequence) -> bool:
        return super().can_continue(seq) or seq.checkpoint >= 0

    def _add(self, slot: int, node: PrefixNode) -> None:
        self.pool.hold(slot)
        self._unwritten[node] = slot

    def _supersede_above(self, node: PrefixNode) -> None:
        """When it is written: the one before it may have to be written, too."""

    def _keep(self, node: PrefixNode) -> None:
        if node in self._unwritten:
            self._to_keep.add(node)
        else:
            super()._keep(node)

    def _forget(self, node: PrefixNode) -> None:
        super()._forget(node)
        if (slot := self._unwritten.pop(node, NO_STATE)) >= 0:
            self._released.append(slot)

    # ---- sequences

    def start_from(self, seq: Sequence, node: PrefixNode) -> None:
        self.checkpoints.hold(node.state)
        self.index.superseded.discard(node.state)
        self._drop_start(seq)
        seq.checkpoint = node.state

    def start_from_host(self, seq: Sequence, host: int) -> None:
        self._drop_start(seq)
        super().start_from_host(seq, host)

    def _drop_start(self, seq: Sequence) -> None:
        """A sequence that is not in the plan yet does not continue from where it stands."""
        if seq.state >= 0:
            self.pool.release([seq.state])
        if seq.checkpoint >= 0:
            self.checkpoints.release([seq.checkpoint])
        seq.state = seq.checkpoint = NO_STATE

    def plan_run(self, seq: Sequence, run: Run) -> None:
        if seq.checkpoint >= 0:
            seq.state = self._take()
            self._plan.resumed.append((self.pool.num_blocks + seq.checkpoint, seq.state))
            self._read.append(seq.checkpoint)
            seq.checkpoint = NO_STATE
        super().plan_run(seq, run)

    def can_swap_out(self, seq: Sequence) -> bool:
        return not self._small_host_slots and super().can_swap_out(seq)

    def release(self, seq: Sequence) -> None:
        if seq.checkpoint >= 0:
            self.checkpoints.release([seq.checkpoint])
            seq.checkpoint = NO_STATE
        super().release(seq)

    def check(self, sequences: Iterable[Sequence], plans: Iterable[StepPlan], host_refs: Counter[int]) -> None:
        sequences = list(sequences)
        self._released += self._unwritten.values()
        super().check(sequences, plans, host_refs)
        del self._released[len(self._released) - len(self._unwritten) :]
        self.checkpoints.check()
        refs = Counter([*self._read, *(seq.checkpoint for seq in sequences if seq.checkpoint >= 0)])
        for slot, count in enumerate(self.checkpoints.refs):
            assert count == refs[slot], f"checkpoint slot {slot} has {count} references, and {refs[slot]} are known"
