"""State slots: where the recurrent states of sequences are, and the checkpoints of them that the prefix tree keeps.

A run starts from the state in one slot and leaves states in others: after its last token and, for checkpoints, after
tokens on the way. No slot is copied, so a plan has nothing to do for states but to name slots."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from itertools import islice

from quire.core.block_pool import BlockPool
from quire.core.host_index import HostIndex
from quire.core.plan import Run, StepPlan
from quire.core.prefix_tree import NO_STATE, NamespaceRoot, PrefixNode, PrefixTree
from quire.core.sequence import NEVER, Sequence

CHECKPOINT_TOKENS = 512  # between checkpoints on the way through a prompt, at least
MAX_ON_THE_WAY = 8  # of these


class StateIndex:
    """Which node of the prefix tree names a slot: a `BlockIndex`."""

    has_gaps = True

    def __init__(self) -> None:
        self._nodes: dict[int, PrefixNode] = {}  # by slot
        self.superseded: set[int] = set()  # slots that are evicted first

    def __contains__(self, slot: int) -> bool:
        return slot in self._nodes

    def add(self, slot: int, node: PrefixNode) -> None:
        assert node.state == NO_STATE and slot not in self._nodes
        self._nodes[slot] = node
        node.state = slot

    def remove(self, slot: int) -> None:
        self._nodes.pop(slot).state = NO_STATE
        self.superseded.discard(slot)

    def is_branch(self, slot: int) -> bool:
        """Whether prompts go on in several ways from a checkpoint."""
        return len(self._nodes[slot].children) > 1

    def belongs_to(self, slot: int, tenant: str) -> bool:
        node = self._nodes[slot]
        while node.parent is not None:
            node = node.parent
        assert isinstance(node, NamespaceRoot)
        return node.namespace[0] == tenant

    def walk(self) -> Iterator[PrefixNode]:
        return iter(self._nodes.values())


class StateSlots:
    """Slots 0 .. num_slots, counted by reference.

    A sequence that runs has its state in one slot, `Sequence.state`, after the tokens that are computed or planned. It
    writes into that slot if it alone holds it and no node names it; else into a new one. So it needs at most two, and
    `max_running` sequences of which each has its two always find them. Checkpoints get what is left.

    What a plan reads or writes is not given to another sequence in the same plan: it is released when the next plan is
    made."""

    def __init__(
        self, num_slots: int, max_num_seqs: int, tree: PrefixTree, num_host_slots: int, first_host_id: int
    ) -> None:
        """`first_host_id`: of host slots, where they are numbered with the host blocks."""
        assert num_slots >= 3, f"{num_slots} state slots: a sequence needs two, and a checkpoint one"
        self.max_running = min(max_num_seqs, num_slots // 3)
        self.index = StateIndex()
        self.pool = self.checkpoints = BlockPool(num_slots, self.index)
        self.host_index = HostIndex()  # of checkpoints that the host keeps
        self.host = BlockPool(num_host_slots, self.host_index)
        self._first_host_id = first_host_id
        self._lent: list[int] = []  # slots that are held until they are sent to other engines
        self.checkpoint_kept: Callable[[PrefixNode], None] = lambda node: None  # set where they go beyond the slots
        self.block_size = tree.block_size
        tree.removed = self._forget
        self._released: list[int] = []  # by the plan in the making, or since it was made
        self._superseded: list[int] = []  # slots that are evicted first, once they are released
        self._num_planned = 0  # runs of the plan in the making

    def begin_plan(self, plan: StepPlan) -> None:
        self.pool.release(self._released)
        self._released, self._num_planned = [], 0
        self._order_superseded()

    def _order_superseded(self) -> None:
        for slot in self._superseded:
            self.checkpoints.evict_first(slot)
        self._superseded = []

    @property
    def has_unwritten(self) -> bool:
        """Whether the next plan writes checkpoints."""
        return False

    @property
    def num_spare(self) -> int:
        """Slots that no run of this plan can need, whatever sequences it still gets."""
        return self.pool.num_available - 2 * (self.max_running - self._num_planned)

    def _take(self) -> int:
        """A free slot for a state."""
        return self._take_of(self.pool)

    def _take_of(self, pool: BlockPool) -> int:
        """A free slot. If all have checkpoints, the least recently used one is evicted, of those that are superseded
        first. One where prompts branch is passed over, as long as these are less than half of all."""
        if pool.num_cached == pool.num_available:
            for slot in list(islice(pool.cached, pool.num_cached // 2)):
                if not self.index.is_branch(slot):
                    break
                pool.touch(slot)
        return pool.take()

    def place_of(self, node: PrefixNode) -> int:
        """The number of the slot of a checkpoint in plans."""
        return node.state

    def has_checkpoint(self, node: PrefixNode) -> bool:
        return node.state != NO_STATE

    def can_continue(self, seq: Sequence) -> bool:
        """Whether the state of a sequence is on the device."""
        return seq.state >= 0

    # ---- plan

    def start_from(self, seq: Sequence, node: PrefixNode) -> None:
        """Let `seq`, which has computed less than the path to `node`, continue from its checkpoint."""
        self.pool.hold(node.state)
        self.index.superseded.discard(node.state)
        if seq.state >= 0:
            self.pool.release([seq.state])
        seq.state = node.state

    def plan_run(self, seq: Sequence, run: Run) -> None:
        """Say in which slots the run of a sequence finds and leaves its state."""
        end = run.start + run.count
        self._num_planned += 1
        source = run.state = seq.state
        positions = self._checkpoints(seq, run.start, end)
        ends_with_checkpoint = positions[-1:] == [end]
        is_private = source >= 0 and self.pool.refs[source] == 1 and source not in self.index
        num_needed = 0 if is_private and not ends_with_checkpoint else 1
        for position in positions[: len(positions) - ends_with_checkpoint]:
            if self._has_room(seq, position, num_needed):
                seq.checkpoints[position] = self._take()
                run.states.append((position, seq.checkpoints[position]))
        seq.state = self._take() if num_needed else source
        run.states.append((end, seq.state))
        if ends_with_checkpoint:
            seq.checkpoints[end] = seq.state
            self.pool.hold(seq.state)
        if num_needed and source >= 0:
            self._released.append(source)

    def _has_room(self, seq: Sequence, position: int, num_needed: int) -> bool:
        """Whether a slot is left for a checkpoint on the way, beside the `num_needed` of the run. At the end of a
        prompt, and where prompts branch, any is evicted for it; elsewhere, one that another has superseded."""
        if self.num_spare <= num_needed:
            return False
        num_cheap = self.checkpoints.num_available - self.checkpoints.num_cached + len(self.index.superseded)
        return num_cheap > num_needed or position == seq.branch or position >= self._prompt_end(seq)

    def _checkpoints(self, seq: Sequence, start: int, end: int) -> list[int]:
        """Where tokens start .. end of a sequence are to leave checkpoints, in order: positions at ends of blocks."""
        last = end // self.block_size * self.block_size
        if last <= start or seq.index_at == NEVER or seq.checkpoints:
            return []
        prompt_end = self._prompt_end(seq)
        distance = -(-prompt_end // (CHECKPOINT_TOKENS * MAX_ON_THE_WAY)) * CHECKPOINT_TOKENS
        wanted = {seq.branch, prompt_end, *range(0, min(last, prompt_end), distance or CHECKPOINT_TOKENS)}
        if last > prompt_end:
            wanted.add(last)
        positions = sorted(p for p in wanted if start < p <= last and p % self.block_size == 0)
        return [p for p in positions if (node := self._node(seq, p)) is None or not self.has_checkpoint(node)]

    def _prompt_end(self, seq: Sequence) -> int:
        """The end of the last full block that another sequence with the same prompt can start from."""
        return (seq.group.num_prompt - 1) // self.block_size * self.block_size

    def _node(self, seq: Sequence, position: int) -> PrefixNode | None:
        """The node of the block of `seq` that ends at `position`, if it is in the tree."""
        node, depth = seq.node, position // self.block_size
        for _ in range(seq.num_indexed - depth):
            assert node is not None
            node = node.parent
        return node if 0 < depth <= seq.num_indexed else None

    # ---- checkpoints

    def attach(self, seq: Sequence) -> None:
        """Let nodes name the checkpoints of blocks that are in the tree by now, and drop those that cannot be there."""
        for position, slot in list(seq.checkpoints.items()):
            node = self._node(seq, position)
            if node is None and seq.index_at != NEVER:
                continue  # the tokens of the block are not known yet
            del seq.checkpoints[position]
            self._released.append(slot)
            if node is None or self.has_checkpoint(node):
                continue
            self._add(slot, node)
            if position > seq.group.num_prompt:
                self._replace_last(seq, node)
            else:
                self._keep(node)
            self._supersede_above(node)

    def _add(self, slot: int, node: PrefixNode) -> None:
        """Let a node name the state in a slot."""
        self.index.add(slot, node)

    def _keep(self, node: PrefixNode) -> None:
        """Have the checkpoint of a node saved in a tier beyond the slots."""
        self.checkpoint_kept(node)

    def _supersede_above(self, node: PrefixNode) -> None:
        """The checkpoint before the one of `node` is the first to be evicted, unless prompts branch there."""
        above = node.parent
        while above is not None and above.state == NO_STATE:
            above = above.parent
        if above is not None and len(above.children) <= 1:
            self.index.superseded.add(above.state)
            self._superseded.append(above.state)

    def attach_arrived(self, seq: Sequence) -> None:
        """Let a node name the state that `seq` continues from, which came from beyond the slots."""
        node = self._node(seq, seq.num_computed) if seq.num_computed % self.block_size == 0 else None
        if node is not None and not self.has_checkpoint(node):
            self._add(seq.state, node)

    def _replace_last(self, seq: Sequence, node: PrefixNode) -> None:
        """A sequence that decodes keeps its last checkpoint only, unless a sequence holds the one before."""
        before, seq.last_checkpoint = seq.last_checkpoint, node
        if before is not None and before.state >= 0 and self.checkpoints.refs[before.state] == 0:
            self._forget(before)

    def _forget(self, node: PrefixNode) -> None:
        """A node loses its checkpoint, or leaves the tree."""
        if (slot := node.state) >= 0:
            self.index.remove(slot)
            self.checkpoints.forget(slot)

    # ---- drafts

    def plan_drafts(self, seq: Sequence, run: Run, count: int) -> None:
        """Leave a state after each of the `count` drafts that now end the run, to continue from any of them."""
        end = run.start + run.count
        seq.draft_states = [(end - count, seq.state)]
        for position in range(end - count + 1, end + 1):
            seq.draft_states.append((position, self._take()))
        run.states += seq.draft_states[1:]
        seq.state = seq.draft_states[-1][1]

    def settle_drafts(self, seq: Sequence, num_tokens: int) -> None:
        """Continue from the state after the first `num_tokens` tokens: the drafts behind them were rejected."""
        for position, slot in seq.draft_states:
            if position == num_tokens:
                seq.state = slot
            else:
                self.pool.release([slot])
        seq.draft_states = []

    # ---- swap

    def can_swap_out(self, seq: Sequence) -> bool:
        """Which of the states after its drafts is the one to continue from is not known while these are in flight."""
        return not seq.draft_states and seq.state >= 0 and self.host.num_available > 0

    def swap_out(self, seq: Sequence, plan: StepPlan) -> int:
        """-> the host slot of its state, which the caller holds"""
        host = self.host.take()
        self.host.hold(host)  # one reference is the plan's
        plan.state_swap_out.append((seq.state, host))
        return host

    def swap_in(self, seq: Sequence, plan: StepPlan) -> None:
        """Let `seq` continue from its state on the host. The plan has its reference to the host slot from now on."""
        assert seq.state == NO_STATE, "a sequence has two states to continue from"
        seq.state = self._take()
        plan.state_swap_in.append((seq.host_state, seq.state))
        seq.host_state = NO_STATE

    def host_id(self, host: int) -> int:
        """The number of a host slot behind those of the host blocks."""
        return self._first_host_id + host

    def split_host_ids(self, ids: Iterable[int]) -> tuple[list[int], list[int]]:
        """-> host blocks, host slots"""
        first, ids = self._first_host_id, list(ids)
        return [host for host in ids if host < first], [host - first for host in ids if host >= first]

    def drop_host_state(self, seq: Sequence) -> None:
        if seq.host_state >= 0:
            self.host.release([seq.host_state])
            seq.host_state = NO_STATE

    def start_from_host(self, seq: Sequence, host: int) -> None:
        """Let a sequence that is being admitted continue from a state on the host, and not from a checkpoint."""
        self.host.hold(host)
        if seq.state >= 0:
            self.pool.release([seq.state])
        seq.state, seq.host_state = NO_STATE, host

    # ---- what is sent to other engines

    def lend(self, slot: int) -> bool:
        """Hold a slot until `take_back`, if all sequences that run find theirs without it."""
        if len(self._lent) >= self.pool.num_blocks - 2 * self.max_running:
            return False
        self.pool.hold(slot)
        self._lent.append(slot)
        return True

    def take_back(self, slot: int) -> None:
        self._lent.remove(slot)
        self.pool.release([slot])

    # ---- beams

    def fork(self, seq: Sequence, parent: Sequence) -> None:
        """Continue from the state of `parent`, which both have: each leaves its next one in a slot of its own."""
        self.pool.hold(parent.state)
        seq.state = parent.state

    def move(self, seq: Sequence, parent: Sequence) -> None:
        """Continue in the slot of `parent`, which ends, with the checkpoints that it has left."""
        seq.state, parent.state = parent.state, NO_STATE
        seq.checkpoints, parent.checkpoints = parent.checkpoints, {}
        seq.last_checkpoint, parent.last_checkpoint = parent.last_checkpoint, None
        seq.branch = parent.branch

    # ---- sequences end

    def release(self, seq: Sequence) -> None:
        if seq.draft_states:
            self.pool.release([slot for _, slot in seq.draft_states])
        elif seq.state >= 0:
            self.pool.release([seq.state])
        self.pool.release(list(seq.checkpoints.values()))
        self.drop_host_state(seq)
        if seq.last_checkpoint is not None and self.has_checkpoint(seq.last_checkpoint):
            self._keep(seq.last_checkpoint)
        seq.state, seq.checkpoints, seq.draft_states = NO_STATE, {}, []
        seq.branch, seq.last_checkpoint = 0, None

    def check(self, sequences: Iterable[Sequence], plans: Iterable[StepPlan], host_refs: Counter[int]) -> None:
        """Assert every invariant, given all live sequences, all plans in flight and what others hold of the host."""
        self.pool.check()
        self.host.check()
        host_refs = host_refs.copy()
        for plan in plans:
            host_refs.update(swapped_states(plan))
        refs: Counter[int] = Counter([*self._released, *self._lent])
        for seq in sequences:
            name = f"sample {seq.sample} of {seq.group.id}"
            has_state = self.can_continue(seq) or (seq.host_state >= 0 and seq.num_computed > 0)
            assert has_state == (seq.num_computed > 0), f"{name} has {seq.num_computed} tokens and no state"
            host_refs.update([seq.host_state] if seq.host_state >= 0 else [])
            held = [slot for _, slot in seq.draft_states] or ([seq.state] if seq.state >= 0 else [])
            refs.update([*held, *seq.checkpoints.values()])
        for slot, count in enumerate(self.pool.refs):
            assert count == refs[slot], f"state slot {slot} has {count} references, and {refs[slot]} are known"
        for slot, count in enumerate(self.host.refs):
            assert count == host_refs[slot], f"host slot {slot} has {count} references, and {host_refs[slot]} are known"
        for node in self.index.walk():
            assert node.state in self.index, "a node and the state slot it names disagree"


def swapped_states(plan: StepPlan) -> list[int]:
    """The host slots that a plan has references to."""
    return [*(host for _, host in plan.state_swap_out), *(host for host, _ in plan.state_swap_in)]


def depth_of_checkpoint(path: Many[PrefixNode]) -> int:
    """How many blocks of a path the last checkpoint on it follows."""
    return next((depth for depth in range(len(path), 0, -1) if path[depth - 1].state != NO_STATE), 0)
