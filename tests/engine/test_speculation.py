"""Drafts change nothing: the engine without them is the oracle, to the last bit of every logprob."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_kills import check_that_a_kill_loses_nothing
from fakes import make_drafts_free
from quire import LLM, SamplingParams
from quire.api.outputs import RequestOutput
from quire.client.engine_client import EngineClient
from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest
from quire.core.params import SamplingParams as Params
from quire.core.plan import StepPlan
from quire.core.structured import Structured
from quire.core.watermark import Watermark
from quire.engine.options import EngineOptions
from quire.runtime.spec import METHODS

pytestmark = pytest.mark.slow

CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n"
COPY = f"{CODE}Again:\n{CODE}Again:\n"
LIST = '[{"name": "Ann", "age": 31}, {"name": "Bob", "age": 31}, {"name": "Cy", "age": 31}]\nOnce more:\n'
STORY = "Once upon a time, in a village by the sea,"
SCHEMA = {
    "type": "array",
    "minItems": 3,
    "maxItems": 4,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    },
}


def wish(prompt: str, **params: Any) -> tuple[str, Params]:
    given = {"max_tokens": 32, "temperature": 0.0, "seed": 5, "ignore_eos": True, **params}
    return prompt, SamplingParams(**given)


KINDS = {
    "greedy": wish(COPY),
    "a story": wish(STORY),
    "logprobs": wish(COPY, logprobs=3),
    "prompt logprobs": wish(COPY, prompt_logprobs=1, logprobs=0),
    "drawn": wish(COPY, temperature=0.7),
    "drawn from few": wish(COPY, temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, logprobs=1),
    "typical": wish(COPY, temperature=0.6, typical_p=0.9),
    "penalties": wish(COPY, temperature=0.4, repetition_penalty=1.05, frequency_penalty=0.05, presence_penalty=0.05),
    "bias": wish(COPY, logit_bias={345: 2.0}),
    "bad words": wish(COPY, bad_words=["return"]),
    "watermark": wish(COPY, temperature=0.5, watermark=Watermark(delta=1.0)),
    "samples": wish(COPY, temperature=0.6, n=3, logprobs=0),
    "the best of several": wish(COPY, temperature=0.6, n=1, best_of=3),
    "beams": wish(COPY, n=2, beam_width=2, max_tokens=10),
    "a stop token": wish(COPY, stop_token_ids=[198], min_tokens=9),
    "stop tokens at once": wish(COPY, stop_token_ids=list(range(100, 600))),
    "a stop string": wish(COPY, stop=["- b"], logprobs=0),
    "an end": wish(COPY, ignore_eos=False, max_tokens=60),
    "one token": wish(COPY, max_tokens=1),
    "two tokens": wish(COPY, max_tokens=2),
    "a schema": wish(LIST, structured=Structured("json_schema", json.dumps(SCHEMA)), max_tokens=64),
    "a schema, drawn": wish(
        LIST, structured=Structured("json_schema", json.dumps(SCHEMA)), max_tokens=64, temperature=0.8, logprobs=1
    ),
    "an expression": wish("ab ab ab ab ", structured=Structured("regex", "(ab |cd ){3,40}")),
    "a grammar": wish(
        "1,2,(3,4),1,2,(3,4),",
        structured=Structured("grammar", 'root ::= item ("," item)*\nitem ::= [0-9] | "(" root ")"\n'),
        temperature=0.7,
    ),
}
Bits = tuple[Any, ...]


def bits(output: RequestOutput) -> list[Bits]:
    prompt = [
        None if position is None else sorted((token, found.logprob, found.rank) for token, found in position.items())
        for position in output.prompt_logprobs or []
    ]
    return [
        (
            one.text,
            list(one.token_ids),
            one.finish_reason,
            one.stop_reason,
            one.cumulative_logprob,
            [sorted((token, found.logprob, found.rank) for token, found in at.items()) for at in one.logprobs or []],
            prompt,
        )
        for one in output.outputs
    ]


def run(llm: LLM, wishes: Sequence[tuple[str, Params]]) -> list[list[Bits]]:
    return [bits(output) for output in llm.generate([p for p, _ in wishes], [params for _, params in wishes])]


def speculating(model: Path, **options: Any) -> LLM:
    """Drafts cost nothing there, so that there are many: they pay or not, the answers are the same."""
    if "speculative_config" not in options:
        options.setdefault("spec_method", "ngram")
    llm = LLM(model, **{"max_model_len": 512, **options})
    make_drafts_free(llm.engine._scheduler.speculation)
    return llm


@pytest.fixture(scope="module")
def plain(default_model: Path) -> dict[str, list[Bits]]:
    llm = LLM(default_model, max_model_len=512)
    return dict(zip(KINDS, run(llm, list(KINDS.values())), strict=True))


@pytest.fixture(scope="module")
def quick(default_model: Path) -> LLM:
    return speculating(default_model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_alone(quick: LLM, plain: dict[str, list[Bits]], kind: str) -> None:
    before = quick.engine.stats()
    assert run(quick, [KINDS[kind]])[0] == plain[kind]
    after = quick.engine.stats()
    if kind in ("greedy", "drawn", "samples", "a schema", "logprobs", "an expression"):
        assert after.accepted_tokens > before.accepted_tokens + 5
    if kind in ("beams", "one token", "two tokens"):
        assert after.drafts == before.drafts


KV_BLOCK = 2 * 30 * 3 * 64 * 16 * 2  # K and V, layers, heads, head_dim, block_size, bytes
ENGINES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunked": {"max_num_batched_tokens": 64, "max_num_seqs": 64},
    "without a prefix cache": {"enable_prefix_caching": False},
    "recomputed": {"kv_cache_memory_bytes": 33 * KV_BLOCK},
    "swapped": {"kv_cache_memory_bytes": 33 * KV_BLOCK, "swap_space": 0.1},
    "in large blocks": {"block_size": 64, "spec_tokens": 12},
    "by suffixes": {"spec_method": "suffix"},
    "by a draft model": {"draft": True, "max_num_batched_tokens": 64, "max_num_seqs": 64},
    "by suffixes, swapped": {"spec_method": "suffix", "kv_cache_memory_bytes": 33 * KV_BLOCK, "swap_space": 0.1},
}


@pytest.mark.parametrize("name", ENGINES)
def test_all_requests_together(default_model: Path, plain: dict[str, list[Bits]], name: str) -> None:
    options = dict(ENGINES[name])
    if options.pop("draft", False):
        options["speculative_config"] = {"model": str(default_model)}
    llm = speculating(default_model, **options)
    found = dict(zip(KINDS, run(llm, list(KINDS.values())), strict=True))
    assert found == plain
    stats = llm.engine.stats()
    assert stats.accepted_tokens > 50 and sum(stats.accepted_at) == stats.accepted_tokens
    assert (stats.accepted_tokens == stats.draft_tokens) == (name == "by a draft model")  # which is the model itself
    assert (stats.preemptions > 0) == ("kv_cache_memory_bytes" in ENGINES[name])


def test_cancelled_samples_leave_nothing_behind(quick: LLM, plain: dict[str, list[Bits]]) -> None:
    prompt, params = KINDS["samples"]
    stream = quick.stream(GenerateRequest(id="gone", prompt=prompt, params=params))
    for _ in range(3):
        next(stream)
    stream.close()
    assert quick.engine.stats().held_blocks == 0
    assert run(quick, [KINDS["samples"]])[0] == plain["samples"]


def test_what_a_request_is_charged_for_ends_with_its_stop_string(quick: LLM, plain: dict[str, list[Bits]]) -> None:
    prompt, params = KINDS["a stop string"]
    (output,) = quick.generate(prompt, params)
    assert output.metrics and output.metrics.num_output_tokens == len(plain["a stop string"][0][1])


def test_an_answer_helps_the_next_one_of_its_tenant_only(default_model: Path) -> None:
    llm = speculating(default_model, spec_method="suffix", max_num_seqs=1)

    def accepted(number: int, tenant: str) -> int:
        before = llm.engine.stats().accepted_tokens
        request = GenerateRequest(id=str(number), prompt=STORY, params=wish(STORY)[1], tenant=tenant)
        list(llm.stream(request))
        return llm.engine.stats().accepted_tokens - before

    first, stranger, again = accepted(1, "a"), accepted(2, "b"), accepted(3, "a")
    assert stranger == first < 20 < again


def drafting_for_itself(model: Path, pool: int | None) -> LLM:
    config = {"model": str(model), "num_speculative_tokens": 3}
    block = LLM(model).engine.capacity.cache_bytes // LLM(model).engine.capacity.num_blocks
    given = {} if pool is None else {"kv_cache_memory_bytes": 2 * pool * block, "swap_space": 0.01}
    return speculating(
        model, speculative_config=config, max_model_len=128, max_num_batched_tokens=32, max_num_seqs=8, **given
    )


def check_always_right(model: Path, llm: LLM, pool: int | None, least: int) -> None:
    wishes = [
        wish(
            "ab" * 3 * (1 + number % 5) + str(number % 3), temperature=0.5 * (number % 3), n=1 + number % 3, seed=number
        )
        for number in range(9)
    ]
    for _ in range(2):  # the second time prompts are found in the cache
        assert run(llm, wishes) == run(LLM(model, max_model_len=128), wishes)
    stats = llm.engine.stats()
    assert stats.accepted_tokens == stats.draft_tokens > least
    assert (stats.preemptions > 0) == (pool is not None)


POOLS = pytest.mark.parametrize("pool", [None, 12], ids=["a large pool", "preempted and swapped"])


@POOLS
def test_a_model_that_drafts_for_itself_is_always_right(tiny_model: Path, pool: int | None) -> None:
    """Of the same weights and the same keys and values: wherever the draft model's differ, a draft is rejected."""
    check_always_right(tiny_model, drafting_for_itself(tiny_model, pool), pool, 300)


