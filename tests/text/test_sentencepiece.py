"""Directories with SentencePiece files instead of a tokenizer.json, against SentencePiece and transformers."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import MarianTokenizer

from quire.core.errors import BadCheckpoint, Unsupported
from quire.text.tokenizers.sentencepiece_model import read_sentencepiece_model
from quire.text.tokenizers.tokenizer import Tokenizer
from text.test_tokenizer import SENTENCES, random_texts

AS_LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
}
# SentencePiece normalizes a combining mark by itself, and the library used here by graphemes.
UNMARKED = [text for text in random_texts(200) if not any(map(unicodedata.combining, text))]
TEXTS = [*SENTENCES, "  two  spaces ", "ﬁne ½", "a" * 40, *UNMARKED]


def train(folder: Path, name: str, **options: Any) -> sentencepiece.SentencePieceProcessor:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4), model_prefix=str(folder / "m"), vocab_size=400, minloglevel=2,
        hard_vocab_limit=False, character_coverage=0.99, **options,
    )  # fmt: skip
    (folder / "m.model").rename(folder / name)
    (folder / "m.vocab").unlink()
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / name))


def write(folder: Path, name: str, **values: Any) -> None:
    (folder / name).write_text(json.dumps(values))


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A directory with a tokenizer.model, and SentencePiece's own."""
    folder = tmp_path_factory.mktemp(request.param)
    pieces = train(folder, "tokenizer.model", **(AS_LLAMA if request.param == "bpe" else {}))
    size = pieces.vocab_size()
    chat = {str(size): {"content": "<|user|>", "special": True}, str(size + 1): {"content": "<tool>", "special": False}}
    write(folder, "config.json", architectures=["BaichuanForCausalLM"], eos_token_id=2)
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    write(folder, "tokenizer_config.json", added_tokens_decoder=chat, chat_template="{{ messages }}", **named)
    return folder, pieces


def test_ids_are_sentencepieces(model: Any) -> None:
    folder, pieces = model
    tokenizer = Tokenizer.load(folder)
    for text in TEXTS:
        assert tokenizer.encode(text) == [1, *pieces.encode(text)], repr(text)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False).replace("<unk>", " \u2047 ") == pieces.decode(ids)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (1, [2], "{{ messages }}")


def test_tokens_that_the_settings_add(model: Any) -> None:
    folder, pieces = model
    tokenizer, size = Tokenizer.load(folder), pieces.vocab_size()
    ids = tokenizer.encode("<|user|>page<tool></s>", add_special_tokens=False)
    assert ids == [size, *pieces.encode("page"), size + 1, 2]
    assert tokenizer.decode(ids) == "page<tool>"
    assert tokenizer.vocab_size == size + 2


def test_settings_choose_the_special_tokens_around_a_text(model: Any, tmp_path: Path) -> None:
    folder, pieces = model
    (tmp_path / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    write(tmp_path, "config.json", architectures=["LlamaForCausalLM"])
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    write(tmp_path, "tokenizer_config.json", add_bos_token=False, add_eos_token=True, **named)
    assert Tokenizer.load(tmp_path).encode("page") == [*pieces.encode("page"), 2]
    write(tmp_path, "tokenizer_config.json", added_tokens_decoder={"9999": {"content": "<a>"}}, **named)
    with pytest.raises(BadCheckpoint, match="has 9999, and the tokens before it are missing"):
        Tokenizer.load(tmp_path)


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.parametrize("separate", [False, True])
def test_marians_ids_and_texts_are_those_of_transformers(tmp_path: Path, separate: bool) -> None:
    source, _ = (train(tmp_path, name) for name in ("source.spm", "target.spm"))
    some = [source.id_to_piece(token) for token in range(3, source.vocab_size(), 2)]  # the others are unknown
    both = ["</s>", "<unk>", ">>fra<<", *some, "<pad>"]
    vocab = {piece: token for token, piece in enumerate(both)}
    write(tmp_path, "vocab.json", **vocab)
    write(
        tmp_path,
        "target_vocab.json",
        **{piece: token for token, piece in enumerate([*both[:2], *both[-2:1:-1], "<pad>"])},
    )
    write(tmp_path, "config.json", architectures=["MarianMTModel"], eos_token_id=0)
    write(tmp_path, "tokenizer_config.json", separate_vocabs=separate, source_lang="en", target_lang="fr")
    theirs, ours = MarianTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    for text in (*TEXTS, ">>fra<< A quire is", ">>deu<< A quire is", "page</s>page"):
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids, repr(text)
        answer = [token for token in ids if token != 1]
        assert ours.decode(answer).strip() == theirs.decode(answer, skip_special_tokens=True)
    assert ours.eos_ids == [0]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "config.json", architectures=["LlamaForCausalLM"])
    path = tmp_path / "tokenizer.model"
    for data in (b"", b"\x0a\xff\xff\xff", b"nothing of the kind", bytes(range(256))):
        path.write_bytes(data)
        with pytest.raises(BadCheckpoint, match="not a SentencePiece model, or damaged"):
            read_sentencepiece_model(path)
    path.write_bytes(b"\x0a\x03\x0a\x01a" + b"\x12\x02\x18\x03")  # one piece, and a word model
    with pytest.raises(Unsupported, match="SentencePiece model type 3"):
        Tokenizer.load(tmp_path)
