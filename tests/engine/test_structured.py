"""Answers in a language, from real models: they are in it, and nothing else changes."""

import asyncio
import json
import re
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from engine_kills import check_that_a_kill_loses_nothing
from quire import LLM, SamplingParams
from quire.client import grammar_check
from quire.client.engine_client import EngineClient
from quire.client.generate_request import GenerateRequest
from quire.client.grammar_check import GrammarCheck
from quire.core.errors import BadRequest, QueueFull
from quire.core.request import Request
from quire.core.structured import Structured
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.engine.start import load_tokenizer, new_executor
from quire.text.tokenizers.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LIST = 'root ::= item ("," item){1,3}\nitem ::= [0-9] | "(" [a-z] ")"\n'
LANGUAGES = {
    "schema": (
        Structured("json_schema", json.dumps(SCHEMA)),
        lambda text: Draft202012Validator(SCHEMA).is_valid(json.loads(text)),
    ),
    "regex": (Structured("regex", r"\d{2,4}(é|x)-[a-z]{3}"), lambda text: re.fullmatch(r"\d{2,4}(é|x)-[a-z]{3}", text)),
    "choice": (Structured.one_of(["yes", "no", "perhaps"]), lambda text: text in ("yes", "no", "perhaps")),
    "grammar": (
        Structured("grammar", LIST),
        lambda text: re.fullmatch(r"([0-9]|\([a-z]\))(,([0-9]|\([a-z]\))){1,3}", text),
    ),
}
NAMES = list(LANGUAGES)
PROMPTS = {"schema": "A person:", "regex": "The number is", "choice": "Is it so? ", "grammar": "A list of numbers: "}


def params(name: str, **given: Any) -> SamplingParams:
    wanted = {"temperature": 1.0, "seed": 5, "max_tokens": 300, "structured": LANGUAGES[name][0], **given}
    return SamplingParams(**wanted)


def tokens(llm: LLM, names: list[str], **given: Any) -> list[list[int]]:
    results = llm.generate([PROMPTS[name] for name in names], [params(name, **given) for name in names])
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    return [tokens(llm, [name])[0] for name in NAMES]


@pytest.fixture(scope="module", params=["tiny_model", "default_model"])
def either(request: pytest.FixtureRequest) -> LLM:
    return LLM(request.getfixturevalue(request.param), max_model_len=512)


@pytest.mark.parametrize("name", LANGUAGES)
def test_answers_are_in_the_language(either: LLM, name: str) -> None:
    for temperature in (0.0, 1.0, 3.0):  # the last is noise that nothing but the mask keeps in order
        output = either.generate(PROMPTS[name], params(name, n=2, temperature=temperature))[0]
        for answer in output.outputs:
            assert answer.finish_reason == "stop"
            assert LANGUAGES[name][1](answer.text), answer.text
        if temperature == 3.0 and name != "choice":
            assert len({answer.text for answer in output.outputs}) > 1


def test_free_json_from_the_default_model(default_model: Path) -> None:
    llm = LLM(default_model, max_model_len=512)
    asked = SamplingParams(temperature=0, max_tokens=200, structured=Structured("json"))
    answer = llm.chat([{"role": "user", "content": "Who wrote Faust? Answer as JSON with author and year."}], asked)
    assert answer[0].outputs[0].finish_reason == "stop"
    assert isinstance(json.loads(answer[0].outputs[0].text), dict)


# -- nothing else changes --------------------------------------------------------------------------------------------


def test_the_engine_writes_json_as_it_is_configured(default_model: Path) -> None:
    """Without a bound on white space, a small model spends hundreds of tokens on one boolean."""
    config = {"disable_additional_properties": True, "disable_any_whitespace": True}
    llm = LLM(default_model, max_model_len=512, structured_outputs_config=config)
    schema = {"type": "object", "properties": {"success": {"type": "boolean"}}, "required": ["success"]}
    asked = [Structured.of(json=schema), Structured.of(json=schema, whitespace_pattern=r"\n {4}")]
    results = llm.generate(["Did it work? "] * 2, [SamplingParams(structured=each, max_tokens=40) for each in asked])
    compact, spread = (result.outputs[0].text for result in results)
    assert re.fullmatch(r'\{"success":(true|false)\}', compact)
    assert re.sub(r"\n {4}", "", spread) in ('{"success":true}', '{"success":false}')


