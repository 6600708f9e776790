"""Texts read by a supervised engine process: the numbers are those of `Embedder`, whatever happens meanwhile."""

import asyncio
import os
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.tiny_encoders import QUERY, TEXTS, save_encoder, save_reranker
from engine.tiny_rerankers import SIZES, TEMPLATE, save_decoder, write_logit_score
from engine_kills import check_that_a_kill_loses_nothing
from quire import Embedder, SamplingParams
from quire.client.embed_request import EmbedRequest, ScoreRequest
from quire.client.engine_client import EngineClient
from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest, DeadlinePassed, PromptTooLong, Unsupported
from quire.engine.options import EngineOptions

MANY, ONE = TEXTS * 100, TEXTS[:1]


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


async def embed_many_and_one(client: EngineClient, number: int, begun: set[int]) -> list[list[float]]:
    """The one among many waits for a step or two."""
    while number and not client._requests:
        await asyncio.sleep(0.001)
    vectors = (await client.embed(EmbedRequest(id=str(number), texts=ONE if number else MANY))).vectors
    begun.add(number)
    return np.array(vectors).tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-bert")
    save_encoder(path)
    return path


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-reranker")
    save_reranker(path)
    return path


def test_vectors_over_the_wire_have_the_same_bits(encoder: Path) -> None:
    expected = Embedder(encoder)

    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(encoder), max_num_batched_tokens=16)) as client:
            assert client.info.task == "embed" and client.info.dimensions == 32
            asked = [EmbedRequest(id=str(n), texts=TEXTS * 3 if n == 0 else TEXTS[:1], dimensions=8 if n == 2 else None)
                     for n in range(4)]  # fmt: skip
            answers = await asyncio.gather(*map(client.embed, asked))
            for request, answer in zip(asked, answers, strict=True):
                ours = expected.embed(request.texts, dimensions=request.dimensions)
                assert np.array_equal(np.array([vector.tolist() for vector in answer.vectors], "f4"), ours)
            assert answers[1].num_tokens == len(expected.tokenizer.encode(TEXTS[0]))
            query = await client.embed(EmbedRequest(id="q", texts=["a quire"], prompt_name="query"))
            assert query.vectors[0].tolist() == expected.embed("what is: a quire")[0].tolist()
            scores = await client.score(ScoreRequest(id="s", pairs=[(QUERY, text) for text in TEXTS]))
            np.testing.assert_allclose(scores.scores, expected.score(QUERY, TEXTS), atol=1e-6)

    run(main())


def test_scores_of_a_reranker(reranker: Path) -> None:
    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(reranker))) as client:
            assert client.info.task == "score"
            scores = await client.score(ScoreRequest(id="s", pairs=[(QUERY, text) for text in TEXTS]))
            np.testing.assert_allclose(scores.scores, Embedder(reranker).score(QUERY, TEXTS), rtol=1e-6)
            with pytest.raises(BadRequest, match=r"scores pairs of texts, and does not embed\nhint: use /v1/rerank"):
                await client.embed(EmbedRequest(id="e", texts=TEXTS))

    run(main())


@pytest.mark.parametrize("task", ["score", "auto"])
def test_scores_of_a_decoder(tmp_path: Path, task: str) -> None:
    """By yes and no where it is asked to, or by what its modules name."""
    save_decoder(Qwen3ForCausalLM(Qwen3Config(**SIZES)), tmp_path, None if task == "score" else TEMPLATE)
    if task == "auto":
        write_logit_score(tmp_path, 12, 7)

    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(tmp_path), task=task)) as client:
            assert client.info.task == "score"
            scores = await client.score(ScoreRequest(id="s", pairs=[(QUERY, text) for text in TEXTS]))
            np.testing.assert_allclose(scores.scores, Embedder(tmp_path, task=task).score(QUERY, TEXTS), rtol=1e-6)

    run(main())


def test_a_killed_engine_loses_no_text(encoder: Path) -> None:
    options = EngineOptions(model=str(encoder), max_num_batched_tokens=16)
    expected = [Embedder(encoder).embed(texts).tolist() for texts in (MANY, ONE)]
    run(check_that_a_kill_loses_nothing(options, embed_many_and_one, expected, num_begun=1))


def test_what_cannot_be_read_is_refused(encoder: Path, tiny_model: Path) -> None:
    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(encoder))) as client:
            with pytest.raises(PromptTooLong, match="text 1 has 52 tokens, and the model takes 40"):
                await client.embed(EmbedRequest(id="a", texts=["paper", "paper was made of rags " * 10]))
            with pytest.raises(BadRequest, match="dimensions is 33\nhint: give 1 to 32"):
                await client.embed(EmbedRequest(id="a", texts=["paper"], dimensions=33))
            with pytest.raises(BadRequest, match="embeds texts, and does not generate"):
                await client.submit(GenerateRequest(id="a", params=SamplingParams(), prompt="x"))
            with pytest.raises(BadRequest, match="a request may have 300000\nhint: send them in several"):
                await client.embed(EmbedRequest(id="a", texts=[[5] * 40] * 7501))
            with pytest.raises(DeadlinePassed):
                await client.embed(EmbedRequest(id="a", texts=TEXTS * 50, timeout=0.0))
            leaving = asyncio.create_task(client.embed(EmbedRequest(id="a", texts=TEXTS * 1000)))
            await client.embed(EmbedRequest(id="b", texts=TEXTS[:1]))
            leaving.cancel()
            await client.drain()
        async with EngineClient(EngineOptions(model=str(tiny_model), task="embed")) as client:
            [vector] = (await client.embed(EmbedRequest(id="a", texts=["words"]))).vectors
            assert vector.tolist() == Embedder(tiny_model).embed("words")[0].tolist()
        async with EngineClient(EngineOptions(model=str(tiny_model))) as client:
            with pytest.raises(BadRequest, match="generates text, and does not embed\nhint: serve it with `--task"):
                await client.embed(EmbedRequest(id="a", texts=["words"]))

    run(main())


def test_what_is_sent_to_an_engine_that_just_died_is_sent_again(encoder: Path) -> None:
    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(encoder))) as client:
            os.kill(client.engine_pid, signal.SIGKILL)
            while Path(f"/proc/{client.engine_pid}").exists():  # without letting the loop hear of it
                time.sleep(0.001)
            assert client.state == "ready"  # not noticed yet
            assert len((await client.embed(EmbedRequest(id="a", texts=TEXTS))).vectors) == len(TEXTS)

    run(main())


def test_guesses_are_refused_where_nothing_is_drawn(encoder: Path) -> None:
    async def main() -> None:
        with pytest.raises(Unsupported, match="speculation is for models that generate"):
            async with EngineClient(EngineOptions(model=str(encoder), spec_method="ngram")):
                pass

    run(main())
