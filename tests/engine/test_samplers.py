"""Samplers that look back or keep a state: batching, preemption, drafts and a killed engine change no token."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine_kills import check_that_a_kill_loses_nothing
from fakes import make_drafts_free
from quire import LLM, SamplingParams
from quire.client.engine_client import EngineClient
from quire.client.generate_request import GenerateRequest
from quire.engine.options import EngineOptions

PROMPT = "ab" * 9
LLAMA_CPP = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
KINDS: dict[str, dict[str, Any]] = {
    "dry": {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    "dry, greedy": {"dry_multiplier": 2.0, "temperature": 0.0},
    "n-grams": {"no_repeat_ngram_size": 3},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "dynatemp": {"dynatemp_range": 0.5, "dynatemp_exponent": 1.2},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.05, "n": 2},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 1.0, "mirostat_eta": 0.3},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 1.5, "mirostat_eta": 0.3, "n": 2},
    "llama.cpp's order": {"samplers": LLAMA_CPP, "top_k": 30, "min_p": 0.02, "xtc_probability": 0.3},
}
KV_BLOCK = 2 * 2 * 3 * 16 * 8 * 2  # K and V, layers, heads, head_dim, block_size, bytes
Samples = list[list[int]]
# Few tokens, so that they repeat: some drafts are accepted.
COMMON = {"temperature": 0.5, "seed": 1, "ignore_eos": True, "allowed_token_ids": list(range(60, 68))}


def params(kind: str, max_tokens: int = 40) -> SamplingParams:
    return SamplingParams(**{**COMMON, "max_tokens": max_tokens, **KINDS[kind]})


def run(llm: LLM, kinds: list[str]) -> dict[str, Samples]:
    outputs = llm.generate([PROMPT] * len(kinds), [params(kind) for kind in kinds])
    return {
        kind: [list(sample.token_ids) for sample in output.outputs] for kind, output in zip(kinds, outputs, strict=True)
    }


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> dict[str, Samples]:
    """Each request alone."""
    llm = LLM(tiny_model, enable_prefix_caching=False)
    return {kind: run(llm, [kind])[kind] for kind in KINDS}


def test_every_sampler_does_something(tiny_model: Path, plain: dict[str, Samples]) -> None:
    (output,) = LLM(tiny_model).generate([PROMPT], [SamplingParams(**COMMON, max_tokens=40)])
    for kind, samples in plain.items():
        assert samples[0] != list(output.outputs[0].token_ids), kind


def test_batched_is_as_alone(tiny_model: Path, plain: dict[str, Samples]) -> None:
    assert run(LLM(tiny_model), list(KINDS)) == plain


@pytest.mark.parametrize("swap_space", [0.0, 0.01])
def test_preempted_is_as_undisturbed(tiny_model: Path, plain: dict[str, Samples], swap_space: float) -> None:
    llm = LLM(tiny_model, max_model_len=64, block_size=8, kv_cache_memory_bytes=24 * KV_BLOCK, swap_space=swap_space)
    assert run(llm, list(KINDS)) == plain
    assert llm.engine.stats().preemptions > 0


def test_speculated_is_as_plain(tiny_model: Path, plain: dict[str, Samples]) -> None:
    llm = LLM(tiny_model, spec_method="ngram")
    make_drafts_free(llm.engine._scheduler.speculation)
    assert run(llm, list(KINDS)) == plain
    stats = llm.engine.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens


def test_resumed_after_the_death_of_an_engine_is_as_undisturbed(tiny_model: Path) -> None:
    """Mirostat's mu is no function of the tokens: it travels with the request."""
    wishes = [params(kind, max_tokens=200) for kind in KINDS]
    expected = [
        [list(sample.token_ids) for sample in output.outputs]
        for output in LLM(tiny_model).generate([PROMPT] * len(wishes), wishes)
    ]

    async def read(client: EngineClient, number: int, begun: set[int]) -> Samples:
        samples: Samples = [[] for _ in range(wishes[number].n)]
        stream = await client.submit(GenerateRequest(id=str(number), prompt=PROMPT, params=wishes[number]))
        async for event in stream:
            samples[event.index] += event.token_ids
            begun.add(number)
        return samples

    killed = check_that_a_kill_loses_nothing(EngineOptions(model=str(tiny_model)), read, expected, len(wishes))
    asyncio.run(asyncio.wait_for(killed, 90))
