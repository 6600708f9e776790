"""Directories with the files that a tokenizer.json is made of, against the classes of transformers and tiktoken."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, trainers

from quire.core.errors import BadCheckpoint, Unsupported
from quire.text.tokenizers.gguf_pre_tokenizers import PRE_TOKENIZERS
from quire.text.tokenizers.tokenizer import Tokenizer
from text.test_sentencepiece import TEXTS, train
from text.test_tokenizer import SENTENCES, random_texts

CONFIG = '{"architectures": ["LlamaForCausalLM"]}'
FAIRSEQ = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def byte_pairs(folder: Path, special: list[str]) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.model.save(str(folder))


def settings(folder: Path, **values: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def check(folder: Path, theirs: Any, texts: list[str]) -> Tokenizer:
    ours = Tokenizer.load(folder)
    for text in texts:
        assert ours.encode(text) == theirs(text).input_ids, text
    return ours


@pytest.mark.parametrize(
    ("class_name", "special"),
    [
        ("GPT2Tokenizer", ["<|endoftext|>"]),
        ("RobertaTokenizer", FAIRSEQ),
        ("BartTokenizer", FAIRSEQ),
        ("Qwen2Tokenizer", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    ],
)
def test_vocab_json_and_merges(class_name: str, special: list[str], tmp_path: Path) -> None:
    byte_pairs(tmp_path, special)
    settings(tmp_path, tokenizer_class=class_name)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    vocab, merges = json.loads((tmp_path / "vocab.json").read_text()), (tmp_path / "merges.txt").read_text()
    pairs = [tuple(line.split(" ")) for line in merges.splitlines()[1:]]
    theirs = getattr(transformers, class_name)(vocab=vocab, merges=pairs)
    ours = check(tmp_path, theirs, [*SENTENCES, *random_texts(100), "a<|endoftext|>b", "<s>x</s>"])
    if special == FAIRSEQ:
        assert ours.encode_pair("a quire", "paper")[0] == theirs("a quire", "paper").input_ids
    for text in SENTENCES:
        assert ours.decode(ours.encode(text)) == text


def test_added_tokens_of_the_settings(tmp_path: Path) -> None:
    byte_pairs(tmp_path, ["<|endoftext|>"])
    size = len(json.loads((tmp_path / "vocab.json").read_text()))
    chat = {str(size): {"content": "<|im_start|>", "special": True}, str(size + 1): {"content": "<tool>"}}
    settings(tmp_path, tokenizer_class="GPT2Tokenizer", added_tokens_decoder=chat, add_bos_token=True)
    (tmp_path / "config.json").write_text(CONFIG)
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("<|im_start|><tool>")
    assert ids == [tokenizer.bos_id, size, size + 1] and tokenizer.decode(ids) == "<tool>"
    settings(tmp_path, tokenizer_class="GPT2Tokenizer", added_tokens_decoder={str(size + 5): {"content": "<a>"}})
    with pytest.raises(BadCheckpoint, match="the ids before it are missing"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("lower", [True, False])
def test_vocab_txt(lower: bool, tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "A", "##a", "quire", "is", "Paper", "paper", "##s", "."]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    settings(tmp_path, tokenizer_class="BertTokenizer", do_lower_case=lower)
    (tmp_path / "config.json").write_text(CONFIG)
    vocab = {word: index for index, word in enumerate(words)}
    theirs = transformers.BertTokenizer(vocab=vocab, do_lower_case=lower)
    ours = check(tmp_path, theirs, ["A quire is a Paper.", "papers  aa", "[MASK] é ÀA 数", "", *SENTENCES])
    pair = theirs("a quire", "paper")
    assert ours.encode_pair("a quire", "paper") == (pair.input_ids, pair.token_type_ids)


def test_t5s_pieces_and_sentinels(tmp_path: Path) -> None:
    ends = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    pieces = train(tmp_path, "spiece.model", model_type="unigram", **ends)
    settings(tmp_path, tokenizer_class="T5Tokenizer")
    (tmp_path / "config.json").write_text(CONFIG)
    tokenizer = Tokenizer.load(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == [*pieces.encode(text), 1], text
    size = pieces.vocab_size()
    assert [tokenizer.id_of(f"<extra_id_{index}>") for index in (0, 99)] == [size + 99, size]
    assert tokenizer.encode("<extra_id_1>")[0] == size + 98


def test_pegasus_pieces_stand_behind_those_of_pretraining(tmp_path: Path) -> None:
    ends = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    pieces = train(tmp_path, "spiece.model", model_type="unigram", **ends)
    settings(tmp_path, tokenizer_class="PegasusTokenizer")
    (tmp_path / "config.json").write_text(CONFIG)
    tokenizer = Tokenizer.load(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == [*(piece + 103 for piece in pieces.encode(text)), 1], text
    assert [tokenizer.id_of(token) for token in ("<pad>", "<mask_2>", "<unk_102>", "<unk>")] == [0, 3, 104, 105]


def test_xlm_robertas_pieces_are_shifted(tmp_path: Path) -> None:
    pieces = train(tmp_path, "sentencepiece.bpe.model", model_type="unigram")
    settings(tmp_path, tokenizer_class="XLMRobertaTokenizer")
    (tmp_path / "config.json").write_text(CONFIG)
    tokenizer = Tokenizer.load(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == [0, *(3 if piece == 0 else piece + 1 for piece in pieces.encode(text)), 2], (
            text
        )
    assert tokenizer.id_of("<mask>") == pieces.vocab_size() + 1
    settings(tmp_path, tokenizer_class="MBartTokenizer")
    with pytest.raises(Unsupported, match=r"of `MBartTokenizer`, and no tokenizer\.json"):
        Tokenizer.load(tmp_path)


def tekken(folder: Path, **changed: Any) -> tiktoken.Encoding:
    """A tekken.json of 40 special tokens, and tiktoken's encoding of the same ranks."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = PRE_TOKENIZERS["tekken"].make()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        SENTENCES * 3, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    spelled = {character: byte for byte, character in byte_characters().items()}
    learned = sorted(backend.get_vocab(), key=lambda token: backend.token_to_id(token) or 0)
    tokens = sorted(
        (bytes(spelled[character] for character in token) for token in learned), key=lambda token: len(token) > 1
    )
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    config = {"pattern": pattern, "default_vocab_size": len(tokens) + 40, "default_num_special_tokens": 40}
    listed = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(tokens)]
    special = [{"rank": rank, "token_str": text} for rank, text in enumerate(["<unk>", "<s>", "</s>", "[INST]"])]
    content = {"config": config, "vocab": [*listed, {"rank": len(listed)}], "special_tokens": special} | changed
    (folder / "tekken.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(CONFIG)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding("tekken", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def byte_characters() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def test_tekken_gives_tiktokens_ids_behind_the_special_tokens(tmp_path: Path) -> None:
    theirs = tekken(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    for text in [*SENTENCES, *random_texts(200)]:
        ids = tokenizer.encode(text)
        assert ids == [1, *(40 + rank for rank in theirs.encode(text))], text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("[INST]a</s>")[1:4:2] == [3, 2] and tokenizer.id_of("<SPECIAL_39>") == 39


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"vocab": []}, "fewer than the"),
        ({"special_tokens": [{"rank": 40, "token_str": "x"}]}, "no rank below 40"),
        ({"config": {"pattern": "(", "default_vocab_size": 10**9, "default_num_special_tokens": 5}}, "cannot be"),
    ],
)
def test_a_damaged_tekken_file_is_named(changed: dict[str, Any], problem: str, tmp_path: Path) -> None:
    tekken(tmp_path, **changed)
    with pytest.raises(BadCheckpoint, match=problem):
        Tokenizer.load(tmp_path)


def test_a_directory_without_any_of_the_files_lists_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    with pytest.raises(Unsupported, match=r"no tokenizer\.json, nor tekken\.json, tokenizer\.model, spiece\.model"):
        Tokenizer.load(tmp_path)
