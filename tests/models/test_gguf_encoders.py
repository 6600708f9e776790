"""GGUF files of encoders: the embeddings and scores of the checkpoints that they were made of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaForSequenceClassification

from engine.tiny_encoders import SIZES, wordpiece
from models import test_bert
from models.gguf_encoder_writing import write_encoder
from models.test_bert import PAIRS, TEXTS, ask, load, random_encoder
from quire import Embedder
from quire.core.errors import Unsupported

CASES = {
    name: test_bert.CASES[name]
    for name in ("bert", "bert-with-a-head", "roberta", "xlm-roberta", "distilbert", "nomic", "modernbert", "jina-3")
}
CASES["score-roberta"] = test_bert.CASES["score-roberta"]
SENTENCES = [
    "A quire is a gathering of pages.",
    "Paper, was made of  rags?",
    "What's a Quire? Überall 12 pages",
    "数页",
]
ENDS = ["<s>", "<pad>", "</s>", "<unk>"]


@pytest.mark.verifies("gguf", backend="torch")
@pytest.mark.parametrize("name", CASES)
def test_a_file_computes_what_its_checkpoint_does(name: str, tmp_path: Path) -> None:
    model = random_encoder(*CASES[name], seed=sum(map(ord, name)))
    model.save_pretrained(tmp_path)
    runner = load(write_encoder(tmp_path, tmp_path / "model.gguf"), "torch")
    texts = [*TEXTS, *(PAIRS if name.startswith("bert") else [])]
    ours = runner.run(texts, "first" if name.startswith("score") else "all", np.copy)  # type: ignore[arg-type]
    for found, text in zip(ours, texts, strict=True):
        expected = ask(model, text)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5 * np.abs(expected).max())


def unigram() -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=ENDS, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(SENTENCES * 4, trainer)
    return _with_ends(backend)


def byte_level() -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=ENDS, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    return _with_ends(backend)


def _with_ends(backend: tokenizers.Tokenizer) -> PreTrainedTokenizerFast:
    backend.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> </s> $B </s>", [("<s>", 0), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@pytest.mark.parametrize(
    ("name", "make", "pooling"),
    [
        ("bert", wordpiece, "cls"),
        ("bert", wordpiece, "mean"),
        ("xlm-roberta", unigram, "cls"),
        ("roberta", byte_level, "mean"),
    ],
)
def test_texts_have_the_embeddings_of_the_checkpoint(
    name: str, make: Callable[[], PreTrainedTokenizerFast], pooling: Any, tmp_path: Path
) -> None:
    model_class, config_class, values = test_bert.CASES[name]
    model = random_encoder(model_class, config_class, values | {"vocab_size": 320}, seed=4)
    model.save_pretrained(tmp_path)
    make().save_pretrained(tmp_path)
    path = write_encoder(tmp_path, tmp_path / "model.gguf", gguf.PoolingType[pooling.upper()])
    expected = Embedder(tmp_path, pooling=pooling, normalize=True, threads=1)
    found = Embedder(path, threads=1)
    for text in SENTENCES:
        assert found.tokenizer.encode(text) == expected.tokenizer.encode(text)
        assert found.tokenizer.encode_pair(text, "paper") == expected.tokenizer.encode_pair(text, "paper")
    np.testing.assert_allclose(found.embed(SENTENCES), expected.embed(SENTENCES), atol=2e-5)


def test_a_reranker_scores_as_its_checkpoint(tmp_path: Path) -> None:
    values = SIZES | {"type_vocab_size": 1, "pad_token_id": 1, "num_labels": 1, "max_position_embeddings": 50}
    model = random_encoder(XLMRobertaForSequenceClassification, XLMRobertaConfig, values, seed=4)
    model.save_pretrained(tmp_path)
    unigram().save_pretrained(tmp_path)
    path = write_encoder(tmp_path, tmp_path / "model.gguf", gguf.PoolingType.RANK)
    expected, found = (Embedder(each, threads=1).score("What is a quire?", SENTENCES) for each in (tmp_path, path))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_capital_letters_count_where_the_vocabulary_has_them(tmp_path: Path) -> None:
    for cased in (False, True):
        tokenizer = wordpiece()
        backend = tokenizer._tokenizer
        backend.normalizer = normalizers.BertNormalizer(lowercase=not cased)
        if cased:
            vocab = backend.get_vocab() | {"Paper": backend.get_vocab_size()}
            backend.model = models.WordPiece(vocab, unk_token="[UNK]")
        folder = tmp_path / str(cased)
        random_encoder(*test_bert.CASES["bert"], seed=1).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        path = write_encoder(folder, folder / "model.gguf", gguf.PoolingType.MEAN)
        found, expected = Embedder(path, threads=1), Embedder(folder, threads=1)
        assert found.tokenizer.encode("Paper paper") == expected.tokenizer.encode("Paper paper")


def test_a_pooling_that_is_not_given_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = random_encoder(*test_bert.CASES["bert"], seed=1)
    model.save_pretrained(tmp_path)
    wordpiece().save_pretrained(tmp_path)
    path = write_encoder(tmp_path, tmp_path / "model.gguf")
    for checkpoint in (tmp_path, path):
        Embedder(checkpoint, threads=1)
        assert f"{checkpoint} does not say how" in caplog.text and "their mean is taken" in caplog.text
        caplog.clear()
        Embedder(checkpoint, threads=1, pooling="cls")
        assert not caplog.text


def test_an_encoder_that_is_a_decoder_is_refused(tmp_path: Path) -> None:
    random_encoder(*test_bert.CASES["bert"], seed=1).save_pretrained(tmp_path)
    path = write_encoder(tmp_path, tmp_path / "model.gguf")
    path.write_bytes(
        path.read_bytes().replace(b"bert.attention.causal\x07\0\0\0\0", b"bert.attention.causal\x07\0\0\0\1")
    )
    with pytest.raises(Unsupported, match=r"bert\.attention\.causal is True"):
        load(path, "torch")