def test_batching_changes_nothing(llm: LLM, alone: list[list[int]]) -> None:
    assert tokens(llm, NAMES) == alone
    mixed = llm.generate(
        [PROMPTS[name] for name in NAMES * 4] + ["Once upon a time"] * 8,
        [params(name) for name in NAMES * 4] + [SamplingParams(seed=number) for number in range(8)],
    )
    assert [result.outputs[0].token_ids for result in mixed[:16]] == alone * 4
    free = [llm.generate("Once upon a time", SamplingParams(seed=number))[0] for number in range(8)]
    assert [result.outputs[0].token_ids for result in mixed[16:]] == [result.outputs[0].token_ids for result in free]


def test_chunks_and_caches_change_nothing(tiny_model: Path, alone: list[list[int]]) -> None:
    chunked = LLM(tiny_model, max_num_batched_tokens=5, max_num_seqs=3)
    assert tokens(chunked, NAMES) == alone
    assert tokens(chunked, NAMES) == alone


@pytest.mark.parametrize("swap_space", [0.0, 0.01])
def test_preemption_changes_nothing(tiny_model: Path, alone: list[list[int]], swap_space: float) -> None:
    block = 2 * 2 * 3 * 16 * 4 * 2  # K and V, layers, heads, head_dim, block_size, bytes
    tight = LLM(
        tiny_model,
        enable_prefix_caching=False,
        block_size=4,
        max_model_len=160,
        kv_cache_memory_bytes=45 * block,
        swap_space=swap_space,
    )
    assert tokens(tight, NAMES * 5, max_tokens=100) == alone * 5
    record = tight.engine.record
    assert record is not None and record.scheduler.preemptions > 0


def test_samples_share_nothing_but_the_prompt(llm: LLM) -> None:
    together = llm.generate(PROMPTS["schema"], params("schema", n=5))[0].outputs
    fewer = llm.generate(PROMPTS["schema"], params("schema", n=2))[0].outputs
    assert [answer.token_ids for answer in together[:2]] == [answer.token_ids for answer in fewer]
    best = llm.generate(PROMPTS["schema"], params("schema", n=1, best_of=5))[0].outputs
    assert best[0].token_ids in [answer.token_ids for answer in together]


def test_beams_stay_in_the_language(llm: LLM) -> None:
    found = llm.generate(PROMPTS["grammar"], params("grammar", n=3, beam_width=3, temperature=0, max_tokens=40))[0]
    assert len({answer.text for answer in found.outputs}) == 3
    for answer in found.outputs:
        assert LANGUAGES["grammar"][1](answer.text), answer.text


# -- where an answer ends --------------------------------------------------------------------------------------------


def test_it_ends_with_the_language_whatever_else_is_asked(llm: LLM) -> None:
    for wish in ({"ignore_eos": True}, {"min_tokens": 50}, {"ignore_eos": True, "min_tokens": 50}):
        answer = llm.generate("x", params("choice", **wish))[0].outputs[0]
        assert (answer.text in ("yes", "no", "perhaps"), answer.finish_reason) == (True, "stop")
    open_end = SamplingParams(structured=Structured("regex", "[a-z]*"), min_tokens=30, max_tokens=60, seed=1)
    assert len(llm.generate("x", open_end)[0].outputs[0].token_ids) >= 30


