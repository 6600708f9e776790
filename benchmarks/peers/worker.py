"""The common end of every engine's speed worker: cases come in on stdin, rates go out on stdout, one line of JSON each.

Standard library only: it runs in the interpreters of the peers."""

import json
import os
import random
import sys
import time
from itertools import pairwise
from typing import Protocol

from benchmarks.cases import Case


class Engine(Protocol):
    vocab_size: int

    def submit(self, prompts: list[list[int]], num_output: int) -> None:
        """Take up one greedy sequence a prompt, which ends after `num_output` tokens; nothing is computed yet."""

    def step(self) -> int:
        """Compute one batch; how many tokens the sequences gained by it."""


def measure(engine: Engine, case: Case, seed: int) -> float:
    """Tokens a second, of the kind the case counts."""
    rng = random.Random(seed)
    prompts = [rng.choices(range(100, engine.vocab_size - 100), k=case.num_prompt) for _ in range(case.num_seqs)]
    engine.submit(prompts, case.num_output)
    num_all = case.num_seqs * case.num_output
    steps: list[tuple[int, float]] = []  # tokens gained, and when
    begin, drawn = time.perf_counter(), 0
    while drawn < num_all:
        drawn += engine.step()
        steps.append((drawn, time.perf_counter()))
    assert drawn == num_all, f"{drawn} tokens were drawn, and {num_all} were asked for"
    if case.counts == "prompt":
        return case.num_seqs * case.num_prompt / (next(at for drawn, at in steps if drawn >= case.num_seqs) - begin)
    if case.counts == "decode":
        return decoding_rate(steps, case.num_seqs)
    return num_all / (steps[-1][1] - begin)


def decoding_rate(steps: list[tuple[int, float]], num_seqs: int) -> float:
    """Of the steps in which every sequence gained a token. The first of them may have computed prompts, too."""
    whole = [after - before for (drawn, before), (now, after) in pairwise(steps) if now - drawn == num_seqs]
    whole = whole if steps[0][0] == num_seqs else whole[1:]
    return len(whole) * num_seqs / sum(whole)


def claim_stdout() -> int:
    """A descriptor that only answers are written to; what libraries print goes to stderr from now on."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def answer(engine: Engine, answers: int) -> None:
    """Measure what is asked until stdin ends. An empty line first says that the engine is loaded."""
    os.write(answers, b"\n")
    for line in sys.stdin:
        job = json.loads(line)
        os.write(answers, json.dumps(measure(engine, Case(**job["case"]), job["seed"])).encode() + b"\n")
