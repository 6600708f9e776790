"""A fake executor that checks every plan it runs."""

from collections import deque
from dataclasses import dataclass, field, replace

from fake_language import adapter_state, chain, language_model, mix
from fake_peers import FakeDecodeEngines, FakePrefillEngines
from fake_tiers import FakeStore
from quire.core.draft_policy import ANY_METHOD, DraftMethod, DraftPolicy
from quire.core.draft_tree import (
    ROOT,
    UNKNOWN_PARENT,
    DraftTree,
    accepted_path,
    child_with,
    is_unknown,
    parent_of,
    without_chain,
)
from quire.core.params import SamplingParams
from quire.core.plan import UNKNOWN, Admission, Proposal, Run, SampledRow, StepOutput, StepPlan
from quire.core.request import IdLogprob
from quire.core.speculation import Speculation
from quire.executors.protocol import Capacity


@dataclass
class FakeRow:
    params: SamplingParams
    sample: int
    tokens: list[int]
    num_prompt: int
    table: list[int]
    stop_ids: list[int]
    slot: int = -1
    adapter: str = ""
    states: list[int] = field(default_factory=list)  # chain(tokens), from the adapter on
    num_computed: int = 0
    tree: DraftTree | None = None  # proposed last, if it is known here only


def make_drafts_free(speculation: Speculation | None) -> None:
    """Let the cost models believe that every step takes the same time, and a draft none: nearly all of them pay."""
    assert speculation is not None, "the scheduler has no speculation"
    speculation.budget.ahead = 0  # nor does a sequence lose a step while it waits for its drafts
    models = [(speculation.budget.step_cost, 1.0), *((quotas._draft_cost, 1e-6) for quotas in speculation._quotas)]
    for cost, seconds in models:
        for num_tokens in (1, 9, 100) * 20:
            cost.record_step(num_tokens, seconds)
        cost.record_step = lambda num_tokens, seconds, num_rows=0: None  # type: ignore[method-assign]


ASKED_METHOD = "asked"


def draft_policy(num_drafts: int) -> DraftPolicy | None:
    """What `FakeExecutor` proposes: by a method that is free, and by one that is asked. 0: nothing."""
    if not num_drafts:
        return None
    return DraftPolicy((DraftMethod(max_tokens=num_drafts), DraftMethod(ASKED_METHOD, num_drafts, 0.7, 0.1)))


def known(run: Run, tree: DraftTree | None) -> Run:
    """With the drafts that the scheduler does not know."""
    count = len(run.drafts)
    return run if tree is None else replace(run, drafts=tree.tokens[:count], parents=tree.parents[:count])