def test_max_tokens_and_stop_strings_cut_it(llm: LLM, alone: list[list[int]]) -> None:
    cut = llm.generate(PROMPTS["schema"], params("schema", max_tokens=7))[0].outputs[0]
    assert (cut.finish_reason, cut.token_ids) == ("length", alone[0][:7])
    whole = llm.generate(PROMPTS["schema"], params("schema"))[0].outputs[0].text
    stopped = llm.generate(PROMPTS["schema"], params("schema", stop=['"age"']))[0].outputs[0]
    assert (stopped.text, stopped.finish_reason) == (whole[: whole.index('"age"')], "stop")


def test_logprobs_are_those_without_the_language(llm: LLM) -> None:
    """What the model itself would have said: also of a token that only the language brought about."""
    asked = params("choice", temperature=0, logprobs=3)
    guided = llm.generate("x", asked)[0].outputs[0]
    free = llm.generate("x", replace(asked, structured=None, max_tokens=1))[0].outputs[0]
    assert guided.logprobs is not None and free.logprobs is not None
    first, unguided = guided.logprobs[0], free.logprobs[0]
    assert {token: first[token] for token in unguided} == unguided  # the likeliest ones
    assert guided.token_ids[0] not in unguided and first[guided.token_ids[0]].rank > 3


def test_wishes_that_leave_nothing_end_in_an_error_of_that_request_alone(llm: LLM) -> None:
    asked = [params("choice", allowed_token_ids=[3]), params("choice")]
    live, other = (llm._submit(GenerateRequest(id=f"r{i}", params=p, prompt="x")) for i, p in enumerate(asked))
    events = []
    while not (live.finished and other.finished):
        events += [event for _, event in llm._step({one.request.id: one for one in (live, other)})]
    assert sorted(event.finish_reason for event in events if event.finish_reason) == ["error", "stop"]


# -- compiled beside the loop ----------------------------------------------------------------------------------------


def request(number: int, structured: Structured | None, **given: Any) -> Request:
    asked = SamplingParams(max_tokens=20, seed=1, structured=structured, **given)
    return Request(id=f"r{number}", prompt_ids=[5, 6], params=asked, eos_ids=[2])


def test_the_engine_prepares_itself_while_a_language_is_checked(tiny_model: Path) -> None:
    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(tiny_model))) as client:
            told, send = [], client._engine.send

            def telling(message: object) -> None:
                told.append(type(message).__name__)
                send(message)  # type: ignore[arg-type]

            client._engine.send = telling  # type: ignore[assignment]
            client._submissions.engine_ready(telling)
            for number in range(2):
                wanted = GenerateRequest(id=f"r{number}", params=params("choice"), prompt="Is it so? ")
                assert [event async for event in await client.submit(wanted)][-1].final
            assert told[:2] == ["PrepareGrammars", "Submit"] and told.count("PrepareGrammars") == 1

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_loop_goes_on_while_a_language_is_compiled(tiny_model: Path) -> None:
    options = EngineOptions(model=str(tiny_model))
    refused: list[str] = []
    engine = Engine(
        new_executor(tiny_model, options),
        options,
        lambda: load_tokenizer(tiny_model, options),
        refuse=lambda request, error: refused.append(request.id),
    )
    assert engine.compile_queue is not None
    engine.submit(request(0, None, ignore_eos=True))
    engine.submit(request(1, Structured("regex", "[a-z]{5}")))
    engine.submit(request(2, Structured("regex", "(a")))  # wrong
    engine.submit(request(3, Structured("regex", "[a-z]{6}")))  # given up at once
    engine.submit(request(4, Structured("regex", "[a-z]{7}"), n=2))  # and one sample of this
    assert engine.cancel("r3") == [] == engine.cancel("r4", 0)
    events = []
    deadline = time.monotonic() + 30
    while (engine.has_work or len(refused) < 1 or engine.compile_queue._pending) and time.monotonic() < deadline:
        if engine.has_work:
            events += engine.step()
        else:
            time.sleep(0.001)
    ends = {(event.request_id, event.index): event.finish_reason for event in events if event.finish_reason}
    assert refused == ["r2"]
    assert ends == {("r0", 0): "length", ("r1", 0): "stop", ("r4", 0): "cancelled", ("r4", 1): "stop"}
    assert not engine._grammars  # nothing is held for requests that have ended


