"""Preemption: when blocks run out, sequences at the end of the policy order give theirs back and wait again."""

from collections.abc import Iterable

from quire.core.beam_steps import stop_beams
from quire.core.live_groups import LiveGroups
from quire.core.plan import StepPlan
from quire.core.sequence import Sequence


class Preemption:
    """A victim is swapped out if its blocks fit on the host. If not, it is computed again from what is cached."""

    def __init__(self, groups: LiveGroups) -> None:
        self._groups = groups
        self._kv_blocks = groups.kv_blocks
        self.count = 0

    def make_room(self, seq: Sequence, num_blocks: int, plan: StepPlan) -> bool:
        """Preempt sequences behind `seq`, the last first, until `num_blocks` are free; False if none is left."""
        while self._kv_blocks.pool.num_available < num_blocks:
            victim = self._victim(seq, plan.step)
            if victim is None:
                return False
            self._preempt(victim, plan)
        return True

    def _victim(self, seq: Sequence, step: int) -> Sequence | None:
        """The last running sequence behind `seq` that is not part of this step's plan."""
        for other in reversed(self._groups.running.items):
            if other.key <= seq.key:
                return None
            members: Iterable[Sequence] = other.group.live if other.group.search else (other,)
            if not any(member.planned_step == step or member is seq for member in members):
                return other
        return None

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        group = victim.group
        self.count += 1
        self._groups.rows.num_unreserved += group.num_rows
        group.preempted = True
        if group.search is not None:
            stop_beams(self._groups, group)
            return
        self._groups.stop(victim)
        if self._kv_blocks.can_swap_out(victim):
            self._kv_blocks.swap_out(victim, plan)
        else:
            self._kv_blocks.release(victim)
            victim.num_fetches = victim.num_prefills = 0  # its blocks may come from elsewhere when it is admitted again
        self._groups.waiting.push(victim)
