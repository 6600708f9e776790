"""Several engines behind one service, each with the whole model: the answers of one, whatever dies."""

import asyncio
import os
import random
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from client import poisoned_engine
from engine.tiny_encoders import TEXTS, save_encoder
from quire import LLM, AsyncEngine, Embedder, SamplingParams
from quire.client import engine_router
from quire.client.embed_request import EmbedRequest
from quire.client.engine_client import EngineClient
from quire.client.engine_group import EngineGroup, new_service
from quire.client.engine_process import EngineProcess
from quire.client.generate_request import GenerateRequest
from quire.client.inflight import GenerateStream
from quire.client.machine_shares import cpu_shares, gpu_shares, num_gpus
from quire.client.one_model import OneModel
from quire.client.watchdog import STALL_SECONDS
from quire.core.errors import BadRequest, EngineFailed, Unsupported
from quire.core.structured import Structured
from quire.engine.options import EngineOptions
from quire.server.app import create_app
from quire.server.observe.metrics import ModelMetrics
from quire.server.options import ServerOptions
from trials import LENGTH

TEXT = "A quire is four sheets of paper or parchment folded to form eight leaves, as in medieval manuscripts. "
NUM_STREAMS = 8


def request(number: int, **changes: Any) -> GenerateRequest:
    given: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "seed": number, "ignore_eos": True}
    structured = Structured("regex", "[a-z ]{60,90}") if number == 3 else None
    params = SamplingParams(**given, n=1 + number % 2, structured=structured)
    wanted: dict[str, Any] = {"id": f"r{number}", "params": params, "prompt": f"{number}. {TEXT}"}
    return GenerateRequest(**wanted | changes)


Answer = list[list[int]]  # tokens by sample


async def read(service: EngineGroup | EngineClient, wanted: GenerateRequest) -> Answer:
    answer: Answer = [[] for _ in range(wanted.params.n)]
    async for event in await service.submit(wanted):
        answer[event.index] += event.token_ids
    return answer


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path) -> list[Answer]:
    llm, wanted = LLM(tiny_model), [request(number) for number in range(NUM_STREAMS)]
    results = llm.generate([each.prompt or "" for each in wanted], [each.params for each in wanted], use_tqdm=False)
    return [[output.token_ids for output in result.outputs] for result in results]


def run(main: Coroutine[Any, Any, None], seconds: float = 120) -> None:
    asyncio.run(asyncio.wait_for(main, seconds))


def group_of(model: Path, count: int = 2, **options: Any) -> EngineGroup:
    return EngineGroup(EngineOptions(model=str(model), data_parallel_size=count, **options))


def observed(group: EngineGroup) -> ModelMetrics:
    metrics = ModelMetrics()
    group.observe(metrics.engine)
    return metrics


def test_answers_of_two_engines_are_those_of_one_and_conversations_stay_where_they_are(
    tiny_model: Path, undisturbed: list[Answer]
) -> None:
    async def main() -> None:
        async with group_of(tiny_model) as group:
            metrics = observed(group)
            assert group.info.max_requests == 2 * (256 + 1024) and group.engine_states == ["ready", "ready"]
            assert await asyncio.gather(*(read(group, request(i)) for i in range(NUM_STREAMS))) == undisturbed
            assert metrics.finished["length"] + metrics.finished["stop"] == NUM_STREAMS
            assert all(client.scheduler.prefix_queries > 0 for client in group.decode), "each has computed some"
            before = metrics.cached_tokens
            for number in range(NUM_STREAMS):  # one after the other: load has no say
                await read(group, request(number, prompt=f"{number}. {TEXT}And then?"))
            cached = metrics.cached_tokens - before
            assert cached >= NUM_STREAMS * 0.8 * len(TEXT), f"{cached} prompt tokens came from a cache"
            assert await group.reset_prefix_cache()
            with pytest.raises(BadRequest, match="a request with id twice is in flight"):
                await asyncio.gather(*(read(group, request(0, id="twice")) for _ in range(2)))
            assert metrics.restarts == 0

    run(main())


def test_streams_of_a_killed_engine_go_on_at_another(tiny_model: Path, undisturbed: list[Answer]) -> None:
    async def main() -> None:
        async with group_of(tiny_model) as group:
            metrics, kills = observed(group), 2
            killing = asyncio.create_task(kill_at_random(group, kills))
            await asyncio.gather(*(read_until(group, killing, number, undisturbed) for number in range(NUM_STREAMS)))
            assert metrics.restarts == kills and metrics.finished["error"] == 0 and metrics.retried > 0

    run(main())


def test_a_request_does_not_come_back_to_an_engine_that_it_was_taken_from(
    tiny_model: Path, undisturbed: list[Answer]
) -> None:
    """That engine still has to tell that it was cancelled there."""

    async def main() -> None:
        async with group_of(tiny_model) as group:
            first, second = group.decode
            stream = await first.submit(request(0))
            engine_router._move(stream, first, second)
            os.kill(second.engine_pid, signal.SIGKILL)
            tokens = [token async for event in stream for token in event.token_ids]
            assert [tokens] == undisturbed[0] and stream.owner is second

    run(main())


