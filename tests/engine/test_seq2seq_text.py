"""An encoder-decoder from text to text: the prompt is the source, and an answer begins with nothing that is shown."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import BartForConditionalGeneration

from engine.tiny_encoders import TEXTS, wordpiece
from models.checking_seq2seq import random_model
from quire import LLM, SamplingParams
from quire.api.embedder import Embedder
from quire.client.engine_client import EngineClient
from quire.client.generate_request import GenerateRequest
from quire.client.one_model import OneModel
from quire.core.errors import BadRequest, Unsupported
from quire.engine.options import EngineOptions
from quire.server.app import create_app
from quire.server.options import ServerOptions

UNK, CLS, SEP = 1, 2, 3
BANNED = 6
SIZES = {
    "vocab_size": 18,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
    "eos_token_id": SEP,
    "bos_token_id": None,
    "decoder_start_token_id": SEP,
    "forced_eos_token_id": None,
}
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_dtype": "float32", "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bart")
    model = random_model(BartForConditionalGeneration, SIZES, seed=5)
    model.generation_config.forced_bos_token_id = CLS
    model.generation_config.bad_words_ids = [[UNK], [BANNED], [7, 8]]
    model.save_pretrained(path)
    wordpiece().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, str]:
    model, tokenizer = BartForConditionalGeneration.from_pretrained(folder), wordpiece()
    found = {}
    for text in TEXTS:
        with torch.inference_mode():
            answer = model.generate(tokenizer(text, return_tensors="pt").input_ids, max_new_tokens=17, do_sample=False)
        found[text] = str(tokenizer.decode(answer[0], skip_special_tokens=True))
    return found


def test_texts_are_those_of_transformers(folder: Path, theirs: dict[str, str]) -> None:
    for text, output in zip(TEXTS, LLM(folder, **OPTIONS).generate(TEXTS, GREEDY), strict=True):
        assert output.outputs[0].text == theirs[text]
        assert output.prompt_token_ids == wordpiece()(text).input_ids
        assert not {UNK, BANNED} & {*output.outputs[0].token_ids}, "a banned token was drawn"


def test_an_answer_may_go_on_from_what_was_given(folder: Path) -> None:
    """As a language is chosen, in place of what is forced otherwise."""
    model, tokenizer = BartForConditionalGeneration.from_pretrained(folder), wordpiece()
    source = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    with torch.inference_mode():
        answer = model.generate(source, max_new_tokens=17, do_sample=False, forced_bos_token_id=tokenizer.vocab["rags"])
    llm = LLM(folder, **OPTIONS)
    for given in ("rags", "[SEP] rags"):  # with the start token, or without
        (output,) = llm.generate({"prompt": TEXTS[0], "decoder_prompt": given}, GREEDY)
        assert output.outputs[0].token_ids == answer[0, 2:].tolist()
    with pytest.raises(BadRequest, match="a prompt has no key 'encoder'"):
        llm.generate({"prompt": TEXTS[0], "encoder": "rags"}, GREEDY)


def test_a_decoder_has_no_answer_apart_from_its_prompt(tiny_model: Path) -> None:
    with pytest.raises(BadRequest, match="has no encoder"):
        LLM(tiny_model, **OPTIONS).generate({"prompt": "a", "decoder_prompt": "b"}, GREEDY)


def test_completions_over_http_survive_a_killed_engine(folder: Path, theirs: dict[str, str]) -> None:
    async def main() -> None:
        async with EngineClient(EngineOptions(model=str(folder), **OPTIONS)) as client:
            transport = httpx.ASGITransport(create_app(OneModel(client), ServerOptions()))
            async with httpx.AsyncClient(transport=transport, base_url="http://quire") as http:
                body = {"model": client.info.name, "prompt": TEXTS[0], "temperature": 0, "max_tokens": 16}
                answer = (await http.post("/v1/completions", json=body)).json()
                assert answer["choices"][0]["text"] == theirs[TEXTS[0]]
                assert answer["usage"]["prompt_tokens"] == len(wordpiece()(TEXTS[0]).input_ids)
                other = (await http.post("/v1/completions", json={**body, "decoder_prompt": "rags"})).json()
                assert other["choices"][0]["text"] != theirs[TEXTS[0]]
                refused = await http.post("/v1/completions", json={**body, "prompt": "quire " * 60})
                assert refused.status_code == 400 and "62 tokens" in refused.text
            stream = await client.submit(GenerateRequest(id="a", prompt=TEXTS[3], params=GREEDY))
            text = (await anext(aiter(stream))).text
            os.kill(client.engine_pid, signal.SIGKILL)
            async for event in stream:
                text += event.text
            assert text == theirs[TEXTS[3]]

    asyncio.run(asyncio.wait_for(main(), 90))


def test_it_makes_no_vectors(folder: Path) -> None:
    with pytest.raises(Unsupported, match="generates text, and does not embed"):
        Embedder(folder, device="cpu")
