"""Encoder-decoders in the engine: transformers' tokens and beams, and the engine as its own oracle."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BartForConditionalGeneration,
    MarianMTModel,
    MBartForConditionalGeneration,
    T5ForConditionalGeneration,
)

from fakes import make_drafts_free
from models.checking_seq2seq import random_model
from quire.core.errors import BadRequest, PromptTooLong
from quire.core.params import SamplingParams
from quire.core.request import Request, SequenceEvent
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.engine.start import new_executor
from quire.ops.kv_spec import KVSpec
from runtime.oracle import oracle

VOCAB, EOS, START, FORCED = 60, 1, 2, 5
BLOCK = 4
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "forced_eos_token_id": None,
}
BLOCK_BYTES = KVSpec(2, 4, 8, BLOCK, "float32").block_bytes
GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=20)
DRAWN = SamplingParams(temperature=0.9, top_k=20, repetition_penalty=1.2, seed=11, max_tokens=20)
SOURCES = [
    list(torch.randint(6, VOCAB, (n,), generator=torch.Generator().manual_seed(n))) for n in (1, 5, 8, 13, 30, 47)
]
SOURCES = [[int(token) for token in source] for source in SOURCES]
SOURCES[3][:8] = SOURCES[2]  # it begins like another, and what is made of that beginning differs all the same

Outputs = dict[str, list[list[int]]]  # by request, by sample


@dataclass
class Checkpoint:
    path: Path
    model: Any
    start_ids: list[int]


@pytest.fixture(scope="module", params=["t5", "bart"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp(request.param)
    kinds = {"t5": (T5ForConditionalGeneration, T5), "bart": (BartForConditionalGeneration, BART)}
    kind, options = kinds[request.param]
    ids = {"vocab_size": VOCAB, "decoder_start_token_id": START, "pad_token_id": 0, "eos_token_id": EOS}
    model = random_model(kind, {**ids, "bos_token_id": None, **options}, seed=9)
    if request.param == "bart":
        model.generation_config.forced_bos_token_id = FORCED
        model.generation_config.forced_eos_token_id = EOS  # of answers that `max_tokens` ends
    model.save_pretrained(path)
    return Checkpoint(path, model, [START, FORCED] if request.param == "bart" else [START])


@contextmanager
def engine(checkpoint: Checkpoint, num_blocks: int = 200, **given: Any) -> Iterator[Engine]:
    options = EngineOptions(
        model=str(checkpoint.path),
        device="cpu",
        **{
            "max_model_len": 120,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "block_size": BLOCK,
            "kv_cache_dtype": "float32",
            "kv_cache_memory_bytes": num_blocks * BLOCK_BYTES,
            "enable_prefix_caching": False,
            **given,
        },
    )
    made = Engine(new_executor(checkpoint.path, options), options)
    yield made
    made.stop()


def requests(checkpoint: Checkpoint, *params: SamplingParams, sources: list[list[int]] = SOURCES) -> list[Request]:
    return [
        Request(id=f"{number}-{kind}", prompt_ids=source, params=wanted, eos_ids=[EOS], start_ids=checkpoint.start_ids)
        for number, wanted in enumerate(params)
        for kind, source in enumerate(sources)
    ]


def run(served: Engine, wanted: list[Request], told: Callable[[SequenceEvent], None] = lambda event: None) -> Outputs:
    for request in wanted:
        served.submit(request)
    found: Outputs = {request.id: [[] for _ in range(request.params.n)] for request in wanted}
    while served.has_work:
        for event in served.step():
            assert event.finish_reason in (None, "stop", "length"), event.reason
            found[event.request_id][event.index] += event.tokens
            told(event)
        served._scheduler.check()
    return found


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint) -> Outputs:
    """Every request by itself."""
    found: Outputs = {}
    with engine(checkpoint) as served:
        for request in requests(checkpoint, GREEDY, DRAWN, replace(DRAWN, n=3)):
            found |= run(served, [request])
    return found


def theirs(checkpoint: Checkpoint, source: list[int], max_tokens: int | None, **given: Any) -> list[list[int]]:
    """Without what answers begin with, and without padding behind their end."""
    assert max_tokens is not None
    forced = len(checkpoint.start_ids) - 1
    ids = checkpoint.model.generate(
        torch.tensor([source]), max_new_tokens=max_tokens + forced, do_sample=False, **given
    ).tolist()
    answers = [answer[1 + forced :] for answer in ids]
    return [answer[: answer.index(EOS) + 1] if EOS in answer else answer for answer in answers]


def test_greedy_answers_are_those_of_transformers(checkpoint: Checkpoint, alone: Outputs) -> None:
    assert [alone[f"0-{i}"] for i in range(len(SOURCES))] == [theirs(checkpoint, s, 20) for s in SOURCES]


def test_ranks_give_the_same_answers(checkpoint: Checkpoint, alone: Outputs) -> None:
    wanted = requests(checkpoint, GREEDY, DRAWN)
    with engine(checkpoint, tensor_parallel_size=3) as served:
        assert run(served, wanted) == {request.id: alone[request.id] for request in wanted}


def test_company_chunks_and_the_cache_change_nothing(checkpoint: Checkpoint, alone: Outputs) -> None:
    """Sources are longer than a step's budget; the same ones come again while others are read."""
    wanted = requests(checkpoint, GREEDY, DRAWN, replace(DRAWN, n=3))
    with engine(checkpoint) as served:
        assert run(served, wanted) == alone
    for budget in (8, 20):
        with engine(checkpoint, max_num_batched_tokens=budget, enable_prefix_caching=True) as served:
            assert run(served, wanted) == alone
            assert run(served, wanted) == alone


