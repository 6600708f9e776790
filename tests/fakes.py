"""Fake executors that check every plan they run."""

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.core.block_keys import TENANT_BYTES, BlockKey
from quire.core.params import SamplingParams
from quire.core.plan import Admission, Fetch, Run, SampledRow, StepOutput, StepPlan
from quire.core.records import TierStats
from quire.core.request import IdLogprob
from quire.core.scheduler import Scheduler
from quire.core.speculation import Speculation
from quire.executors.protocol import Capacity

SEED = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def mix(state: int, value: int) -> int:
    """A hash of (state, value) that is the same in every process."""
    x = (state ^ (value + SEED)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def chain(tokens: list[int], state: int = 0) -> list[int]:
    """For each position a hash of all tokens up to it: what keys and values of that position depend on."""
    states = []
    for token in tokens:
        state = mix(state, token)
        states.append(state)
    return states


def adapter_state(adapter: str) -> int:
    """The hash that a text starts from under a LoRA adapter: its keys and values differ from the first token on."""
    return chain([ord(letter) for letter in adapter])[-1] if adapter else 0


def language_model(state: int, vocab_size: int) -> list[float]:
    """Logprob of each next token after a text whose hash is `state`. Not normalized; all values differ."""
    return [-0.1 - (mix(state, token) % 10_000_019) / 1_000_000 for token in range(vocab_size)]


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


def make_drafts_free(speculation: Speculation | None) -> None:
    """Let the cost model believe that every step takes the same time: nearly all draft tokens pay."""
    assert speculation is not None, "the scheduler has no speculation"
    step_cost = speculation.budget.step_cost
    for num_tokens in (1, 9) * 20:
        step_cost.record_step(num_tokens, 1.0)
    step_cost.record_step = lambda num_tokens, seconds: None  # type: ignore[method-assign]


class FakeStore:
    """A `BlockStore` in memory. Saves and fetches take some steps; some fail, and some are forgotten meanwhile.

    A host block must not change while it is saved, and a key stands for the same content whenever it is saved."""

    def __init__(self, seed: int = 0, *, max_delay: int = 3, failures: float = 0.0) -> None:
        self.blocks: dict[BlockKey, list[int | None]] = {}
        self.seconds = 0.0  # what `read_seconds` says
        self.cost = 0.0  # what `save_seconds` says
        self.hangs = False  # whether saves and fetches never end
        self.num_read = 0
        self._rng = random.Random(seed)
        self._max_delay, self._failures = max_delay, failures
        self._contents: dict[BlockKey, list[int | None]] = {}  # of all keys ever saved
        self._saves: list[tuple[int, int, BlockKey, list[int | None]]] = []  # (steps left, host block, key, content)
        self._fetches: list[tuple[int, Fetch]] = []  # (steps left, fetch)

    @property
    def is_idle(self) -> bool:
        return not self._saves and not self._fetches

    def find(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        stored = []
        for key in keys:
            if key not in self.blocks:
                break
            stored.append(key)
        return stored

    def read_seconds(self, num_blocks: int) -> float:
        return self.seconds

    def save_seconds(self) -> float:
        return self.cost

    def clear(self, tenant: bytes) -> None:
        self.blocks = {key: content for key, content in self.blocks.items() if key[:TENANT_BYTES] != tenant}

    def stats(self) -> TierStats:
        return TierStats(stored_bytes=len(self.blocks))

    def begin(self, plan: StepPlan, host: list[list[int | None]]) -> None:
        for block, key in plan.saves:
            assert self._contents.setdefault(key, host[block][:]) == host[block], "one key stands for two contents"
            self._saves.append((self._rng.randint(0, self._max_delay), block, key, host[block][:]))
        for fetch in plan.fetches:
            for _, block in fetch.blocks:
                host[block] = [None] * len(host[block])
            self._fetches.append((self._rng.randint(0, self._max_delay), fetch))

    def advance(self, scheduler: Scheduler, host: list[list[int | None]]) -> None:
        """One step passes: report what has ended."""
        if self.hangs or scheduler.tiers is None:
            return
        saves, fetches, self._saves, self._fetches = self._saves, self._fetches, [], []
        for left, block, key, content in saves:
            assert host[block] == content, "a host block changes while it is saved"
            if left:
                self._saves.append((left - 1, block, key, content))
                continue
            if self._rng.random() >= self._failures:
                self.blocks[key] = content
            scheduler.tiers.saved(block)
        for left, fetch in fetches:
            if left:
                self._fetches.append((left - 1, fetch))
            else:
                scheduler.tiers.fetched(fetch.id, self._read(fetch, host))

    def _read(self, fetch: Fetch, host: list[list[int | None]]) -> int:
        for number, (key, block) in enumerate(fetch.blocks):
            if key not in self.blocks or self._rng.random() < self._failures:
                self.blocks.pop(key, None)
                return number
            host[block] = self.blocks[key][:]
            self.num_read += 1
        return len(fetch.blocks)


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
        store: FakeStore | None = None,
        has_states: bool = False,
    ) -> None:
        """With `num_drafts` it proposes up to that many draft tokens, each correct with probability `accuracy`. With
        `has_states` every block also holds, behind its slots, the hash of the text up to the block's last token."""
        self.store = store
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
        self.host: list[list[int | None]] = [[None] * width for _ in range(num_host_blocks)]
        self.rows: dict[int, FakeRow] = {}
        self.adapters: dict[int, str] = {}  # by slot
        self.num_computed = 0  # tokens, over all steps

    def load(self) -> None:
        """The size of the cache is known."""

    def allocate(self, size: None) -> Capacity:
        return Capacity(
            num_blocks=len(self.blocks),
            num_host_blocks=len(self.host),
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            weight_bytes=0,
            cache_bytes=0,
            ahead=self.ahead,
            window=self.window,
            has_states=self.has_states,
        )

    def stop(self) -> None:
        self.rows.clear()

    def submit(self, plan: StepPlan) -> None:
        assert len(self.outputs) <= self.ahead, "more plans are in flight than the executor takes"
        self.outputs.append(self.run(plan))

    def collect(self) -> StepOutput:
        return self.outputs.popleft()

    def run(self, plan: StepPlan) -> StepOutput:
        for row in plan.retired:
            assert row in self.rows, f"row {row} is retired and not in use"
            del self.rows[row]
        for block, host in plan.swap_out:
            self.host[host] = self.blocks[block][:]
        for host, block in plan.swap_in:
            self.blocks[block] = self.host[host][:]
        if self.store:
            self.store.begin(plan, self.host)
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
        assert len({run.row for run in plan.runs}) == len(plan.runs), "a row runs twice in one step"
        for run in plan.runs:
            self._write(run)
        for run in plan.runs:  # after all writes: sequences of one step may share what one of them computes
            self._read(run)
        self.num_computed += plan.num_tokens
        return StepOutput(plan.step, [sampled for run in plan.runs if (sampled := self._sample(run)) is not None])

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
            row.states += chain(run.drafts, row.states[-1])
            row.tokens += run.drafts
        assert run.count > 0 and run.start + run.count <= len(row.tokens), f"{run} computes what is not known"
        assert len(row.table) * self.block_size >= run.start + run.count, f"{run} has no slots"
        for position in range(run.start, run.start + run.count):
            block, offset = divmod(position, self.block_size)
            self.blocks[row.table[block]][offset] = row.states[position]
        if self.has_states:
            self._continue_state(run, row)

    def _continue_state(self, run: Run, row: FakeRow) -> None:
        """Runs are taken in their order: one may continue from what another before it has written in this step."""
        if run.start:
            state = self.blocks[row.table[(run.start - 1) // self.block_size]][-1]
            assert state == row.states[run.start - 1], f"{run} continues from the state of another position"
        end = run.start + run.count
        for position in range(run.start, end):
            if position == end - 1 or (position + 1) % self.block_size == 0:
                self.blocks[row.table[position // self.block_size]][-1] = row.states[position]

    def _first_seen(self, position: int) -> int:
        return max(position - self.window + 1, 0) if self.window else 0

    def _read(self, run: Run) -> None:
        row, size, end = self.rows[run.row], self.block_size, run.start + run.count
        for position in range(self._first_seen(run.start), end):
            block, offset = divmod(position, size)
            state = self.blocks[row.table[block]][offset]
            assert state == row.states[position], f"{run} reads wrong keys and values at position {position}"
        row.num_computed = end

    def _sample(self, run: Run) -> SampledRow | None:
        row, end = self.rows[run.row], run.start + run.count
        sampled = SampledRow(run.row)
        if row.params.prompt_logprobs is not None:
            last = min(end, row.num_prompt - 1)
            sampled.prompt_logprobs = [self._logprob(row, i, row.tokens[i]) for i in range(run.start + 1, last + 1)]
        if end == len(row.tokens):
            if row.params.beam_width:
                sampled.beams = self._best(row)[: 2 * row.params.beam_width]
            else:
                self._verify(row, run.drafts, sampled)
        return sampled if sampled.tokens or sampled.beams or sampled.prompt_logprobs else None

    def _verify(self, row: FakeRow, drafts: list[int], sampled: SampledRow) -> None:
        if drafts:
            del row.tokens[-len(drafts) :], row.states[-len(drafts) :]
        for draft in [*drafts, -1]:
            if self._append(row, sampled) != draft:
                break
        row.num_computed = len(row.tokens) - 1
        if drafts:
            del row.table[-(-row.num_computed // self.block_size) :]
        sampled.drafts = self._propose(row)

    def _propose(self, row: FakeRow) -> list[int]:
        """Draft tokens: the next tokens with mistakes, all a function of the text."""
        tokens, state, chance = row.tokens[:], row.states[-1], mix(row.states[-1], 77)
        for _ in range(chance % (self.num_drafts + 1)):
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
