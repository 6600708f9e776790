"""Beams of models with states: those that a search finds that computes every beam alone, nothing cached."""

from pathlib import Path

import pytest

from engine import test_state_slots, test_states
from engine.same_bits import PROMPTS, SHARED, save_random
from engine.test_delta_states import DELTA, SIZES
from quire import LLM, BeamSearchParams, SamplingParams
from quire.core.beam import BeamSearch
from quire.core.errors import BadRequest
from quire.core.request import IdLogprob

WIDTH, LENGTH = 3, 20  # beams fork in partial blocks and at their ends
SEARCH = BeamSearchParams(beam_width=WIDTH, max_tokens=LENGTH, ignore_eos=True)
Found = list[list[tuple[list[int], float]]]

in_blocks = test_states.hybrid
in_slots = test_state_slots.hybrid
mamba = test_state_slots.mamba


@pytest.fixture(scope="module")
def delta(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(**SIZES, **DELTA)
    return save_random(tiny_model, tmp_path_factory.mktemp("tiny-delta"), lambda: Qwen3NextForCausalLM(config))


@pytest.fixture(scope="module", params=["in_blocks", "in_slots", "mamba", "delta"])
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def searched_alone(model: Path, prompt: str) -> list[tuple[list[int], float]]:
    """Every beam is a prompt of its own, of which one token is asked for."""
    llm = LLM(model, enable_prefix_caching=False, max_num_seqs=1, max_model_len=160)
    ids, search = llm.tokenizer.encode(prompt), BeamSearch(WIDTH, max_tokens=LENGTH)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2 * WIDTH, ignore_eos=True)
    while not search.done:
        continuations = []
        for beam in search.beams:
            [result] = llm.generate({"prompt_token_ids": ids + beam.tokens}, params)
            [best] = result.outputs[0].logprobs or []
            ranked = sorted(best.items(), key=lambda each: -each[1].logprob)
            continuations.append([IdLogprob(token, one.logprob, rank) for rank, (token, one) in enumerate(ranked, 1)])
        search.advance(continuations)
    return [(beam.tokens, beam.logprob) for beam in search.results]


def found(llm: LLM, prompts: list[str]) -> Found:
    return [
        [(list(one.token_ids), one.cumulative_logprob or 0.0) for one in result.outputs]
        for result in llm.beam_search(prompts, SEARCH)
    ]


@pytest.fixture(scope="module")
def expected(model: Path) -> Found:
    return [searched_alone(model, prompt) for prompt in PROMPTS[:2]]


@pytest.mark.parametrize("caching", [True, False])
def test_beams_continue_from_the_states_of_those_they_come_from(model: Path, expected: Found, caching: bool) -> None:
    llm = LLM(model, enable_prefix_caching=caching, max_model_len=160, max_num_batched_tokens=24, max_num_seqs=12)
    for _ in range(2):
        assert found(llm, PROMPTS[:2]) == expected
    assert llm.engine.stats().held_blocks == llm.engine.stats().held_slots == 0


def test_searches_in_little_memory_find_the_same(model: Path, expected: Found) -> None:
    capacity = LLM(model, max_model_len=128, max_num_seqs=12).engine.capacity
    size = 16 * capacity.block_bytes + 24 * capacity.state_bytes // max(capacity.num_slots, 1)
    llm = LLM(model, max_model_len=128, max_num_seqs=12, kv_cache_memory_bytes=size)
    assert found(llm, PROMPTS[:2] * 2) == expected * 2
    assert llm.engine.stats().preemptions > 0 or llm.engine.capacity.num_slots  # without slots, others wait


def test_a_search_that_is_wider_than_the_slots_is_refused(request: pytest.FixtureRequest) -> None:
    model: Path = request.getfixturevalue("in_slots")
    llm = LLM(model, max_num_seqs=2)
    with pytest.raises(BadRequest, match="beam_width is 3, and 2 sequences run at the same time"):
        llm.beam_search([SHARED], SEARCH)