@pytest.mark.parametrize("swap", [0, 60])
def test_preemption_changes_nothing(checkpoint: Checkpoint, alone: Outputs, swap: int) -> None:
    wanted = requests(checkpoint, GREEDY, DRAWN, replace(DRAWN, n=3))
    with engine(checkpoint, 24, max_model_len=84, swap_space=swap * BLOCK_BYTES / 2**30) as served:
        assert run(served, wanted) == alone
        assert served.record is not None and served.record.scheduler.preemptions > 3


@pytest.mark.parametrize("num_blocks", [200, 24])
def test_drafts_change_nothing(checkpoint: Checkpoint, alone: Outputs, num_blocks: int) -> None:
    """Also where the last token of an answer is not the one that is drawn."""
    texts = [[*checkpoint.start_ids, *answer] for answers in alone.values() for answer in answers]
    with engine(checkpoint, num_blocks, max_model_len=84, spec_method="ngram") as served:
        served.executor._runner.proposer = oracle(texts, VOCAB)  # type: ignore[attr-defined]
        make_drafts_free(served._scheduler.speculation)
        assert run(served, requests(checkpoint, GREEDY, DRAWN, replace(DRAWN, n=3))) == alone
        assert served.stats().accepted_tokens > 50


def test_a_source_is_read_once(checkpoint: Checkpoint) -> None:
    """The second time it is all in the cache; one that only begins like it is not."""
    cached: dict[str, int] = {}
    with engine(checkpoint, enable_prefix_caching=True) as served:
        for number, source in enumerate([SOURCES[4], SOURCES[4], SOURCES[4][:16], SOURCES[4][:16] + SOURCES[1]]):
            request = replace(requests(checkpoint, GREEDY)[0], id=str(number), prompt_ids=source)
            run(served, [request], lambda event: cached.__setitem__(event.request_id, event.num_cached))
    assert cached == {"0": 0, "1": 30, "2": 0, "3": 0}


BEAMS = SamplingParams(n=4, beam_width=4, max_tokens=12, seed=0)
SEARCHES = [BEAMS, replace(BEAMS, length_penalty=2.0), replace(BEAMS, early_stopping=True)]


