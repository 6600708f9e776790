"""The common end of every engine's tier worker: rounds of prompts come in on stdin, times go out on stdout, as JSON.

Standard library only: it runs in the interpreters of the peers."""

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Part = tuple[int, int]  # seed, tokens
KV_BYTES = 131_072  # of a token: 32 layers, 8 heads of 128, keys and values in 16 bits


@dataclass(frozen=True, slots=True)
class Limits:
    """What every engine gets."""

    pool_tokens: int
    host_gib: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


class Engine(Protocol):
    def generate(self, prompts: list[list[int]], num_output: int) -> list[int]:
        """Greedy answers of `num_output` tokens to all prompts; how many tokens of each were cached."""


def tokens(parts: Sequence[Part]) -> list[int]:
    """A prompt: the same parts are the same tokens in every engine."""
    ids: list[int] = []
    for seed, length in parts:
        rng = random.Random(seed)
        ids += [rng.randrange(300, 20_000) for _ in range(length)]
    return ids


def limits_of(argument: str) -> Limits:
    return Limits(**json.loads(argument))


def answer(engine: Engine, answers: int) -> None:
    """Measure what is asked until stdin ends. An empty line first says that the engine is loaded."""
    os.write(answers, b"\n")
    for line in sys.stdin:
        job = json.loads(line)
        prompts = [tokens(parts) for parts in job["prompts"]]
        begin = time.perf_counter()
        cached = engine.generate(prompts, job["num_output"])
        result = {"seconds": time.perf_counter() - begin, "cached": cached}
        os.write(answers, json.dumps(result).encode() + b"\n")
