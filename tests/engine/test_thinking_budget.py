"""`thinking_token_budget`: reasoning ends in time, and nothing else changes."""

import asyncio
from pathlib import Path

import pytest

from quire import LLM, AsyncEngine, SamplingParams
from quire.core.errors import BadRequest
from quire.core.structured import Structured

ASKED = [{"role": "user", "content": "Why?"}]


def params(budget: int | None, **given: object) -> SamplingParams:
    wanted = {"seed": 3, "max_tokens": 40, "ignore_eos": True, "thinking_token_budget": budget, **given}
    return SamplingParams(**wanted)  # type: ignore[arg-type]


def chat(llm: LLM, *budgets: int | None, **given: object) -> list[list[int]]:
    each = [params(budget, **given) for budget in budgets]
    return [output.outputs[0].token_ids for output in llm.chat([ASKED] * len(each), each)]


@pytest.fixture(scope="module")
def llm(tiny_thinker: Path) -> LLM:
    return LLM(tiny_thinker)


def end_of(llm: LLM) -> int:
    end = llm.tokenizer.id_of("</think>")
    assert end is not None
    return end


def test_reasoning_ends_at_the_budget_and_is_the_same_until_there(llm: LLM) -> None:
    [free] = chat(llm, None)
    assert end_of(llm) not in free, "or this says nothing"
    for budget in (0, 1, 7, 20):
        [limited] = chat(llm, budget)
        assert limited[: budget + 1] == [*free[:budget], end_of(llm)]
        assert len(limited) == 40, "what follows is free"
    assert chat(llm, 39) == [[*free[:39], end_of(llm)]] and chat(llm, 100) == [free]


def test_a_batch_changes_nothing(llm: LLM) -> None:
    budgets = (None, 3, 11, 0, 100)
    assert chat(llm, *budgets) == [tokens for budget in budgets for tokens in chat(llm, budget)]


def test_drafts_change_nothing(llm: LLM, tiny_thinker: Path) -> None:
    budgets = (None, 3, 11)
    for method in ("ngram", "suffix"):
        drafting = LLM(tiny_thinker, spec_method=method)
        assert chat(drafting, *budgets, temperature=0) == chat(llm, *budgets, temperature=0)


def test_preemption_changes_nothing(llm: LLM, tiny_thinker: Path) -> None:
    small = LLM(tiny_thinker, block_size=4, kv_cache_memory_bytes=50_000, max_model_len=96)
    budgets = (3, 11, 5, 20, None, 0)
    assert chat(small, *budgets) == chat(llm, *budgets)


def test_reasoning_that_the_model_begins_itself_is_limited_too(llm: LLM) -> None:
    begin = llm.tokenizer.id_of("<think>")
    assert begin is not None
    [output] = llm.generate("So: ", params(3, max_tokens=7, logit_bias={begin: 100.0}))
    assert output.outputs[0].token_ids == [begin, begin, begin, begin, end_of(llm), begin, end_of(llm)]


def test_it_reaches_an_engine_in_another_process(llm: LLM, tiny_thinker: Path) -> None:
    prompt = llm.tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)

    async def ask() -> list[int]:
        engine = AsyncEngine(str(tiny_thinker))
        try:
            async for output in engine.generate(prompt, params(5)):
                last = output
            return last.outputs[0].token_ids
        finally:
            await engine.shutdown()

    assert asyncio.run(ask())[5] == end_of(llm)


def test_structured_output_from_the_first_token_has_no_reasoning_to_limit(llm: LLM) -> None:
    asked = params(2, structured=Structured.one_of(["yes", "no"]), ignore_eos=False)
    [output] = llm.chat(ASKED, asked)
    assert output.outputs[0].text in ("yes", "no")


def test_a_model_that_marks_no_reasoning_refuses(tiny_model: Path) -> None:
    plain = LLM(tiny_model)
    with pytest.raises(BadRequest, match="thinking_token_budget is 5, and this model marks no reasoning"):
        plain.chat(ASKED, params(5))
    plain.tokenizer.chat_template = "<think>{# </think> #}"
    with pytest.raises(BadRequest, match="`</think>`, which is not one token"):
        plain.chat(ASKED, params(5))
    with pytest.raises(BadRequest, match="thinking_token_budget is -1"):
        params(-1)