@POOLS
def test_a_draft_model_that_is_asked_now_and_then_knows_what_it_has_read(
    tiny_model: Path, pool: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads some prompts with the target, others when it is asked; blocks that it has not read are shared, too."""
    llm, rng = drafting_for_itself(tiny_model, pool), random.Random(4)
    scheduler = llm.engine._scheduler
    assert scheduler.speculation is not None

    def set_quotas(plan: StepPlan, num_coming: int, num_seqs: int) -> None:
        for run in plan.runs:
            group = (seq := scheduler.rows[run.row]).group
            count = min(rng.choice([0, 0, 1, 2, 3]), group.length - seq.num_known - 2)
            if count > 0 and group.search is None:
                run.quotas["draft_model"] = count

    monkeypatch.setattr(scheduler.speculation, "set_quotas", set_quotas)
    check_always_right(tiny_model, llm, pool, 100)


def test_what_a_draft_takes_is_the_time_of_its_forward_pass(tiny_model: Path) -> None:
    always = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 8, 3]]}
    llm = LLM(tiny_model, max_model_len=128, speculative_config={"model": str(tiny_model), **always})
    program = llm.engine.executor.runner.proposer._methods[0][1]._program  # type: ignore[attr-defined]
    run = program.run

    def run_slowly(batch: Any) -> Any:
        time.sleep(0.02)
        return run(batch)

    program.run = run_slowly
    llm.generate(["ab" * 9], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    speculation = llm.engine._scheduler.speculation
    assert speculation is not None and speculation._quotas[0]._draft_cost.seconds(1) > 0.015


def test_a_draft_model_with_another_vocabulary_is_refused(default_model: Path, tiny_model: Path) -> None:
    with pytest.raises(BadRequest, match=r"another vocabulary \(.* tokens, and .*gguf has 49,152\)"):
        LLM(default_model, speculative_config={"model": str(tiny_model)})


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_more_drafts_than_a_text_holds_are_refused(tiny_model: Path, method: str) -> None:
    model = {"spec_model": str(tiny_model)} if method == "draft_model" else {}
    with pytest.raises(BadRequest, match=r"31 draft tokens .* 32 tokens .*\n.*be at most 30"):
        LLM(tiny_model, max_model_len=32, spec_method=method, spec_tokens=31, **model)
    llm = LLM(tiny_model, max_model_len=32, spec_method=method, spec_tokens=30, **model)
    make_drafts_free(llm.engine._scheduler.speculation)
    params = SamplingParams(temperature=0, max_tokens=31, ignore_eos=True)
    expected = LLM(tiny_model, max_model_len=32).generate(["a"], params)[0].outputs[0].token_ids
    assert llm.generate(["a"], params)[0].outputs[0].token_ids == expected


@pytest.mark.parametrize("method", [name for name, one in METHODS.items() if not (one.has_model or one.has_head)])
def test_guesses_that_fail_are_soon_not_computed(default_model: Path, method: str) -> None:
    """With what steps really cost."""
    llm = LLM(default_model, max_model_len=512, threads=1, spec_method=method)
    llm.generate(STORY, SamplingParams(temperature=1.0, seed=3, max_tokens=80, ignore_eos=True))
    assert llm.engine.stats().draft_tokens < 20


def test_streams_survive_a_killed_engine(tiny_model: Path) -> None:
    wishes = [wish("ab" * 9, seed=seed, temperature=0.1, max_tokens=200, n=1 + seed % 2) for seed in range(6)]
    expected = [[one[1] for one in answer] for answer in run(LLM(tiny_model), wishes)]

    async def read(client: EngineClient, number: int, begun: set[int]) -> list[list[int]]:
        prompt, params = wishes[number]
        samples: list[list[int]] = [[] for _ in range(params.n)]
        stream = await client.submit(GenerateRequest(id=str(number), prompt=prompt, params=params))
        async for event in stream:
            samples[event.index] += event.token_ids
            begun.add(number)
        return samples

    options = EngineOptions(model=str(tiny_model), speculative_config='{"method": "ngram"}')
    asyncio.run(asyncio.wait_for(check_that_a_kill_loses_nothing(options, read, expected, num_begun=2), 90))


def test_without_the_option_nothing_is_guessed(tiny_model: Path) -> None:
    llm = LLM(tiny_model)
    assert llm.engine._scheduler.speculation is None and llm.options == replace(llm.options, speculative_config=None)
    llm = LLM(tiny_model, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert llm.options.speculation and llm.options.speculation.num_tokens == 3
