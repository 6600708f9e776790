"""Several models behind one address: loaded when asked for, unloaded when others need the room."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from engine.tiny_encoders import save_encoder
from quire import SamplingParams
from quire.client.embed_request import EmbedRequest
from quire.client.generate_request import GenerateRequest
from quire.client.many_models import ManyModels
from quire.core.errors import QueueFull, Unavailable, UnknownModel
from quire.engine.options import EngineOptions


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 90))


def request(number: int, max_tokens: int = 8) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(id=f"r{number}", params=params, prompt="Words")


def options(model: Path, **more: Any) -> EngineOptions:
    return EngineOptions(model=str(model), threads=1, **more)


async def ask(models: ManyModels, name: str | None, number: int = 0, max_tokens: int = 8) -> list[int]:
    stream = await (await models.find(name)).service.submit(request(number, max_tokens))
    try:
        return [token async for event in stream for token in event.token_ids]
    finally:
        await stream.aclose()


def loaded(models: ManyModels) -> list[str]:
    return [offer.name for offer in models.offers() if offer.info is not None]


def test_models_come_and_go(tiny_model: Path, tmp_path: Path) -> None:
    save_encoder(tmp_path)

    async def main() -> None:
        guessing = options(tmp_path, spec_method="ngram")  # which is meant for the others: it continues no texts
        each = {"a": options(tiny_model, spec_method="ngram"), "b": guessing, "c": options(tiny_model)}
        async with ManyModels(each, max_loaded=2) as models:
            assert models.state == "ready" and loaded(models) == ["a"]
            first = await ask(models, None)
            found = await models.find("b")
            vectors = await found.service.embed(EmbedRequest(id="e", texts=["paper"]))
            assert len(vectors.vectors[0]) == 32 and loaded(models) == ["a", "b"]
            assert await ask(models, "a") == first
            assert await ask(models, "c") == first and loaded(models) == ["a", "c"]
            again = await found.service.embed(EmbedRequest(id="e", texts=["paper"]))  # found before it was unloaded
            assert again == vectors and loaded(models) == ["b", "c"]
            with pytest.raises(UnknownModel, match="did you mean `a`"):
                await models.find("aa")
            await models.drain()
            with pytest.raises(Unavailable):
                await ask(models, "a")

    run(main())


def test_what_is_under_way_finishes_first_and_what_comes_meanwhile_waits(tiny_model: Path) -> None:
    async def main() -> None:
        each = {"a": options(tiny_model), "b": options(tiny_model, max_queued_requests=3)}
        async with ManyModels(each, max_loaded=1) as models:
            expected = await ask(models, "a", max_tokens=200)
            long = asyncio.create_task(ask(models, "a", 1, max_tokens=200))
            while not models.offers()[0].info or not models._slots["a"].busy:
                await asyncio.sleep(0.001)
            others = [asyncio.create_task(ask(models, "b", number)) for number in range(8)]
            back = asyncio.create_task(ask(models, "a", 2, max_tokens=200))
            answers = await asyncio.gather(*others, return_exceptions=True)
            assert await long == expected and await back == expected
            assert sum(isinstance(answer, QueueFull) for answer in answers) == 4
            assert [answer for answer in answers if not isinstance(answer, QueueFull)] == [expected[:8]] * 4

    run(main())


def test_a_model_that_cannot_be_loaded_is_told_to_those_who_ask(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    async def main() -> None:
        async with ManyModels({"a": options(tiny_model), "b": options(tmp_path)}, max_loaded=2) as models:
            for _ in range(2):
                with pytest.raises(Exception, match=r"tokenizer\.json"):
                    await ask(models, "b")
            assert await ask(models, "a")

    run(main())


def test_an_idle_model_is_unloaded_and_the_next_request_loads_it(tiny_model: Path) -> None:
    async def main() -> None:
        async with ManyModels({"a": options(tiny_model)}, max_loaded=2, idle_seconds=0.05) as models:
            first = await ask(models, "a")
            stream = await (await models.find("a")).service.submit(request(1, max_tokens=400))
            tokens = [token async for event in stream for token in event.token_ids]
            await stream.aclose()
            assert len(tokens) == 400 and tokens[:8] == first, "what is in flight ends first"
            while loaded(models):
                await asyncio.sleep(0.02)
            assert models.state == "ready"
            assert await ask(models, "a") == first and loaded(models) == ["a"]

    run(main())
