"""Embeddings and scores by several ranks: the numbers of one process."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.test_encoder_engine import MANY, ONE, embed_many_and_one
from engine.tiny_encoders import QUERY, TEXTS, save_encoder
from engine.tiny_rerankers import SIZES, save_decoder
from engine_kills import kill_in_the_middle
from models import test_bert
from models.checking import TINY, random_model
from quire import Embedder
from quire.client.engine_client import EngineClient
from quire.core.errors import BadRequest, Unsupported
from quire.engine.options import EngineOptions
from quire.executors.encoder import EncoderExecutor
from quire.executors.options import ExecutorOptions
from quire.executors.ranks.encoder import RankEncoder, RanksEncoder
from quire.ops.ranks.group import RankGroup, new_shared_memory
from quire.server.observe.metrics import ModelMetrics
from ranks.processes import followers

NAMES = ["bert", "xlm-roberta", "distilbert", "modernbert", "mpnet", "nomic", "score-bert", "score-modernbert"]
OPTIONS = ExecutorOptions(threads=2, max_num_seqs=3, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        if name == "decoder":
            random_model(Qwen3Config(**{**TINY, "head_dim": 32}), seed=3).save_pretrained(path)
        else:
            test_bert.random_encoder(*test_bert.CASES[name], seed=len(name)).save_pretrained(path)
        return path

    return make


def encode(executor: EncoderExecutor) -> Any:
    if executor.num_labels:
        return executor.score(test_bert.PAIRS)
    return np.stack(executor.embed([*test_bert.TEXTS, *test_bert.PAIRS]))


@pytest.mark.parametrize("name", [*NAMES, "decoder"])
def test_ranks_give_the_bits_of_one_process(checkpoint: Callable[[str], Path], name: str) -> None:
    path = checkpoint(name)
    expected = encode(EncoderExecutor(path, OPTIONS))
    memory, size = new_shared_memory(), 2 + len(name) % 3
    with ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(lambda rank: RankEncoder(path, OPTIONS, RankGroup(memory, rank, size)), range(size)))
        for found in pool.map(encode, ranks):
            np.testing.assert_array_equal(found, expected)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-bert")
    save_encoder(path)
    return path


def test_processes_embed_and_score(encoder: Path) -> None:
    alone, two = (Embedder(encoder, tensor_parallel_size=size) for size in (1, 2))
    for embed in (lambda one: one.embed(TEXTS).tolist(), lambda one: one.score(QUERY, TEXTS)):
        assert embed(two) == embed(alone)
    two.stop()
    assert not followers(os.getpid())


def test_processes_score_by_yes_and_no(tmp_path: Path) -> None:
    save_decoder(Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)), tmp_path)
    alone, two = (Embedder(tmp_path, task="score", tensor_parallel_size=size) for size in (1, 2))
    assert two.score(QUERY, TEXTS) == alone.score(QUERY, TEXTS)
    two.stop()


def test_a_killed_rank_loses_no_text(encoder: Path) -> None:
    options = EngineOptions(model=str(encoder), max_num_batched_tokens=16, tensor_parallel_size=2)
    expected = [Embedder(encoder).embed(texts).tolist() for texts in (MANY, ONE)]

    async def main() -> None:
        metrics = ModelMetrics()
        async with EngineClient(options, metrics) as client:
            await kill_in_the_middle(
                client, metrics, embed_many_and_one, expected, 1, victim=lambda engine: followers(engine)[0]
            )

    asyncio.run(asyncio.wait_for(main(), 60))


def test_more_ranks_than_heads_are_refused(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(BadRequest, match=r"tensor_parallel_size is 5, and the model has 4 attention heads"):
        RanksEncoder(checkpoint("bert"), OPTIONS, 5)


def test_stages_and_layers_elsewhere_are_refused(encoder: Path) -> None:
    with pytest.raises(Unsupported, match=r"several stages are for models that generate.*\n.*pipeline_parallel_size"):
        Embedder(encoder, pipeline_parallel_size=2)
    with pytest.raises(Unsupported, match=r"offloaded weights are for models that generate"):
        Embedder(encoder, offload_weights=1)