class FakeExecutor:
    """Runs plans on a KV cache that holds, for each slot, the hash of the text it was computed from.

    The next token is a function of (seed, sample, text), so scheduling cannot change it. Every slot a run reads must
    hold what its row's own tokens would have put there: a block shared, copied or swapped wrongly is an error."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 16,
        num_host_blocks: int = 0,
        vocab_size: int = 64,
        max_model_len: int = 4096,
        ahead: int = 0,
        window: int = 0,
        num_drafts: int = 0,
        accuracy: float = 0.8,
        trees: bool = False,
        unknown_trees: bool = False,
        store: FakeStore | None = None,
        peers: FakePrefillEngines | FakeDecodeEngines | None = None,
        has_states: bool = False,
        num_slots: int = 0,
        num_host_slots: int = 0,
        num_checkpoint_slots: int = 0,
        num_pages: int = 0,
        page_window: int = 0,
    ) -> None:
        """With `num_drafts` it proposes up to that many draft tokens, each correct with probability `accuracy`; with
        `trees`, more of them beside these, which the scheduler does not know if they are `unknown_trees` of the method
        that is free. With `has_states` every block also holds, behind its slots, the hash of the
        text up to the block's last token. With `num_slots`, that hash is in state slots beside the blocks. With
        `num_pages`, the hashes of the last `page_window` tokens of a text are also in window pages."""
        self.page_window = page_window
        self.pages: list[list[int | None]] = [[None] * block_size for _ in range(num_pages)]
        self.page_of: dict[int, int] = {}  # by block
        self.slots: list[int | None] = [None] * (num_slots + num_checkpoint_slots)
        self._num_checkpoint_slots = num_checkpoint_slots
        self.store = store
        self._trees, self._unknown_trees = trees, unknown_trees
        # By step, what accepted drafts of trees have to move when the output is collected: (row, from, to) slots.
        self._unmoved: dict[int, list[tuple[int, FakeRow, list[tuple[int, int]]]]] = {}
        self.peers = peers
        self.transfer = None
        self.num_drafts = num_drafts
        self._accuracy = accuracy
        self.block_size = block_size
        self.window = window
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.ahead = ahead
        self.outputs: deque[StepOutput] = deque()  # not collected
        self.has_states = has_states
        width = block_size + has_states
        self.blocks: list[list[int | None]] = [[None] * width for _ in range(num_blocks)]
        self._num_host_blocks = num_host_blocks
        self.host: list[list[int | None]] = [[None] * width for _ in range(num_host_blocks)]
        self.host += [[None] for _ in range(num_host_slots)]  # host slots are numbered behind the blocks
        self._num_host_slots = num_host_slots
        if num_pages:  # or window pages, as many
            self.host += [[None] * block_size for _ in range(num_host_blocks)]
        self.rows: dict[int, FakeRow] = {}
        self.adapters: dict[int, str] = {}  # by slot
        self.num_computed = 0  # tokens, over all steps

    def load(self) -> None:
        """The size of the cache is known."""

    def allocate(self, size: None) -> Capacity:
        return Capacity(
            num_blocks=len(self.blocks),
            num_host_blocks=self._num_host_blocks,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            weight_bytes=0,
            cache_bytes=0,
            ahead=self.ahead,
            window=self.window,
            has_states=self.has_states,
            num_slots=len(self.slots) - self._num_checkpoint_slots,
            num_checkpoint_slots=self._num_checkpoint_slots,
            num_host_slots=self._num_host_slots,
            num_pages=len(self.pages),
            page_window=self.page_window,
        )

    def stop(self) -> None:
        self.rows.clear()

    def submit(self, plan: StepPlan) -> None:
        assert len(self.outputs) <= self.ahead, "more plans are in flight than the executor takes"
        self.outputs.append(self.run(plan))

    def collect(self) -> StepOutput:
        output = self.outputs.popleft()
        self.settle(output.step)
        return output

    def settle(self, step: int) -> None:
        """The output of a step is known here: move the keys and values of accepted drafts of trees."""
        for number, row, moves in self._unmoved.pop(step, []):
            if self.rows.get(number) is row:
                for source, target in moves:
                    (block, offset), (to_block, to_offset) = (divmod(at, self.block_size) for at in (source, target))
                    self.blocks[to_block][to_offset] = self.blocks[block][offset]
                    if self.pages:
                        page, to_page = self.pages[self.page_of[block]], self.pages[self.page_of[to_block]]
                        to_page[to_offset] = page[offset]

    def run(self, plan: StepPlan) -> StepOutput:
        for row in plan.retired:
            assert row in self.rows, f"row {row} is retired and not in use"
            del self.rows[row]
        for block, host in plan.swap_out:
            self.host[host] = self.blocks[block][:]
        for page, host in plan.page_swap_out:
            self.host[self._num_host_blocks + host] = self.pages[page][:]
        for block, page in plan.pages:
            self.page_of[block] = page
            self.pages[page] = [None] * self.block_size
        for host, page in plan.page_swap_in:
            self.pages[page] = self.host[self._num_host_blocks + host][:]
        for source, target in plan.page_copies:
            self.pages[target] = self.pages[source][:]
        for host, block in plan.swap_in:
            self.blocks[block] = self.host[host][:]
        for slot, checkpoint in plan.checkpoints:
            self.slots[checkpoint] = self.slots[slot]
        for slot, host in plan.state_swap_out:
            self.host[self._num_host_blocks + host] = [self.slots[slot]]
        for host, slot in plan.state_swap_in:
            [self.slots[slot]] = self.host[self._num_host_blocks + host]
        for checkpoint, slot in plan.resumed:
            self.slots[slot] = self.slots[checkpoint]
        if self.store:
            self.store.begin(plan, self.host)
        if self.peers:
            self.peers.begin(plan, self.host)
        for source, target in plan.copies:
            self.blocks[target] = self.blocks[source][:]
        overwritten = {block for _, block in (*plan.swap_in, *plan.copies)}
        starts = {run.row: run.start for run in plan.runs}
        for row, kept in self.rows.items():
            held = kept.table[self._first_seen(starts.get(row, kept.num_computed)) // self.block_size :]
            assert overwritten.isdisjoint(held), f"a block that row {row} holds is overwritten"
        self.adapters.update(plan.adapters)
        for admission in plan.admitted:
            self._admit(admission)
        trees = {run.row: self.rows[run.row].tree for run in plan.runs if is_unknown(run.parents)}
        if trees:
            plan = replace(plan, runs=[known(run, trees.get(run.row)) for run in plan.runs])
        assert len({run.row for run in plan.runs}) == len(plan.runs), "a row runs twice in one step"
        self._check_slots(plan)
        for run in plan.runs:
            self._write(run)
        for run in plan.runs:  # after all writes: sequences of one step may share what one of them computes
            self._read(run)
        self.num_computed += plan.num_tokens
        self._unmoved[plan.step] = []
        output = StepOutput(plan.step, [one for run in plan.runs if (one := self._sample(run, plan.step)) is not None])
        for one in output.sampled:
            one.tree = trees.get(one.row)
        if not self.ahead:
            self.settle(plan.step)
        return output

    def _admit(self, new: Admission) -> None:
        assert new.row not in self.rows, f"row {new.row} is admitted and in use"
        assert min(new.tokens) >= 0, f"row {new.row} is admitted before its tokens are known"
        adapter = self.adapters[new.adapter] if new.adapter >= 0 else ""
        states = chain(new.tokens, adapter_state(adapter))
        self.rows[new.row] = FakeRow(
            new.params,
            new.sample,
            list(new.tokens),
            new.num_prompt,
            list(new.blocks),
            new.stop_ids,
            new.adapter,
            adapter,
            states,
        )

    def _write(self, run: Run) -> None:
        row = self.rows[run.row]
        row.table += run.new_blocks
        assert row.slot < 0 or self.adapters[row.slot] == row.adapter, f"row {run.row} has lost its adapter"
        if run.drafts:
            assert run.start + run.count == len(row.tokens) + len(run.drafts), f"{run} has drafts that follow nothing"
            root = len(row.states) - 1
            for node, token in enumerate(run.drafts):
                row.states.append(mix(row.states[root + 1 + parent_of(run.parents, node)], token))
            row.tokens += run.drafts
        assert run.count > 0 and run.start + run.count <= len(row.tokens), f"{run} computes what is not known"
        assert len(row.table) * self.block_size >= run.start + run.count, f"{run} has no slots"
        for position in range(run.start, run.start + run.count):
            block, offset = divmod(position, self.block_size)
            self.blocks[row.table[block]][offset] = row.states[position]
            if self.pages:
                self.pages[self.page_of[row.table[block]]][offset] = row.states[position]
        if self.has_states:
            self._continue_state(run, row)
        if self.slots:
            self._leave_states(run, row)

    def _continue_state(self, run: Run, row: FakeRow) -> None:
        """Runs are taken in their order: one may continue from what another before it has written in this step."""
        if run.start:
            state = self.blocks[row.table[(run.start - 1) // self.block_size]][-1]
            assert state == row.states[run.start - 1], f"{run} continues from the state of another position"
        end = run.start + run.count
        for position in range(run.start, end):
            if position == end - 1 or (position + 1) % self.block_size == 0:
                self.blocks[row.table[position // self.block_size]][-1] = row.states[position]

    def _leave_states(self, run: Run, row: FakeRow) -> None:
        """Runs are taken in their order: one may start from a checkpoint that another before it has left."""
        if run.start:
            assert self.slots[run.state] == row.states[run.start - 1], f"{run} starts from the state of another text"
        else:
            assert run.state < 0, f"{run} starts from a state, and there is no text"
        positions = [run.start, *(position for position, _ in run.states)]
        assert positions == sorted(set(positions)) and positions[-1] == run.start + run.count, f"{run} leaves no state"
        for position, slot in run.states:
            self.slots[slot] = row.states[position - 1]

    def _check_slots(self, plan: StepPlan) -> None:
        """What one run leaves in a slot, only runs behind it may read."""
        read: set[int] = set()
        written: set[int] = set()
        for run in plan.runs:
            slots = {slot for _, slot in run.states}
            assert not slots & written, f"{run} overwrites a state of this step"
            assert not slots & read, f"{run} overwrites a state that another run starts from"
            read.add(run.state)
            written |= slots

    def _first_seen(self, position: int) -> int:
        return max(position - self.window + 1, 0) if self.window else 0

    def _read(self, run: Run) -> None:
        row, size, end = self.rows[run.row], self.block_size, run.start + run.count
        for position in range(self._first_seen(run.start), end):
            block, offset = divmod(position, size)
            state = self.blocks[row.table[block]][offset]
            assert state == row.states[position], f"{run} reads wrong keys and values at position {position}"
        for position in range(max(run.start - self.page_window + 1, 0), end) if self.pages else ():
            block, offset = divmod(position, size)
            state = self.pages[self.page_of[row.table[block]]][offset]
            assert state == row.states[position], f"{run} reads a wrong window page at position {position}"
        row.num_computed = end

    def _sample(self, run: Run, step: int) -> SampledRow | None:
        row, end = self.rows[run.row], run.start + run.count
        sampled = SampledRow(run.row)
        if row.params.prompt_logprobs is not None:
            last = min(end, row.num_prompt - 1)
            sampled.prompt_logprobs = [self._logprob(row, i, row.tokens[i]) for i in range(run.start + 1, last + 1)]
        if end == len(row.tokens):
            if row.params.beam_width:
                sampled.beams = self._best(row)[: 2 * row.params.beam_width]
            else:
                self._unmoved[step].append((run.row, row, self._verify(row, run, sampled)))
        return sampled if sampled.tokens or sampled.beams or sampled.prompt_logprobs else None

    def _verify(self, row: FakeRow, run: Run, sampled: SampledRow) -> list[tuple[int, int]]:
        """-> the slots of accepted drafts, where a tree has them and where a chain has them"""
        drafts, first = run.drafts, len(row.tokens) - len(run.drafts)
        del row.tokens[first:], row.states[first:]
        node: int | None = ROOT
        while node is not None:
            node = child_with(drafts, run.parents, node, self._append(row, sampled))
        path = accepted_path(drafts, run.parents, sampled.tokens)
        moves = [(self._slot(row, first + n), self._slot(row, first + depth)) for depth, n in enumerate(path)]
        row.num_computed = len(row.tokens) - 1
        if drafts:
            del row.table[-(-row.num_computed // self.block_size) :]
        wanted = {ANY_METHOD: mix(row.states[-1], 77) % (self.num_drafts + 1), **run.quotas}
        assert all(count <= self.num_drafts for count in wanted.values()), f"{run} asks for more than there are"
        for method, count in wanted.items():
            if proposed := self._propose(row, method, count):
                tree = self._branch(proposed, row.states[-1]) if self._trees else DraftTree(proposed)
                if tree.parents and self._unknown_trees and method == ANY_METHOD:
                    row.tree, count = tree, len(tree.tokens)
                    tree = DraftTree([UNKNOWN] * count, [UNKNOWN_PARENT] * count)
                sampled.proposals.append(Proposal(method, tree.tokens, tree.parents, tree.confidences))
        return moves

    def _slot(self, row: FakeRow, place: int) -> int:
        return row.table[place // self.block_size] * self.block_size + place % self.block_size

    def _branch(self, drafts: list[int], chance: int) -> DraftTree:
        """The drafts with others beside and behind them, in any order, all a function of `chance`."""
        tree, parent = DraftTree([]), ROOT
        for token in drafts:
            chance = mix(chance, token)
            for number in range(chance % 3):
                aside = len(tree.tokens)
                tree.tokens += [(token + 1 + number) % self.vocab_size, token][: 1 + chance // 3 % 2]
                tree.parents += [parent, aside][: 1 + chance // 3 % 2]
            tree.tokens.append(token)
            tree.parents.append(parent)
            parent = len(tree.tokens) - 1
        confidences = [0.5 + 0.4 * (mix(chance, node) % 100 / 100) for node in range(len(tree.tokens))]
        return DraftTree(tree.tokens, without_chain(tree.parents), confidences)

    def _propose(self, row: FakeRow, method: str, count: int) -> list[int]:
        """Draft tokens: the next tokens with mistakes, all a function of the text."""
        tokens, state, chance = row.tokens[:], row.states[-1], mix(row.states[-1], 77 + len(method))
        for _ in range(count):
            chance = mix(chance, len(tokens))
            token = self._next(row, state, len(tokens))
            if chance % 1000 >= 1000 * self._accuracy:
                token = chance // 1000 % self.vocab_size
            tokens.append(token)
            state = mix(state, token)
        return tokens[len(row.tokens) :]

    def _append(self, row: FakeRow, sampled: SampledRow) -> int:
        token = self._next(row, row.states[-1], len(row.tokens))
        sampled.tokens.append(token)
        if row.params.logprobs is not None:
            sampled.logprobs = [*(sampled.logprobs or []), self._logprob(row, len(row.tokens), token)]
        row.tokens.append(token)
        row.states.append(mix(row.states[-1], token))
        return token

    def _next(self, row: FakeRow, state: int, length: int) -> int:
        """The token after a text of that hash and length."""
        token = mix(mix(state, row.params.seed or 0), row.sample) % self.vocab_size
        if length - row.num_prompt < row.params.min_tokens:
            while token in row.stop_ids:
                token = (token + 1) % self.vocab_size
        return token

    def _logprob(self, row: FakeRow, position: int, token: int) -> list[IdLogprob]:
        logprob = language_model(row.states[position - 1], self.vocab_size)[token]
        return [IdLogprob(token, logprob, 1)]

    def _best(self, row: FakeRow) -> list[IdLogprob]:
        logprobs = language_model(row.states[-1], self.vocab_size)
        if len(row.tokens) - row.num_prompt < row.params.min_tokens:
            for token in row.stop_ids:
                logprobs[token] = -1e9
        order = sorted(range(self.vocab_size), key=lambda token: -logprobs[token])
        return [IdLogprob(token, logprobs[token], rank) for rank, token in enumerate(order, 1)]
