"""Beam search in the scheduler: the beams of a group start, advance and are preempted together.

`core/beam.py` decides which continuations survive; here they become sequences that share blocks with their parents."""

from quire.core.live_groups import LiveGroups
from quire.core.request import IdLogprob, SequenceEvent
from quire.core.sequence import Sequence
from quire.core.sequence_group import SequenceGroup


def start_beams(groups: LiveGroups, group: SequenceGroup) -> None:
    """The leader was admitted: reserve the group's rows, and let the other beams fork once it has the prompt."""
    group.holds_rows = True
    for beam in group.awaiting_prompt:
        groups.start(beam)
    group.awaiting_prompt = []


def stop_beams(groups: LiveGroups, group: SequenceGroup) -> None:
    """Preempt all beams of a group. Their blocks are released, and the leader waits to compute the prompt again."""
    group.holds_rows = False
    for beam in group.live:
        groups.stop(beam)
        beam.candidates = None
        groups.kv_blocks.release(beam)
    group.awaiting_prompt = list(group.live)
    groups.queue_leader(group)


def advance_beams(groups: LiveGroups, seq: Sequence, candidates: list[IdLogprob]) -> list[SequenceEvent]:
    """Keep the continuations of one beam. Once every beam has its own, go on with the best, on new rows."""
    group = seq.group
    assert group.search is not None
    seq.candidates = candidates
    if group.prompt_owner is None:
        group.prompt_owner = seq
    continuations = [beam.candidates for beam in group.live if beam.candidates is not None]
    if len(continuations) < len(group.live):
        return []
    parents = group.search.advance(continuations)
    if group.search.done:
        groups.remove_group(group)
        return group.search_results()
    _fork_beams(groups, group, parents)
    return []


def _fork_beams(groups: LiveGroups, group: SequenceGroup, parents: list[int]) -> None:
    """Make the new beams: the first child of a parent takes its blocks, the others fork from the first."""
    assert group.search is not None
    beams: list[Sequence] = []
    first_child: dict[int, Sequence] = {}
    for sample, (index, beam) in enumerate(zip(parents, group.search.beams, strict=True)):
        parent = group.live[index]
        child = Sequence(group, sample, [*parent.tokens, beam.tokens[-1]])
        if index in first_child:
            groups.kv_blocks.fork(child, first_child[index], parent.num_computed)
        else:
            groups.kv_blocks.move_blocks(child, parent)
            first_child[index] = child
        beams.append(child)
    groups.replace_beams(group, beams)