@pytest.fixture(scope="module")
def searched(checkpoint: Checkpoint) -> Outputs:
    return {
        f"{number}-{kind}": theirs(
            checkpoint,
            source,
            params.max_tokens,
            num_beams=4,
            num_return_sequences=4,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        for number, params in enumerate(SEARCHES)
        for kind, source in enumerate(SOURCES[1::2])
    }


@pytest.mark.parametrize("num_blocks", [200, 28])
def test_beams_are_those_of_transformers(checkpoint: Checkpoint, searched: Outputs, num_blocks: int) -> None:
    with engine(checkpoint, num_blocks, max_model_len=72, max_num_seqs=16) as served:
        found = run(served, requests(checkpoint, *SEARCHES, sources=SOURCES[1::2]))
        assert served.record is not None and (served.record.scheduler.preemptions > 0) == (num_blocks == 28)
    assert found == searched


KIN: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {  # a model, and what its generation config says
    "t5": (T5ForConditionalGeneration, T5, {"suppress_tokens": [7, 9], "forced_eos_token_id": EOS}),
    "mbart": (MBartForConditionalGeneration, BART, {"forced_bos_token_id": FORCED, "forced_eos_token_id": [EOS]}),
    "marian": (MarianMTModel, BART, {"bad_words_ids": [[0], [11, 12]], "forced_eos_token_id": EOS}),
}


@pytest.mark.parametrize("name", KIN)
def test_what_a_generation_config_forces(tmp_path: Path, name: str) -> None:
    """With a least length as well: greedy, and the beams in their order, token for token those of transformers."""
    kind, options, says = KIN[name]
    ids = {"vocab_size": VOCAB, "decoder_start_token_id": START, "pad_token_id": 0, "eos_token_id": EOS}
    model = random_model(kind, {**ids, "bos_token_id": None, **options}, seed=4)
    model.generation_config.update(**says)
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path, model, [START, FORCED] if "forced_bos_token_id" in says else [START])
    banned = [*says.get("bad_words_ids", []), *([token] for token in says.get("suppress_tokens", []))]
    greedy = SamplingParams(temperature=0, seed=0, max_tokens=9, min_tokens=6, logprobs=0, bad_token_ids=banned)
    beams = replace(greedy, temperature=1.0, n=4, beam_width=4, length_penalty=0.6, early_stopping=True)
    ends: dict[str, str | None] = {}
    with engine(checkpoint) as served:
        assert served.capacity.seq2seq is not None
        assert [list(sequence) for sequence in served.capacity.seq2seq.bad_words_ids] == banned
        found = run(served, requests(checkpoint, greedy, beams), lambda e: ends.update({e.request_id: e.finish_reason}))
    least = {"min_new_tokens": 5 + len(checkpoint.start_ids)}
    search = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.6, "early_stopping": True}
    for i, source in enumerate(SOURCES):
        assert found[f"0-{i}"] == theirs(checkpoint, source, 9, **least)
        assert found[f"1-{i}"] == theirs(checkpoint, source, 9, **least, **search)
    cut = [answers[0][-1] for answers in found.values() if len(answers[0]) == 9]
    assert len(cut) > 3 and set(cut) == {EOS} and "length" in ends.values()


def test_what_cannot_be_served_is_refused(checkpoint: Checkpoint) -> None:
    [request, *_] = requests(checkpoint, GREEDY)
    with engine(checkpoint) as served:
        with pytest.raises(PromptTooLong, match="context holds 120"):
            served.submit(replace(request, prompt_ids=[7] * 60, params=replace(GREEDY, max_tokens=60)))
        with pytest.raises(BadRequest, match="without predicting"):
            served.submit(replace(request, params=replace(GREEDY, prompt_logprobs=0)))
        if len(checkpoint.start_ids) == 2:  # BART has 64 positions
            with pytest.raises(PromptTooLong, match="65 tokens, and the model reads 64"):
                served.submit(replace(request, prompt_ids=[7] * 65))
            with pytest.raises(BadRequest, match="the model writes 62"):
                served.submit(replace(request, params=replace(GREEDY, max_tokens=63)))
        longest = replace(request, prompt_ids=[7] * 56, params=replace(GREEDY, max_tokens=62, ignore_eos=True))
        assert len(run(served, [longest])[request.id][0]) == 62
        unbounded = replace(longest, params=replace(GREEDY, max_tokens=None, ignore_eos=True))
        assert len(run(served, [unbounded])[request.id][0]) == (62 if len(checkpoint.start_ids) == 2 else 63)
