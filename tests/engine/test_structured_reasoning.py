"""Structured output of a model that reasons: reasoning is free, what follows its end is held, and nothing else
changes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from engine_kills import check_that_a_kill_loses_nothing
from quire import LLM, SamplingParams
from quire.client.engine_client import EngineClient
from quire.client.generate_request import GenerateRequest
from quire.core.structured import Structured
from quire.engine.options import EngineOptions
from quire.text.reasoning import FORMATS

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED = [{"role": "user", "content": "Who?"}]
BUDGETS = (0, 3, 11, 20)  # a random model would reason for hundreds of tokens


def params(budget: int | None = None, **given: Any) -> SamplingParams:
    wanted = {
        "seed": 3,
        "max_tokens": 120,
        "structured": Structured("json_schema", json.dumps(SCHEMA)),
        "enable_in_reasoning": False,
        "thinking_token_budget": budget,
        **given,
    }
    return SamplingParams(**wanted)


def chat(llm: LLM, *budgets: int | None, **given: Any) -> list[list[int]]:
    each = [params(budget, **given) for budget in budgets]
    return [output.outputs[0].token_ids for output in llm.chat([ASKED] * len(each), each)]


def answer(llm: LLM, tokens: list[int]) -> Any:
    """What follows the end of reasoning; it has to be valid."""
    end = llm.tokenizer.id_of("</think>")
    value = json.loads(llm.tokenizer.decode(tokens[tokens.index(end) + 1 :]))
    assert Draft202012Validator(SCHEMA).is_valid(value), value
    return value


@pytest.fixture(scope="module")
def llm(tiny_thinker: Path) -> LLM:
    return LLM(tiny_thinker, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    return [chat(llm, budget)[0] for budget in BUDGETS]


def test_reasoning_is_that_of_the_free_answer_and_the_answer_is_valid(llm: LLM, alone: list[list[int]]) -> None:
    [free] = chat(llm, None, structured=None, max_tokens=20)
    end = llm.tokenizer.id_of("</think>")
    assert end is not None
    for budget, tokens in zip(BUDGETS, alone, strict=True):
        length = tokens.index(end)
        assert length <= budget and tokens[:length] == free[:length]
        answer(llm, tokens)


def test_reasoning_that_ends_by_itself(llm: LLM) -> None:
    end = llm.tokenizer.id_of("</think>")
    assert end is not None
    lengths = set()
    for seed in range(8):
        [tokens] = chat(llm, None, seed=seed, logit_bias={end: 4.0, **dict.fromkeys(llm.tokenizer.eos_ids, -100.0)})
        answer(llm, tokens)
        lengths.add(tokens.index(end))
    assert len(lengths) > 3


def test_without_a_reader_of_reasoning_the_answer_is_all_there_is(llm: LLM) -> None:
    for given in (None, True):
        [output] = llm.chat(ASKED, params(5, enable_in_reasoning=given))
        assert Draft202012Validator(SCHEMA).is_valid(json.loads(output.outputs[0].text))


def test_a_prompt_that_has_ended_reasoning_leaves_the_answer(llm: LLM) -> None:
    [output] = llm.chat(ASKED, params(5), chat_template_kwargs={"enable_thinking": False})
    assert Draft202012Validator(SCHEMA).is_valid(json.loads(output.outputs[0].text))


def test_the_model_may_begin_reasoning_itself_or_answer(llm: LLM) -> None:
    begin = llm.tokenizer.id_of("<think>")
    assert begin is not None
    [output] = llm.generate("So: ", params(4, logit_bias={begin: 100.0}))
    tokens = output.outputs[0].token_ids
    assert tokens[0] == begin and len(tokens) > 5
    answer(llm, tokens)
    [output] = llm.generate("So: ", params(4, logit_bias={begin: -100.0}))
    assert Draft202012Validator(SCHEMA).is_valid(json.loads(output.outputs[0].text))


def test_a_batch_changes_nothing(llm: LLM, alone: list[list[int]]) -> None:
    assert chat(llm, *BUDGETS) == alone
    mixed = [params(budget) for budget in BUDGETS] + [params(structured=None), params(enable_in_reasoning=True)]
    outputs = llm.chat([ASKED] * len(mixed), mixed)
    assert [output.outputs[0].token_ids for output in outputs[:4]] == alone


def test_chunks_and_caches_change_nothing(tiny_thinker: Path, alone: list[list[int]]) -> None:
    chunked = LLM(tiny_thinker, max_num_batched_tokens=5, max_num_seqs=3)
    assert chat(chunked, *BUDGETS) == alone
    assert chat(chunked, *BUDGETS) == alone


def test_drafts_change_nothing(llm: LLM, tiny_thinker: Path) -> None:
    greedy = chat(llm, *BUDGETS, temperature=0)
    for method in ("ngram", "suffix"):
        drafting = LLM(tiny_thinker, spec_method=method)
        for _ in range(2):  # the second time, suffixes of the first are known
            assert chat(drafting, *BUDGETS, temperature=0) == greedy


def test_preemption_changes_nothing(tiny_thinker: Path, alone: list[list[int]]) -> None:
    block = 2 * 2 * 3 * 16 * 4 * 2  # K and V, layers, heads, head_dim, block_size, bytes
    tight = LLM(
        tiny_thinker,
        enable_prefix_caching=False,
        block_size=4,
        max_model_len=180,
        kv_cache_memory_bytes=50 * block,
    )
    assert chat(tight, *BUDGETS * 4) == alone * 4
    record = tight.engine.record
    assert record is not None and record.scheduler.preemptions > 0


def test_samples_share_nothing_but_the_prompt(llm: LLM) -> None:
    five = llm.chat(ASKED, params(7, n=5))[0].outputs
    two = llm.chat(ASKED, params(7, n=2))[0].outputs
    assert [sample.token_ids for sample in five[:2]] == [sample.token_ids for sample in two]
    assert len({json.dumps(answer(llm, sample.token_ids)) for sample in five}) > 1


def test_answers_survive_a_killed_engine(tiny_thinker: Path, llm: LLM) -> None:
    asked = [params(BUDGETS[number % 4], seed=number, n=1 + number % 2, temperature=1.5) for number in range(12)]
    whole = [[sample.token_ids for sample in llm.chat(ASKED, one)[0].outputs] for one in asked]

    async def read(client: EngineClient, number: int, begun: set[int]) -> list[list[int]]:
        samples: list[list[int]] = [[] for _ in range(asked[number].n)]
        wanted = GenerateRequest(id=f"r{number}", params=asked[number], messages=ASKED, reasoning=FORMATS["qwen3"])
        async for event in await client.submit(wanted):
            samples[event.index] += event.token_ids
            begun.add(number)
        return samples

    options = EngineOptions(model=str(tiny_thinker))
    asyncio.run(check_that_a_kill_loses_nothing(options, read, whole, num_begun=3))