async def kill_at_random(group: EngineGroup, count: int) -> None:
    chance = random.Random(count)
    for _ in range(count):
        busy = [client for client in group.decode if client.state == "ready" and client.num_in_flight]
        while not busy:
            await asyncio.sleep(0.002)
            busy = [client for client in group.decode if client.state == "ready" and client.num_in_flight]
        await asyncio.sleep(chance.choice((0.0, 0.02, 0.1)))
        client = chance.choice(busy)
        if client.state == "ready":
            os.kill(client.engine_pid, signal.SIGKILL)
        while client.state == "ready":
            await asyncio.sleep(0.002)


async def read_until(group: EngineGroup, killing: "asyncio.Task[None]", stream: int, answers: list[Answer]) -> None:
    number, turn = stream % NUM_STREAMS, 0
    while True:
        assert await read(group, request(number, id=f"{stream}-{turn}", salt=str(turn))) == answers[number]
        turn += 1
        if killing.done():
            return await killing


@pytest.mark.trial
@pytest.mark.skipif(LENGTH == 1, reason="it takes minutes: `make trials`")
@pytest.mark.timeout(60 + 60 * LENGTH)
def test_random_kills_under_64_streams_lose_nothing(tiny_model: Path, undisturbed: list[Answer]) -> None:
    async def main() -> None:
        async with group_of(tiny_model, 3) as group:
            metrics, kills = observed(group), 20 * LENGTH
            killing = asyncio.create_task(kill_at_random(group, kills))
            await asyncio.gather(*(read_until(group, killing, number, undisturbed) for number in range(64)))
            assert metrics.restarts == kills and metrics.finished["error"] == 0

    run(main(), 60 + 50 * LENGTH)


def test_a_stopped_engine_is_killed_and_its_streams_go_on(tiny_model: Path, undisturbed: list[Answer]) -> None:
    async def main() -> None:
        async with group_of(tiny_model) as group:
            metrics, victim = observed(group), group.decode[0]
            streams = [asyncio.create_task(read(group, request(number))) for number in range(NUM_STREAMS)]
            while not victim.num_in_flight:
                await asyncio.sleep(0.002)
            os.kill(victim.engine_pid, signal.SIGSTOP)
            victim._watchdog.seconds = 0.5
            while victim.state != "restarting":
                await asyncio.sleep(0.01)
            victim._watchdog.seconds = STALL_SECONDS  # the next one may take its time to start
            assert await asyncio.gather(*streams) == undisturbed
            assert metrics.restarts == 1 and metrics.finished["error"] == 0

    run(main())


async def tokens_of(stream: GenerateStream) -> list[int]:
    return [token async for event in stream for token in event.token_ids]


class PoisonedProcess(EngineProcess):
    program = (poisoned_engine.__file__,)


def test_a_request_that_kills_engines_takes_one_engine_with_it(
    tiny_model: Path, undisturbed: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.client.engine_group.EngineProcess", PoisonedProcess)

    async def main() -> None:
        async with group_of(tiny_model) as group:
            metrics, pids = observed(group), [client.engine_pid for client in group.decode]
            others = [asyncio.create_task(read(group, request(number))) for number in range(NUM_STREAMS)]
            with pytest.raises(EngineFailed, match="3 times while it worked on this request"):
                await read(group, request(100, prompt="~"))
            assert await asyncio.gather(*others) == undisturbed
            assert metrics.charged == 1 and metrics.finished["error"] == 1
            alive = [client.engine_pid in pids for client in group.decode]
            assert alive.count(True) == 1, "the other engine has not heard of it"

    run(main())


def test_a_request_that_waits_goes_to_an_engine_that_has_room(tiny_model: Path) -> None:
    """One engine has a long answer to write, and others wait behind it."""

    async def main() -> None:
        async with group_of(tiny_model, max_num_seqs=1) as group:
            long = SamplingParams(max_tokens=500, ignore_eos=True, temperature=0)
            short = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0)
            streams = [await group.submit(request(0, params=long, prompt="A"))]
            streams += [await group.submit(request(i, params=short, prompt="A")) for i in range(1, 9)]
            homes = [stream.owner for stream in streams]
            behind = [stream for stream, home in zip(streams, homes, strict=True) if home is homes[0]][1:]
            assert behind, "some wait where the long answer is written"
            answers = await asyncio.gather(*(tokens_of(stream) for stream in streams))
            assert [len(answer) for answer in answers] == [500, *[2] * 8]
            assert all(answer == answers[0][:2] for answer in answers[1:])
            assert any(stream.owner is not homes[0] for stream in behind), "and went where there was room"

    run(main())


DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "seed": 1, "max_tokens": 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "seed": 1, "max_tokens": 8},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 16, "temperature": 0},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 8, "temperature": 0},
    "/api/generate": {"prompt": TEXT, "stream": False, "options": {"num_predict": 8, "temperature": 0}},
    "/generate": {"inputs": TEXT, "parameters": {"max_new_tokens": 8}},
    "/completion": {"prompt": TEXT, "n_predict": 8, "temperature": 0},
}


