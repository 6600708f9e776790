"""The promise on the real model, to the last bit: tokens and logprobs, whatever happens around them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams

pytestmark = pytest.mark.slow

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived an old man who " * 6,
    "Q: What is a quire of paper?\nA:",
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.95, seed=1, max_tokens=12, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.1, min_p=0.02, top_k=200, seed=2, max_tokens=12, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.8, repetition_penalty=1.2, seed=3, max_tokens=12, logprobs=2, ignore_eos=True),
]
REQUESTS = [(prompt, params) for prompt in PROMPTS for params in PARAMS]

Bits = list[tuple[int, float]]  # tokens, and logprobs compared as they are


def run(llm: LLM, requests: Sequence[tuple[str, SamplingParams]]) -> list[Bits]:
    results = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    found = []
    for result in results:
        output = result.outputs[0]
        rows = output.logprobs or []
        found.append([(token, row[token].logprob) for token, row in zip(output.token_ids, rows, strict=True)])
    return found


@pytest.fixture(scope="module")
def alone(default_model: Path) -> list[Bits]:
    llm = LLM(default_model, enable_prefix_caching=False, max_model_len=512, threads=2)
    return [run(llm, [request])[0] for request in REQUESTS]


KV_BLOCK = 2 * 30 * 3 * 64 * 16 * 2  # K and V, layers, heads, head_dim, block_size, bytes

ENGINES: dict[str, dict[str, Any]] = {
    "in a batch of 64": {"enable_prefix_caching": False},
    "chunked": {"enable_prefix_caching": False, "max_num_batched_tokens": 64, "max_num_seqs": 64},
    "from cache": {"enable_prefix_caching": True},
    "on one thread": {"enable_prefix_caching": False, "threads": 1},
    "preempted": {"enable_prefix_caching": False, "kv_cache_memory_bytes": 40 * KV_BLOCK, "max_model_len": 512},
}


@pytest.mark.parametrize("name", ENGINES)
def test_the_same_request_gives_the_same_bits(default_model: Path, alone: list[Bits], name: str) -> None:
    llm = LLM(default_model, **{"max_model_len": 512, **ENGINES[name]})
    times = 4 if name == "in a batch of 64" else 1
    assert run(llm, REQUESTS * times) == alone * times
    if name == "from cache":
        assert run(llm, REQUESTS) == alone
        assert llm.engine.record and llm.engine.record.scheduler.prefix_hits > 0
    if name == "preempted":
        assert llm.engine.record and llm.engine.record.scheduler.preemptions > 0
