"""The runner as its own oracle: however a plan cuts, mixes, copies or swaps the work, the tokens are the same."""

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from quire.core.params import SamplingParams
from quire.core.plan import Admission, Run, SampledRow, StepPlan
from quire.core.structured import Structured
from quire.runtime.runner import Runner
from runtime.tiny_model import BACKENDS, BLOCK_SIZE, NATIVE, make_runner

PROMPTS = [[5, 9, 13, 21, 40, 3, 77, 8, 90, 11], [60, 2], [33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47]]


@pytest.fixture(params=BACKENDS)
def runner(request: pytest.FixtureRequest) -> Runner:
    return make_runner(request.param, num_blocks=40, num_host_blocks=8, max_rows=4)


class Driver:
    """A scheduler by hand: blocks are given out in a scattered order, and taken back when a row retires."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.free = np.random.default_rng(3).permutation(40).tolist()
        self.tables: dict[int, list[int]] = {}
        self.known: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.steps = 0

    def admit(self, row: int, tokens: Sequence[int], computed: int = 0, **params: Any) -> Admission:
        self.tables.setdefault(row, [])
        self._grow(row, len(tokens))
        self.known[row], self.computed[row] = list(tokens), computed
        wishes = SamplingParams(**{"temperature": 0.0, "seed": 1, **params})
        return Admission(row, wishes, 0, list(tokens), len(tokens), list(self.tables[row]), [])

    def run(self, *counts: tuple[int, int], **plan: Any) -> dict[int, SampledRow]:
        """(row, number of tokens) for each run."""
        runs = []
        admitted = {admission.row for admission in plan.get("admitted", ())}
        for row, count in counts:
            new = self._grow(row, self.computed[row] + count)
            runs.append(Run(row, self.computed[row], count, [] if row in admitted else new))
            self.computed[row] += count
        self.steps += 1
        output = self.runner.run(StepPlan(self.steps, runs, **plan))
        assert output.step == self.steps
        for drawn in output.sampled:
            self.known[drawn.row] += drawn.tokens
        return {drawn.row: drawn for drawn in output.sampled}

    def decode(self, *rows: int, steps: int) -> None:
        for _ in range(steps):
            self.run(*((row, 1) for row in rows))

    def retire(self, *rows: int) -> None:
        for row in rows:
            self.free += self.tables.pop(row)
        self.run(retired=list(rows))

    def _grow(self, row: int, num_tokens: int) -> list[int]:
        need = -(-num_tokens // BLOCK_SIZE) - len(self.tables[row])
        new = [self.free.pop() for _ in range(max(need, 0))]
        self.tables[row] += new
        return new


def generate(runner: Runner, prompt: list[int], num_tokens: int = 12, **params: Any) -> list[int]:
    """Alone, the prompt whole."""
    driver = Driver(runner)
    admission = driver.admit(0, prompt, **params)
    driver.run((0, len(prompt)), admitted=[admission])
    driver.decode(0, steps=num_tokens - 1)
    known = driver.known[0]
    driver.retire(0)
    return known


def test_an_empty_plan(runner: Runner) -> None:
    assert runner.run(StepPlan(5, [])).sampled == []


def test_chunks_change_nothing(runner: Runner) -> None:
    whole = generate(runner, PROMPTS[2])
    for size in (1, 4, 7):
        driver = Driver(runner)
        admitted = [driver.admit(0, PROMPTS[2])]
        while driver.computed[0] < len(PROMPTS[2]):
            count = min(size, len(PROMPTS[2]) - driver.computed[0])
            drawn = driver.run((0, count), admitted=admitted)
            assert bool(drawn) == (driver.computed[0] == len(PROMPTS[2]))
            admitted = []
        driver.decode(0, steps=11)
        assert driver.known[0] == whole
        driver.retire(0)


class LateTimer:
    """Tells of the first interval never, and of the others when they are waited for or another one has begun."""

    def __init__(self) -> None:
        self.began = 0
        self.intervals: list[int] = []

    def start(self) -> None:
        self.began += 1

    def stop(self, num_tokens: int, num_steps: int = 1) -> bool:
        if self.began > 1:
            self.intervals.append(self.began)
        return self.began > 1

    def take(self, num_intervals: int = 0) -> list[tuple[int, float]]:
        num_ended = max(num_intervals, len(self.intervals) - 1)
        ended, self.intervals = self.intervals[:num_ended], self.intervals[num_ended:]
        return [(1, 0.01 * number) for number in ended]


def test_an_output_tells_what_its_own_step_took_of_the_device() -> None:
    runner = make_runner(NATIVE, num_blocks=40, num_host_blocks=8, max_rows=4)
    assert runner.run(StepPlan(1, [])).device_seconds == 0
    runner.is_timed, runner._timer = True, LateTimer()
    admission = Driver(runner).admit(0, PROMPTS[0])
    runs = [Run(0, 0, 4, []), Run(0, 4, 4, []), Run(0, 8, 2, []), Run(0, 10, 1, [37]), Run(0, 11, 1, [])]
    plans = [StepPlan(2 + n, [run], admitted=[admission] if n == 0 else []) for n, run in enumerate(runs)]
    told = [runner.run(plan).device_seconds for plan in plans]
    assert told == [0, 0, pytest.approx(0.03), pytest.approx(0.04), pytest.approx(0.05)], "nobody waits for a chunk"


def test_batching_changes_nothing(runner: Runner) -> None:
    alone = [generate(runner, prompt, temperature=0.8, seed=row) for row, prompt in enumerate(PROMPTS)]
    driver = Driver(runner)
    first = driver.admit(1, PROMPTS[1], temperature=0.8, seed=1)
    driver.run((1, 2), admitted=[first])
    others = [driver.admit(row, PROMPTS[row], temperature=0.8, seed=row) for row in (0, 2)]
    driver.run((1, 1), (0, 10), (2, 6), admitted=others)  # a token of one, a whole prompt, a part of a prompt
    driver.run((2, 9), (0, 1), (1, 1))
    driver.decode(0, 1, 2, steps=9)
    driver.decode(2, 0, steps=1)
    driver.decode(2, steps=1)
    assert [driver.known[row] for row in range(3)] == alone


@pytest.mark.parametrize("runner", [NATIVE], indirect=True)  # torch's matrix products depend on the number of rows
def test_batching_changes_no_bit_of_the_logits(runner: Runner) -> None:
    taken: list[np.ndarray] = []
    run = runner.program.run
    runner.program.run = lambda batch: taken.append(np.array(run(batch))) or run(batch)  # type: ignore[method-assign]
    alone = []
    for prompt in PROMPTS:
        generate(runner, prompt, 1)
        alone.append(taken[-1][0])
    driver = Driver(runner)
    admitted = [driver.admit(row, prompt) for row, prompt in enumerate(PROMPTS)]
    driver.run(*((row, len(prompt)) for row, prompt in enumerate(PROMPTS)), admitted=admitted)
    np.testing.assert_array_equal(taken[-1], np.stack(alone))


def test_a_copied_block_grows_two_ways(runner: Runner) -> None:
    plain = generate(runner, PROMPTS[0])
    driver = Driver(runner)
    driver.run((0, 10), admitted=[driver.admit(0, PROMPTS[0])])
    # Row 1 takes over the prompt of row 0: two full blocks shared, the third, half full, copied.
    shared, last = driver.tables[0][:2], driver.free.pop()
    driver.tables[1] = [*shared, last]
    other = driver.admit(1, [*PROMPTS[0], 50], computed=10)
    driver.run((0, 1), (1, 1), copies=[(driver.tables[0][2], last)], admitted=[other])
    driver.decode(0, 1, steps=10)
    assert driver.known[0] == plain
    assert driver.known[1][:22] == generate_with(Driver(runner), [*PROMPTS[0], 50], row=2)


def generate_with(driver: Driver, prompt: list[int], row: int) -> list[int]:
    driver.run((row, len(prompt)), admitted=[driver.admit(row, prompt)])
    driver.decode(row, steps=10)
    return driver.known[row]


def test_swapping_out_and_in_changes_nothing(runner: Runner) -> None:
    plain = generate(runner, PROMPTS[0])
    driver = Driver(runner)
    driver.run((0, 10), admitted=[driver.admit(0, PROMPTS[0])])
    driver.decode(0, steps=4)
    # Row 0 is preempted: its blocks go to the host, and another sequence overwrites them.
    old, tokens, computed = driver.tables.pop(0), driver.known[0], driver.computed[0]
    driver.tables[1] = list(old)
    intruder = driver.admit(1, [88] * 14)
    out = [(block, host) for host, block in enumerate(old)]
    driver.run((1, 14), retired=[0], swap_out=out, admitted=[intruder])
    back = driver.admit(0, tokens, computed=computed)  # in other blocks
    assert not set(old) & set(driver.tables[0])
    swap_in = list(enumerate(driver.tables[0][: len(old)]))
    driver.run((0, 1), swap_in=swap_in, admitted=[back])
    driver.decode(0, steps=6)
    assert driver.known[0] == plain


def test_recomputing_after_preemption_changes_nothing(runner: Runner) -> None:
    plain = generate(runner, PROMPTS[0], temperature=1.0)
    driver = Driver(runner)
    driver.run((0, 10), admitted=[driver.admit(0, PROMPTS[0], temperature=1.0)])
    driver.decode(0, steps=4)
    tokens = driver.known[0]
    driver.retire(0)
    driver.run((3, 15), admitted=[driver.admit(3, tokens, temperature=1.0)])
    driver.decode(3, steps=6)
    assert driver.known[3] == plain


def test_logprobs_of_tokens_and_prompt(runner: Runner) -> None:
    driver = Driver(runner)
    admission = driver.admit(0, PROMPTS[0], logprobs=2, prompt_logprobs=1)
    first = driver.run((0, 6), admitted=[admission])[0]
    second = driver.run((0, 4))[0]
    assert first.tokens == [] and first.logprobs is None
    assert first.prompt_logprobs is not None and second.prompt_logprobs is not None
    scored = [*first.prompt_logprobs, *second.prompt_logprobs]
    assert [line[0].token for line in scored] == PROMPTS[0][1:]
    for target, best in scored:
        assert best.rank == 1 and target.logprob <= best.logprob < 0
    assert second.logprobs is not None
    drawn, best, other = second.logprobs[0]
    assert drawn == best and drawn.token == second.tokens[0] and other.rank == 2
    # The prompt's tokens score what drawing would have seen: all of position 1 .. 3 in one run equal to one by one.
    driver.retire(0)
    again = driver.run((1, 4), admitted=[driver.admit(1, PROMPTS[0][:4], prompt_logprobs=1)])[1]
    assert again.prompt_logprobs is not None
    for one, other_line in zip(again.prompt_logprobs, scored, strict=False):
        assert one[0].logprob == pytest.approx(other_line[0].logprob, abs=1e-4)


def test_beams_yield_candidates_and_do_not_grow(runner: Runner) -> None:
    driver = Driver(runner)
    drawn = driver.run((0, 10), admitted=[driver.admit(0, PROMPTS[0], beam_width=3)])[0]
    assert drawn.tokens == [] and drawn.beams is not None
    assert [beam.rank for beam in drawn.beams] == [1, 2, 3, 4, 5, 6]
    assert sorted((beam.logprob for beam in drawn.beams), reverse=True) == [beam.logprob for beam in drawn.beams]
    assert runner.rows.num_known[0] == 10


def test_a_row_without_numbers_ends_alone(runner: Runner) -> None:
    run = runner.program.run

    def spoiled(batch: Any) -> Any:
        logits = run(batch)
        logits[1] = float("nan")
        return logits

    runner.program.run = spoiled  # type: ignore[method-assign]
    driver = Driver(runner)
    admitted = [driver.admit(row, prompt) for row, prompt in enumerate(PROMPTS)]
    drawn = driver.run(*((row, len(prompt)) for row, prompt in enumerate(PROMPTS)), admitted=admitted)
    assert drawn[1].error and not drawn[1].tokens
    assert not drawn[0].error and len(drawn[0].tokens) == len(drawn[2].tokens) == 1
    assert runner.rows.num_known.tolist() == [11, 2, 16, 0]


class EvenTokens:
    """A language of even ids."""

    error = ""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def write_mask(self, address: int, num_bytes: int) -> bool:
        ctypes.memset(address, 0b01010101, num_bytes)
        return True

    def advance(self, tokens: Sequence[int]) -> bool:
        self.tokens += tokens
        return all(token % 2 == 0 for token in tokens)

    def count_valid(self, tokens: Sequence[int]) -> int:
        return next((count for count, token in enumerate(tokens) if token % 2), len(tokens))

    def rollback(self, count: int) -> None: ...


@pytest.mark.parametrize("idle_cpu", [False, True])
def test_masks_are_made_beside_the_forward_pass_where_a_cpu_is_idle(idle_cpu: bool) -> None:
    runner = make_runner(NATIVE, num_blocks=40, num_host_blocks=0, max_rows=4, idle_cpu=idle_cpu)
    runner.set_matcher_factory(lambda structured: EvenTokens())
    assert runner.structured is not None
    made, masks, run = threading.Event(), runner.structured.masks, runner.program.run
    order: list[str] = []

    def noted_masks(*args: Any) -> Any:
        found = masks(*args)
        order.append("masks")
        made.set()
        return found

    def noted_run(batch: Any) -> Any:
        if idle_cpu:
            assert made.wait(60), "masks are made after the forward pass"
        order.append("run")
        return run(batch)

    runner.structured.masks = noted_masks  # type: ignore[method-assign]
    runner.program.run = noted_run  # type: ignore[method-assign]
    driver = Driver(runner)
    asked = driver.admit(0, PROMPTS[0], structured=Structured("regex", "."))
    driver.run((0, 10), admitted=[asked, driver.admit(1, PROMPTS[1])])
    made.clear()
    driver.run((0, 1))
    assert all(token % 2 == 0 for token in driver.known[0][10:])
    assert order == (["masks", "run"] if idle_cpu else ["run", "masks"]) * 2


def test_what_was_drawn_for_a_row_is_not_taken_for_the_next_one_that_has_it() -> None:
    """A request was cancelled while its step ran, and another has its row before the output comes."""
    runner = make_runner("torch", num_blocks=40, num_host_blocks=0, max_rows=4)
    made: list[EvenTokens] = []

    def new_matcher(structured: Structured) -> EvenTokens:
        made.append(EvenTokens())
        return made[-1]

    runner.set_matcher_factory(new_matcher)
    guided = SamplingParams(temperature=0.0, seed=1, structured=Structured("regex", "."))
    runner.submit(StepPlan(0, [Run(0, 0, 2)], admitted=[Admission(0, guided, 0, PROMPTS[1], 2, [3], [])]))
    other = Admission(0, guided, 0, PROMPTS[0], 10, [5, 6, 7], [])
    runner.submit(StepPlan(1, [Run(0, 0, 10)], retired=[0], admitted=[other]))
    runner.collect()
    assert made[1].tokens == []
    (drawn,) = runner.collect().sampled
    assert made[1].tokens == drawn.tokens
