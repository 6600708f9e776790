"""The policy `fair`: of the tenants whose requests wait, the one that has had least of its share is next.

A request is charged to its tenant when it is admitted, with the tokens that it is expected to take, and corrected when
it ends. See core/fairness.py."""

from collections import Counter

from quire.core.fairness import VirtualCounters
from quire.core.policy import PolicyQueue
from quire.core.sequence_group import SequenceGroup

CACHED_WEIGHT = 0.1  # what a cached prompt token counts; a prompt token is 1
OUTPUT_WEIGHT = 2.0
EXPECTED_OUTPUT = 256  # tokens that a completion is expected to have at most


class FairOrder:
    def __init__(self) -> None:
        self.counters = VirtualCounters()
        self._num_waiting: Counter[str] = Counter()  # by tenant: groups that were never admitted
        self._charged: dict[str, float] = {}  # by request id

    def arrives(self, group: SequenceGroup) -> None:
        tenant = group.namespace[0]
        if not self._num_waiting[tenant]:
            self.counters.arrives(tenant, [other for other, count in self._num_waiting.items() if count])
        self._num_waiting[tenant] += 1

    def reorder(self, waiting: PolicyQueue) -> None:
        """Put groups that were never admitted in the order in which their tenants' counters would have them served."""
        fresh = [seq.group for seq in waiting.items if not seq.group.started]
        ahead: dict[str, float] = {}  # by tenant: what its groups before this one will be charged
        values = self.counters.values()
        for group in sorted(fresh, key=lambda group: (*group.key[:2], *group.key[3:])):
            tenant = group.namespace[0]
            before = ahead.get(tenant, 0.0)
            group.set_key((*group.key[:2], values.get(tenant, 0.0) + before, *group.key[3:]))
            ahead[tenant] = before + expected_tokens(group) / group.weight
        waiting.sort()

    def admitted(self, group: SequenceGroup) -> None:
        tenant = group.namespace[0]
        self._num_waiting[tenant] -= 1
        self._charged[group.id] = expected_tokens(group)
        self.counters.serve(tenant, self._charged[group.id], group.weight)

    def ended(self, group: SequenceGroup) -> None:
        tenant = group.namespace[0]
        if not group.started:
            self._num_waiting[tenant] -= 1
            return
        difference = taken_tokens(group) - self._charged.pop(group.id)
        self.counters.correct(tenant, difference, group.weight)


def expected_tokens(group: SequenceGroup) -> float:
    num_output = min(group.length - group.num_prompt, EXPECTED_OUTPUT)
    return group.num_prompt_ids + OUTPUT_WEIGHT * num_output * group.params.num_samples


def taken_tokens(group: SequenceGroup) -> float:
    cached = (1 - CACHED_WEIGHT) * group.num_cached
    return group.num_prompt_ids - cached + OUTPUT_WEIGHT * group.num_output