# -- hostile languages -----------------------------------------------------------------------------------------------

HOSTILE = {
    "properties": Structured(
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(6000)}}),
    ),
    "a long expression": Structured("regex", "(abc|def)?" * 20000),
    "a product": Structured(
        "json_schema",
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"a{i}{j}": {"const": j}}, "required": [f"a{i}{j}"]} for j in range(6)]}
                    for i in range(12)
                ]
            }
        ),
    ),
    "many rules": Structured(
        "grammar", "start: r0\n" + "".join(f'r{i}: r{i + 1} | "x" r{i + 1}\n' for i in range(5000)) + 'r5000: "z"'
    ),
}


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 100))


def test_hostile_languages_are_refused_while_others_stream(tiny_model: Path) -> None:
    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(tiny_model))) as client:
            tokens: list[int] = []

            async def stream() -> None:
                asked = SamplingParams(max_tokens=300, ignore_eos=True, seed=1)
                async for event in await client.submit(GenerateRequest(id="s", params=asked, prompt="x")):
                    tokens.extend(event.token_ids)

            async def ask(number: int, structured: Structured) -> str:
                asked = SamplingParams(max_tokens=20, structured=structured)
                try:
                    events = [
                        e async for e in await client.submit(GenerateRequest(id=f"h{number}", params=asked, prompt="x"))
                    ]
                except BadRequest as refusal:
                    return refusal.message
                return events[-1].finish_reason or ""

            steady = asyncio.create_task(stream())
            answers = await asyncio.gather(*(ask(number, language) for number, language in enumerate(HOSTILE.values())))
            assert all("cannot be used" in answer for answer in answers), answers
            assert len(tokens) > 20, "it waits for those that are refused"
            await steady
            assert len(tokens) == 300
            assert await ask(9, Structured("regex", "[a-z]{3}")) == "stop"
            assert client._grammar_check is not None
            await client._grammar_check.stop()  # what it refused is remembered, and no process is asked again
            assert "cannot be used" in await ask(10, HOSTILE["a long expression"])
            assert client._grammar_check._process is None

    run(main())


def test_answers_survive_a_killed_engine(tiny_model: Path, llm: LLM) -> None:
    asked = [params(NAMES[number % 4], seed=number, n=1 + number % 2, temperature=2.0) for number in range(16)]
    whole = [[answer.token_ids for answer in llm.generate("x", one)[0].outputs] for one in asked]

    async def read(client: EngineClient, number: int, begun: set[int]) -> list[list[int]]:
        samples: list[list[int]] = [[] for _ in range(asked[number].n)]
        wanted = GenerateRequest(id=f"r{number}", params=asked[number], prompt="x")
        async for event in await client.submit(wanted):
            samples[event.index] += event.token_ids
            begun.add(number)
        return samples

    run(check_that_a_kill_loses_nothing(EngineOptions(model=str(tiny_model)), read, whole, num_begun=3))


def test_those_who_ask_for_the_same_wait_together_and_leaving_ends_nothing(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 2)
    vocab = Tokenizer.load(tiny_model).vocab_size

    async def main() -> None:
        check = GrammarCheck(tiny_model, vocab)
        try:
            slow, other = HOSTILE["many rules"], Structured("regex", "b+")
            waiting = [asyncio.create_task(check.check(slow)) for _ in range(5)]
            waiting.append(asyncio.create_task(check.check(other)))
            await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                await check.check(Structured("regex", "c+"))
            waiting[0].cancel()  # its client leaves
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(result) for result in results] == [asyncio.CancelledError, *[BadRequest] * 4, type(None)]
            process = check._process
            await check.check(other)
            await check.check(Structured("regex", "c+"))
            assert check._process is process is not None  # it outlives what it refuses
        finally:
            await check.stop()

    run(main())
