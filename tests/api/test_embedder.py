"""Vectors and scores of texts, from text to numbers, against transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    Qwen3Config,
    Qwen3Model,
)

from engine.tiny_encoders import QUERY, SIZES, TEXTS, save, save_encoder, save_reranker, wordpiece, write_modules
from quire import LLM, Embedder, PoolingParams
from quire.cli.main import main
from quire.core.errors import BadRequest, PromptTooLong, Unsupported


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BertModel]:
    path = tmp_path_factory.mktemp("tiny-bert")
    return path, save_encoder(path)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BertForSequenceClassification]:
    path = tmp_path_factory.mktemp("tiny-reranker")
    return path, save_reranker(path)


@torch.inference_mode()
def their_rows(model: Any, text: str) -> np.ndarray:
    return model(input_ids=torch.tensor([wordpiece()(text)["input_ids"]])).last_hidden_state[0].numpy()


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_vectors_are_pooled_as_the_checkpoint_says(encoder: tuple[Path, BertModel]) -> None:
    path, model = encoder
    vectors = Embedder(path, kv_cache_dtype="float32").embed(TEXTS)
    assert vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), 32)
    np.testing.assert_allclose(vectors, [unit(their_rows(model, text).mean(0)) for text in TEXTS], atol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "pool"),
    [("cls", lambda rows: rows[0]), ("mean", lambda rows: rows.mean(0)), ("last", lambda rows: rows[-1])],
)
def test_pooling_and_norm_can_be_chosen(
    encoder: tuple[Path, BertModel], pooling: Any, pool: Callable[[np.ndarray], np.ndarray]
) -> None:
    path, model = encoder
    vectors = Embedder(path, pooling=pooling, normalize=False, kv_cache_dtype="float32").embed(TEXTS)
    np.testing.assert_allclose(vectors, [pool(their_rows(model, text)) for text in TEXTS], atol=2e-5)


def test_halves_on_a_cpu_are_close(encoder: tuple[Path, BertModel]) -> None:
    path, model = encoder
    vectors = Embedder(path, dtype="float16", device="cpu").embed(TEXTS)
    assert not np.array_equal(vectors, Embedder(path, device="cpu").embed(TEXTS))
    expected = [unit(their_rows(model, text).mean(0)) for text in TEXTS]
    assert (vectors * expected).sum(1).min() > 1 - 1e-5


def test_a_text_alone_gives_the_same_bits(encoder: tuple[Path, BertModel]) -> None:
    path, _ = encoder
    together = Embedder(path, threads=2).embed(TEXTS * 5)
    alone = Embedder(path, threads=1, max_num_batched_tokens=1)
    assert all(np.array_equal(alone.embed(text)[0], vector) for text, vector in zip(TEXTS * 5, together, strict=True))


def test_texts_prompts_ids_and_dimensions(encoder: tuple[Path, BertModel]) -> None:
    embedder = Embedder(encoder[0])
    whole = embedder.embed("What is: a quire")
    assert np.array_equal(embedder.embed("a quire", prompt_name="query"), whole)
    assert np.array_equal(embedder.embed(embedder.tokenizer.encode("What is: a quire")), whole)
    first = embedder.embed("a quire", prompt_name="query", dimensions=8)
    np.testing.assert_allclose(first[0], unit(whole[0, :8]), atol=1e-6)
    with pytest.raises(BadRequest, match="no prompt 'clustering'\nhint: it has query, passage"):
        embedder.embed("a", prompt_name="clustering")
    with pytest.raises(BadRequest, match="dimensions is 33"):
        embedder.embed("a", dimensions=33)
    with pytest.raises(BadRequest, match="token id 64, and the vocabulary has 64"):
        embedder.embed([[2, 64, 3]])


def test_a_long_text_is_refused_or_cut_if_asked(encoder: tuple[Path, BertModel]) -> None:
    path, model = encoder
    embedder, long = Embedder(path, kv_cache_dtype="float32"), "paper was made of rags " * 10
    with pytest.raises(PromptTooLong, match="text 1 has 52 tokens, and the model takes 40\nhint: cut it"):
        embedder.embed(["paper", long])
    rows = their_rows(model, " ".join(long.split()[:38]))
    np.testing.assert_allclose(embedder.embed(long, truncate=True)[0], unit(rows.mean(0)), atol=1e-5)
    assert Embedder(path, max_model_len=48).max_model_len == 48  # what is asked for counts, up to what the model has


def test_scores_are_those_of_transformers(reranker: tuple[Path, BertForSequenceClassification]) -> None:
    path, model = reranker
    tokenizer, embedder = wordpiece(), Embedder(path, kv_cache_dtype="float32")
    pairs = [tokenizer(QUERY, text, return_tensors="pt") for text in TEXTS]
    assert pairs[0]["token_type_ids"].max() == 1
    with torch.inference_mode():
        logits = [model(**pair).logits.item() for pair in pairs]
    np.testing.assert_allclose(embedder.score(QUERY, TEXTS, sigmoid=False), logits, rtol=1e-5, atol=1e-5)
    squashed = [1 / (1 + np.exp(-logit)) for logit in logits]
    np.testing.assert_allclose(embedder.score(QUERY, TEXTS), squashed, rtol=1e-5)
    alone = [embedder.score(QUERY, [text])[0] for text in TEXTS]
    assert alone == embedder.score(QUERY, TEXTS)
    with pytest.raises(Unsupported, match="scores texts, and has no embeddings"):
        embedder.embed(TEXTS)


def test_long_pairs_are_cut_as_tokenizers_does(reranker: tuple[Path, BertForSequenceClassification]) -> None:
    path, _ = reranker
    tokenizer = Embedder(path).tokenizer
    words = ["paper was made of rags", "a quire is a gathering", "pages"]
    for first in (1, 3, 9):
        for second in (2, 8):
            for limit in (48, 31, 12, 7):
                pair = " ".join(words[:1] * first), " ".join(words[1:] * second)
                theirs = wordpiece()(*pair, truncation="longest_first", max_length=limit)
                ids, kinds = tokenizer.encode_pair(*pair, limit)
                assert (ids, kinds) == (theirs["input_ids"], theirs["token_type_ids"])
    with pytest.raises(PromptTooLong, match="text 0 has 55 tokens"):
        Embedder(path).score(words[0] * 1, [" ".join(words[:1] * 9 + ["a"] * 2)])


def test_scores_of_an_encoder_are_cosines(encoder: tuple[Path, BertModel]) -> None:
    embedder = Embedder(encoder[0])
    query, vectors = embedder.embed(QUERY, prompt_name="query")[0], embedder.embed(TEXTS)
    np.testing.assert_allclose(embedder.score(QUERY, TEXTS), vectors @ query, atol=1e-6)


def test_linear_layers_after_pooling(tmp_path: Path) -> None:
    model = save(BertModel(BertConfig(**SIZES)), tmp_path)
    dense = {"in_features": 32, "out_features": 6, "bias": True, "activation_function": "torch.nn.Tanh"}
    write_modules(tmp_path, {"pooling_mode": "cls"}, ("Dense", dense), ("Normalize", {}))
    rng = np.random.default_rng(0)
    weight, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 32), (6,)))
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")
    vectors = Embedder(tmp_path, kv_cache_dtype="float32").embed(TEXTS)
    expected = [unit(np.tanh(weight @ their_rows(model, text)[0] + bias)) for text in TEXTS]
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "module", "problem"),
    [
        ({"pooling_mode_max_tokens": True}, "Normalize", "pools by max_tokens"),
        ({"pooling_mode_cls_token": True, "include_prompt": False}, "Normalize", "include_prompt is False"),
        ({"pooling_mode": "mean"}, "CNN", "has a module CNN"),
    ],
)
def test_unknown_modules_are_refused(
    encoder: tuple[Path, BertModel], tmp_path: Path, pooling: dict[str, Any], module: str, problem: str
) -> None:
    for file in encoder[0].glob("*.*"):
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    write_modules(tmp_path, pooling, (module, {}))
    with pytest.raises(Unsupported, match=problem):
        Embedder(tmp_path)


def test_a_decoder_without_a_head_embeds(tmp_path: Path) -> None:
    """Qwen3-Embedding and its like: saved without a head, and the last token counts."""
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
    model = save(Qwen3Model(Qwen3Config(**sizes)), tmp_path)
    write_modules(tmp_path, {"pooling_mode_lasttoken": True}, ("Normalize", {}))
    embedder = Embedder(tmp_path, kv_cache_dtype="float32")
    expected = [unit(their_rows(model, text)[-1]) for text in TEXTS]
    np.testing.assert_allclose(embedder.embed(TEXTS), expected, atol=2e-5)
    alone = [Embedder(tmp_path, kv_cache_dtype="float32").embed(text)[0] for text in TEXTS]
    assert np.array_equal(alone, embedder.embed(TEXTS))


def test_embedding_gemma(tmp_path: Path) -> None:
    """Gemma 3 whose tokens see those after them, the mean, and two linear layers."""
    more = {"num_key_value_heads": 2, "head_dim": 16, "use_bidirectional_attention": True, "sliding_window": 8}
    model = save(Gemma3TextModel(Gemma3TextConfig(**SIZES, **more)), tmp_path)
    identity = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    sizes = [{"in_features": 32, "out_features": 56}, {"in_features": 56, "out_features": 20}]
    write_modules(
        tmp_path, {"pooling_mode": "mean"}, *(("Dense", size | identity) for size in sizes), ("Normalize", {})
    )
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(shape).astype(np.float32) for shape in ((56, 32), (20, 56))]
    for number, weight in zip((2, 3), weights, strict=True):
        save_file({"linear.weight": weight}, tmp_path / f"{number}_Dense" / "model.safetensors")
    embedder = Embedder(tmp_path, kv_cache_dtype="float32")
    expected = [unit(weights[1] @ (weights[0] @ their_rows(model, text).mean(0))) for text in TEXTS]
    np.testing.assert_allclose(embedder.embed(TEXTS), expected, atol=2e-5)
    with pytest.raises(BadRequest, match="embeds or scores texts, and does not generate"):
        LLM(tmp_path).generate("text")


def test_a_decoder_with_a_head_embeds_too(tiny_model: Path) -> None:
    vectors = Embedder(tiny_model, normalize=True).embed(["one text", "another"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_each_says_what_the_other_is_for(encoder: tuple[Path, BertModel]) -> None:
    with pytest.raises(BadRequest, match=r"and does not generate\n.*use embed, encode or score"):
        LLM(encoder[0]).generate("text")
    with pytest.raises(BadRequest, match="embeds or scores texts"):
        LLM(encoder[0]).chat([{"role": "user", "content": "text"}])


def test_a_script_for_vllm_embeds_and_scores(
    encoder: tuple[Path, BertModel], reranker: tuple[Path, BertForSequenceClassification], tiny_model: Path
) -> None:
    llm = LLM(model=str(encoder[0]), runner="pooling", enforce_eager=True)
    vectors = Embedder(encoder[0]).embed(TEXTS)
    outputs = llm.embed(TEXTS, use_tqdm=False)
    assert [output.outputs.embedding for output in outputs] == vectors.tolist() and outputs[0].outputs.hidden_size == 32
    [short] = llm.embed(TEXTS[0], PoolingParams(dimensions=8))
    assert short.finished and short.outputs.embedding == Embedder(encoder[0]).embed(TEXTS[0], dimensions=8)[0].tolist()
    [encoded] = llm.encode({"prompt": TEXTS[0]})
    np.testing.assert_array_equal(encoded.outputs.data, vectors[0])
    ids = llm.get_tokenizer().encode(TEXTS[0])
    assert llm.embed({"prompt_token_ids": ids})[0].outputs == outputs[0].outputs == llm.embed(ids)[0].outputs
    with pytest.raises(PromptTooLong):
        llm.embed("long " * 90)
    assert llm.embed("long " * 90, PoolingParams(truncate_prompt_tokens=-1))[0].outputs.embedding
    with pytest.raises(BadRequest, match="truncate_prompt_tokens is 7"):
        llm.embed("long", PoolingParams(truncate_prompt_tokens=7))

    ranks = LLM(model=str(reranker[0]), runner="pooling")
    expected = Embedder(reranker[0]).score(QUERY, TEXTS)
    assert [output.outputs.score for output in ranks.score(QUERY, TEXTS)] == expected
    assert [output.outputs.score for output in ranks.score([QUERY] * len(TEXTS), TEXTS)] == expected
    with pytest.raises(BadRequest, match="2 texts are to be scored against 3"):
        ranks.score([QUERY] * 2, ["a", "b", "c"])
    assert LLM(tiny_model, task="embed").embed("text")[0].outputs.embedding
    with pytest.raises(BadRequest, match=r"generates text\n.*task=\"embed\""):
        LLM(tiny_model).embed("text")


def test_the_command_prints_lines_of_json(
    encoder: tuple[Path, BertModel],
    reranker: tuple[Path, BertForSequenceClassification],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["embed", "-m", str(encoder[0]), *TEXTS]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2, 3]
    assert np.array_equal(Embedder(encoder[0]).embed(TEXTS), np.array([line["embedding"] for line in lines], "f4"))
    assert main(["embed", "-m", str(reranker[0]), "--score", QUERY, *TEXTS]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["score"] for line in lines] == Embedder(reranker[0]).score(QUERY, TEXTS)
    assert main(["embed", "a text"]) == 2
    assert "hint: name one" in capsys.readouterr().err
