"""Decoders that score pairs of texts: with a classifier, or by the logits of yes and no; from text to scores."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    ModernBertConfig,
    ModernBertForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from engine.tiny_encoders import save, save_encoder
from engine.tiny_rerankers import SIZES, TEMPLATE, byte_tokenizer, save_decoder, write_logit_score
from quire import Embedder
from quire.core.errors import PromptTooLong, Unsupported
from quire.text.chat.chat_template import ChatTemplate
from quire.text.pair_template import INSTRUCTION, QWEN3_RERANKER

QUERY, TEXTS = "What is a quire?", ["A gathering of pages", "A group of singers", "Paper"]


@torch.inference_mode()
def their_logits(model: Any, text: str) -> np.ndarray:
    ids = byte_tokenizer()(text)["input_ids"]
    logits = model(torch.tensor([ids])).logits
    return logits[0, -1].numpy() if logits.dim() == 3 else logits[0].numpy()


def qwen3_prompt(document: str) -> str:
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_the_prompt_of_qwen3_reranker() -> None:
    pair = [{"role": "query", "content": QUERY}, {"role": "document", "content": "{{ 1 }}"}]
    assert ChatTemplate(QWEN3_RERANKER).render(pair) == qwen3_prompt("{{ 1 }}")


def test_qwen3_reranker_scores_by_yes_and_no(tmp_path: Path) -> None:
    model = save_decoder(Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)), tmp_path)
    embedder = Embedder(tmp_path, task="score", kv_cache_dtype="float32")
    yes, no = (byte_tokenizer()(word)["input_ids"] for word in ("yes", "no"))
    assert len(yes) == len(no) == 1
    logits = [their_logits(model, qwen3_prompt(text)) for text in TEXTS]
    expected = [line[yes[0]] - line[no[0]] for line in logits]
    np.testing.assert_allclose(embedder.score(QUERY, TEXTS, sigmoid=False), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(embedder.score(QUERY, TEXTS), 1 / (1 + np.exp(-np.array(expected))), atol=1e-5)
    with pytest.raises(Unsupported, match="scores texts, and has no embeddings"):
        embedder.embed(TEXTS)
    assert Embedder(tmp_path).embed(TEXTS).shape == (3, 32)  # unless it is asked to score


def test_a_long_document_is_cut_and_the_question_stays(tmp_path: Path) -> None:
    save_decoder(Qwen3ForCausalLM(Qwen3Config(**SIZES)), tmp_path)
    embedder, long = Embedder(tmp_path, task="score", kv_cache_dtype="float32"), "pages " * 90
    with pytest.raises(PromptTooLong, match="the model takes 600"):
        embedder.score(QUERY, [long])
    room = 600 - len(byte_tokenizer()(qwen3_prompt(""))["input_ids"])
    assert embedder.score(QUERY, [long], truncate=True) == embedder.score(QUERY, [long[:room]])


@pytest.mark.parametrize("no", [None, 7])
def test_modules_name_the_tokens_and_the_template_has_roles(tmp_path: Path, no: int | None) -> None:
    """As sentence-transformers writes rerankers of this kind."""
    model = save_decoder(Qwen3ForCausalLM(Qwen3Config(**SIZES)), tmp_path, TEMPLATE)
    write_logit_score(tmp_path, 12, no)
    activation = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(activation))
    logits = [their_logits(model, f"Q:{QUERY}\nD:{text}\nA:") for text in TEXTS]
    expected = [line[12] - (0 if no is None else line[no]) for line in logits]
    scores = Embedder(tmp_path, kv_cache_dtype="float32").score(QUERY, TEXTS)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_classifier_reads_the_last_token_of_the_pair(tmp_path: Path, template: str | None) -> None:
    sizes = SIZES | {"num_labels": 1, "pad_token_id": None}
    model = save_decoder(Qwen3ForSequenceClassification(Qwen3Config(**sizes)), tmp_path, template)
    texts = [f"Q:{QUERY}\nD:{text}\nA:" if template else QUERY + text for text in TEXTS]
    expected = [their_logits(model, text)[0] for text in texts]
    embedder = Embedder(tmp_path, kv_cache_dtype="float32")
    np.testing.assert_allclose(embedder.score(QUERY, TEXTS, sigmoid=False), expected, rtol=1e-4, atol=1e-4)
    alone = [embedder.score(QUERY, [text])[0] for text in TEXTS]
    assert alone == embedder.score(QUERY, TEXTS)


@pytest.mark.parametrize("biases", [False, True])
def test_modernbert_may_classify_the_mean_of_all_tokens(tmp_path: Path, biases: bool) -> None:
    sizes = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
    ids = dict.fromkeys(("cls_token_id", "sep_token_id", "pad_token_id", "bos_token_id", "eos_token_id"), 0)
    given = {"num_labels": 1, "classifier_pooling": "mean", "norm_bias": biases, "classifier_bias": biases}
    model = save_decoder(ModernBertForSequenceClassification(ModernBertConfig(**sizes, **ids, **given)), tmp_path)
    expected = [their_logits(model, QUERY + text)[0] for text in TEXTS]
    embedder = Embedder(tmp_path, kv_cache_dtype="float32")
    np.testing.assert_allclose(embedder.score(QUERY, TEXTS, sigmoid=False), expected, rtol=1e-4, atol=1e-4)


def test_a_model_without_the_words_is_refused(tmp_path: Path) -> None:
    sizes = {**SIZES, "vocab_size": 64, "max_position_embeddings": 48}
    save(Qwen3ForCausalLM(Qwen3Config(**sizes)), tmp_path)  # with a tokenizer of other words
    with pytest.raises(Unsupported, match="these are no single tokens here"):
        Embedder(tmp_path, task="score")


def test_an_encoder_that_is_asked_for_scores_gives_cosines(tmp_path: Path) -> None:
    save_encoder(tmp_path)
    asked, plain = Embedder(tmp_path, task="score"), Embedder(tmp_path)
    assert asked.score("paper", ["rags"]) == plain.score("paper", ["rags"])