def test_every_dialect_has_the_answers_of_one_engine(tiny_model: Path) -> None:
    async def answers(num_engines: int) -> dict[str, Any]:
        options = EngineOptions(model=str(tiny_model), served_model_name="tiny", data_parallel_size=num_engines)
        async with new_service(options) as service:
            app = create_app(OneModel(service, service.adapters), ServerOptions())
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://quire") as http:
                calls = [http.post(path, json={"model": "tiny", **body}) for path, body in DIALECTS.items()]
                answered = dict(zip(DIALECTS, await asyncio.gather(*calls), strict=True))
                assert {path: answer.status_code for path, answer in answered.items()} == dict.fromkeys(DIALECTS, 200)
                return {path: text_of(answer.json()) for path, answer in answered.items()}

    one = asyncio.run(answers(1))
    assert asyncio.run(answers(2)) == one and all(map(any, one.values()))


def text_of(answer: Any) -> list[str]:
    """All that a model wrote, wherever a dialect puts it."""
    if isinstance(answer, dict):
        own = [answer[key] for key in ("text", "content", "response", "generated_text") if key in answer]
        return [each for each in own if isinstance(each, str)] + text_of(list(answer.values()))
    return [text for each in answer for text in text_of(each)] if isinstance(answer, list) else []


def test_embeddings_are_computed_by_all_engines(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    expected = Embedder(tmp_path).embed(TEXTS)

    async def embeddings() -> None:
        async with group_of(tmp_path) as group:
            asked = [group.embed(EmbedRequest(id=f"e{number}", texts=TEXTS)) for number in range(8)]
            for answer in await asyncio.gather(*asked):
                assert (expected == answer.vectors).all()
            with pytest.raises(BadRequest, match="embeds texts"):
                await group.submit(request(0))

    run(embeddings())


def test_an_llm_and_an_async_engine_may_have_several_engines(tiny_model: Path, undisturbed: list[Answer]) -> None:
    wanted = [request(number) for number in range(NUM_STREAMS)]
    llm = LLM(tiny_model, data_parallel_size=2)
    results = llm.generate([each.prompt or "" for each in wanted], [each.params for each in wanted], use_tqdm=False)
    assert [[output.token_ids for output in result.outputs] for result in results] == undisturbed
    text = llm.generate(TEXT, SamplingParams(max_tokens=5, temperature=0), use_tqdm=False)[0].outputs[0].text
    streamed = llm.stream(GenerateRequest(id="s", prompt=TEXT, params=SamplingParams(max_tokens=5, temperature=0)))
    assert "".join(event.text for event in streamed) == text
    assert llm.get_world_size() == 2 and llm.reset_prefix_cache()
    assert isinstance(AsyncEngine(str(tiny_model), data_parallel_size=2).client, EngineGroup)


def test_cpus_and_gpus_are_divided_among_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5, 6, 7, 8})
    assert cpu_shares(2, None) == [[0, 1, 2, 5], [6, 7, 8]]
    assert cpu_shares(3, None) == [[0, 1, 2], [5, 6], [7, 8]]
    assert cpu_shares(2, 3) == [[], []] and cpu_shares(8, None) == [[]] * 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    assert gpu_shares(2) == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}]
    assert gpu_shares(1, processes=2) == [{"CUDA_VISIBLE_DEVICES": "3,5"}]
    with pytest.raises(Unsupported, match=r"data_parallel_size is 2 with 2 processes each, and \d GPUs are visible"):
        gpu_shares(2, processes=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("quire.client.machine_shares.DRIVER", tmp_path)
    with pytest.raises(Unsupported, match="data_parallel_size is 2, and 0 GPUs are visible"):
        gpu_shares(2)
    of_stages = {"pipeline_parallel_size": 3, "tensor_parallel_size": 2}
    assert num_gpus(EngineOptions(**of_stages)) == 6
    assert num_gpus(EngineOptions(pipeline_stages="a:1,b:1", tensor_parallel_size=2)) == 2, "the others are elsewhere"


def test_what_cannot_be_had_is_refused_by_name(tiny_model: Path) -> None:
    with pytest.raises(BadRequest, match="data_parallel_size is 0"):
        EngineOptions(data_parallel_size=0)
    with pytest.raises(BadRequest, match="2 engines would publish KV events on one endpoint"):
        group_of(tiny_model, kv_events_config='{"enable_kv_cache_events": true}')
    with pytest.raises(BadRequest, match=r"the stages of one engine, and data_parallel_size.*\n.*quire gateway"):
        EngineGroup(EngineOptions(data_parallel_size=2, pipeline_stages="10.0.0.1:7100"))
    with pytest.raises(BadRequest, match="kv_transfer_config is given, and data_parallel_size too"):
        group_of(tiny_model, kv_transfer_config='{"kv_role": "kv_consumer"}')
    assert isinstance(new_service(EngineOptions(model=str(tiny_model))), EngineClient)
