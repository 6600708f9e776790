"""Ids are those of the libraries that trained the vocabularies, and decode to the text."""

import json
import random
import threading
import time
from pathlib import Path

import gguf
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from quire.core.errors import BadCheckpoint, BadRequest, Unsupported
from quire.text.tokenizers.tokenizer import Tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "A quire is a gathering of pages; pages are gathered into a quire.",
    "def gather(pages):\n    return [page for page in pages if page]\n",
    "Über den Wolken muß die Freiheit wohl grenzenlos sein. Ça va, garçon?",
    "数を数える: 1, 2, 3, 10, 100, 1000, 2024.    Four spaces, then eight:        here.",
    "it's we'll they've I'm you're don't; aaaa aaaaaaa == === ---- ____",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def random_texts(count: int, seed: int = 11) -> list[str]:
    """Words, runs of spaces, digits, code, characters no vocabulary was trained on, emoji."""
    rng = random.Random(seed)
    parts = [*"abcdefgh", "the", "quire", "pages", " ", " ", "  ", "    ", "\n", "\t", "1", "234", "==", "aaa", "é"]
    parts += ["'ll", "\r\n", "\u00a0", "Ж", "ß", "数", "🎉", "👩‍👧", "\u0301", "_", "(", ")", ".", "\ufffd", "\u2581"]
    return ["".join(rng.choices(parts, k=rng.randint(1, 20))) for _ in range(count)]


# -- byte-level BPE -------------------------------------------------------------------------------------------------


def trained_byte_level(style: str) -> tokenizers.Tokenizer:
    """A small tokenizer that splits words as the family does, by the library's own parts."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if style == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def write_gguf(path: Path, model: str, tokens: list[str], kinds: list[int], **extra: object) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, value in extra.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_gguf(path: Path, source: tokenizers.Tokenizer, style: str, **extra: object) -> Path:
    content = json.loads(source.to_str())
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    kinds = [3 if token in SPECIAL else 1 for token in tokens]
    merges = [" ".join(merge) for merge in content["model"]["merges"]]
    roles = {"bos_token_id": 1, "eos_token_id": 2}
    return write_gguf(path, "gpt2", tokens, kinds, tokenizer_pre=style, token_merges=merges, **(roles | extra))


@pytest.mark.parametrize("style", ["gpt-2", "smollm"])
def test_byte_level_gguf_gives_the_ids_of_its_source(tmp_path: Path, style: str) -> None:
    source = trained_byte_level(style)
    tokenizer = Tokenizer.load(byte_level_gguf(tmp_path / "t.gguf", source, style))
    assert tokenizer.vocab_size == source.get_vocab_size()
    for text in [*SENTENCES, *random_texts(200), "<|im_start|>user\nhi<|im_end|>\n"]:
        ids = tokenizer.encode(text)
        assert ids == source.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.decode(ids) == source.decode(ids)


@pytest.mark.parametrize(
    ("style", "text", "words"),
    [
        ("gpt-2", "I'LL pay 12345!!\n\n x", ["I", "'", "LL", " pay", " 12345", "!!", "\n\n", " x"]),
        ("smollm", "in 123 a", ["in", " ", "1", "2", "3", " a"]),
        ("llama-bpe", "I'LL pay 12345!!\n\n x", ["I", "'LL", " pay", " ", "123", "45", "!!\n\n", " x"]),
        ("qwen2", "I'LL pay 12345!!\n\n x", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", "!!\n\n", " x"]),
        ("falcon", "I'LL pay 12345!!\n\n x", ["I", "'", "LL", " pay", " ", "123", "45", "!!", "\n\n", " x"]),
        ("bloom", "I'LL pay 12345!!\n\n x", ["I'LL", " pay", " 12345", "!!", "\n\n", " x"]),
        ("dbrx", "I'LL pay 12345!!\n\n x", ["I", "'LL", " pay", " ", "123", "45", "!!\n\n", " x"]),
        ("stablelm2", "I'LL pay 12!!\n\n x", ["I", "'LL", " pay", " ", "1", "2", "!!\n\n", " x"]),
        ("laguna", "I'LL pay 12!!\n\n x", ["I", "'LL", " pay", " ", "1", "2", "!!", "\n\n", " x"]),
        ("tekken", "I'LL payMe 12!/\n\n x", ["I", "'LL", " pay", "Me", " ", "1", "2", "!/\n\n", " x"]),
        ("gpt-4o", "I'LL payMe 12345!/\n\n x", ["I'LL", " pay", "Me", " ", "123", "45", "!/\n\n", " x"]),
        (
            "deepseek-v3",
            "a.LL caféか漢字x 12345!\n\n x",
            ["a", ".LL", " café", "か漢字", "x", " ", "123", "45", "!\n\n", " x"],
        ),
    ],
)
def test_words_are_split_as_the_family_does(tmp_path: Path, style: str, text: str, words: list[str]) -> None:
    """A vocabulary that holds each word whole, and every byte, shows where the words were cut."""
    merges, tokens = [], dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    for word in (spell(word)[0][0] for word in words):
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
                tokens[word[:end]] = None
    path = write_gguf(
        tmp_path / "t.gguf", "gpt2", list(tokens), [1] * len(tokens), tokenizer_pre=style, token_merges=merges
    )
    tokenizer = Tokenizer.load(path)
    assert [tokenizer.token_text(token) for token in tokenizer.encode(text)] == words


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_gguf(tmp_path / "t.gguf", trained_byte_level("gpt-2"), "qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_special_tokens_around_a_text(tmp_path: Path) -> None:
    source = trained_byte_level("gpt-2")
    plain = Tokenizer.load(byte_level_gguf(tmp_path / "plain.gguf", source, "gpt-2")).encode("page")
    both = byte_level_gguf(tmp_path / "both.gguf", source, "gpt-2", add_bos_token=True, add_eos_token=True)
    assert Tokenizer.load(both).encode("page") == [1, *plain, 2]
    assert Tokenizer.load(both).encode("page", add_special_tokens=False) == plain
    llama3 = Tokenizer.load(byte_level_gguf(tmp_path / "llama3.gguf", source, "llama-bpe"))
    assert llama3.encode("page")[0] == 1, "Llama 3's files leave it unsaid"


def test_roles_of_tokens(tmp_path: Path) -> None:
    path = byte_level_gguf(tmp_path / "t.gguf", trained_byte_level("gpt-2"), "gpt-2", chat_template="{{ x }}")
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.bos_id, tokenizer.bos_token, tokenizer.eos_token) == (1, "<|im_start|>", "<|im_end|>")
    assert tokenizer.eos_ids == [2, 0], "the one the file names, then others known to end a text"
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.chat_template == "{{ x }}"
    assert tokenizer.id_of("<|im_end|>") == 2
    assert tokenizer.id_of("not a token") is None


def test_bytes_of_a_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_gguf(tmp_path / "t.gguf", trained_byte_level("gpt-2"), "gpt-2"))
    ids = tokenizer.encode("🎉 page")
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == "🎉 page".encode()
    assert tokenizer.token_text(ids[0]) == "\ufffd"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(10_000) == b"", "models pad their vocabularies"
    with pytest.raises(BadRequest, match="-1 is not the id of a token"):
        tokenizer.token_bytes(-1)


def test_a_lone_surrogate_is_a_bad_request(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_gguf(tmp_path / "t.gguf", trained_byte_level("gpt-2"), "gpt-2"))
    with pytest.raises(BadRequest, match="lone surrogate at position 2"):
        tokenizer.encode("ab\ud83c")
    with pytest.raises(BadRequest, match="lone surrogate at position 9000"):
        tokenizer.encode("ab " * 3000 + "\ud83c")


def test_other_threads_run_while_a_long_text_is_tokenized(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_gguf(tmp_path / "t.gguf", trained_byte_level("gpt-2"), "gpt-2"))
    text = "The quire has pages. " * 20_000
    done: list[list[int]] = []
    thread = threading.Thread(target=lambda: done.append(tokenizer.encode(text)))
    thread.start()
    turns = 0
    while not done:
        time.sleep(0.001)  # lets the other thread go on
        turns += 1
    thread.join()
    assert turns >= 5, "of several hundred"
    assert done[0] == tokenizer.encode(text[:21]) * 20_000


def test_gemma_4_merges_characters_between_newlines(tmp_path: Path) -> None:
    """Spaces are U+2581, a run of newlines that is a token is one, and a character without a token is its bytes."""
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *bytes_of, "a", "b", "▁", "\n", "ab", "▁ab", "\n\n", "\n\n\n"]
    kinds = [3, 3, 3, 2, *[6] * 256, *[1] * 8]
    roles = {"bos_token_id": 2, "eos_token_id": 1, "add_space_prefix": False}
    merges = ["a b", "▁ ab", "\n \n"]
    path = write_gguf(tmp_path / "t.gguf", "gemma4", pieces, kinds, token_merges=merges, **roles)
    tokenizer = Tokenizer.load(path)
    text = "ab ab\n\n\nb a\né"
    ids = tokenizer.encode(text)
    expected = ["<bos>", "ab", "▁ab", "\n\n\n", "b", "▁", "a", "\n", "<0xC3>", "<0xA9>"]
    assert [pieces[index] for index in ids] == expected
    assert tokenizer.decode(ids[1:]) == text


def test_a_gguf_tokenizer_that_is_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    good = {"tokenizer_pre": "gpt-2", "token_merges": ["a b"]}
    for tokens, kinds, extra, message in [
        (["a", "b", "ab", "a"], [1] * 4, good, "'a' twice, at 0 and 3"),
        (["a", "b", "ab"], [1] * 2, good, "token_type has 2 items for 3 tokens"),
        (["a", "b"], [1] * 2, good, "merges do not fit"),
        (["a", "b", "ab"], [1] * 3, good | {"token_merges": ["a b c"]}, "'a b c', which is not two tokens"),
        (["a", "b", "ab"], [1] * 3, good | {"bos_token_id": 9}, "bos_token_id is 9, and there are 3 tokens"),
        (["a", "b", "ab"], [1] * 3, good | {"add_bos_token": True}, "add_bos_token is true, and .* missing"),
        (["a", "b", "ab"], [1] * 3, {"tokenizer_pre": "gpt-2"}, "merges is missing"),
    ]:
        with pytest.raises(BadCheckpoint, match=message):
            Tokenizer.load(write_gguf(path, "gpt2", tokens, kinds, **extra))
    with pytest.raises(Unsupported, match="pre is 'martian'"):
        Tokenizer.load(write_gguf(path, "gpt2", ["a"], [1], tokenizer_pre="martian", token_merges=[]))
    with pytest.raises(Unsupported, match="model is 'plamo2'"):
        Tokenizer.load(write_gguf(path, "plamo2", ["a"], [1]))


def test_padding_tokens_of_a_vocabulary_are_no_text(tmp_path: Path) -> None:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "[PAD257]"]
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "t.gguf", "gpt2", tokens, [1] * 257 + [5], token_merges=["a b"]))
    assert tokenizer.vocab_size == 258
    assert (tokenizer.token_bytes(257), tokenizer.decode([tokens.index("a"), 257])) == (b"", "a")
    assert 257 not in tokenizer.encode("[PAD257]")


# -- SentencePiece --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    """Trained as Llama's was: BPE, bytes for unknown characters, no normalisation, spaces kept."""
    prefix = tmp_path_factory.mktemp("spm") / "m"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4), model_prefix=str(prefix), model_type="bpe", vocab_size=600,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        allow_whitespace_only_pieces=True, character_coverage=0.99, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


def sentencepiece_gguf(
    path: Path, pieces: sentencepiece.SentencePieceProcessor, added: dict[str, int] | None = None, **extra: object
) -> Path:
    """`added`: more tokens, with their kinds"""
    added = added or {}
    ids = range(pieces.vocab_size())
    tests = ((pieces.is_unknown, 2), (pieces.is_control, 3), (pieces.is_byte, 6), (lambda index: True, 1))
    kinds = [next(kind for test, kind in tests if test(index)) for index in ids]
    scores = [pieces.get_score(index) for index in ids] + [-1000.0] * len(added)
    tokens = [*(pieces.id_to_piece(index) for index in ids), *added]
    return write_gguf(path, "llama", tokens, [*kinds, *added.values()], token_scores=scores, **extra)


def test_sentencepiece_gguf_gives_sentencepieces_ids(tmp_path: Path, pieces) -> None:  # type: ignore[no-untyped-def]
    tokenizer = Tokenizer.load(sentencepiece_gguf(tmp_path / "t.gguf", pieces))
    texts = [*SENTENCES, *random_texts(400), *(" " * count for count in range(1, 20)), "a" * 40]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == [pieces.bos_id(), *pieces.encode(text)], repr(text)
        assert tokenizer.decode(ids) == pieces.decode(ids) == text.replace("\u2581", " ")
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, [2])


def test_sentencepiece_without_a_space_in_front(tmp_path: Path, pieces) -> None:  # type: ignore[no-untyped-def]
    tokenizer = Tokenizer.load(sentencepiece_gguf(tmp_path / "t.gguf", pieces, add_space_prefix=False))
    ids = tokenizer.encode(" page")
    assert tokenizer.token_text(ids[1]).startswith(" ")
    assert tokenizer.decode(ids) == " page"
    assert tokenizer.encode("page") != ids


def test_special_tokens_in_a_sentencepiece_text(tmp_path: Path, pieces) -> None:  # type: ignore[no-untyped-def]
    tokenizer = Tokenizer.load(sentencepiece_gguf(tmp_path / "t.gguf", pieces))
    ids = tokenizer.encode("page</s>page", add_special_tokens=False)
    assert ids == [*pieces.encode("page"), 2, *pieces.encode("page")]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "page</s> page"


def test_gemmas_tags_and_runs_of_spaces_are_tokens(tmp_path: Path, pieces) -> None:  # type: ignore[no-untyped-def]
    added = {"<start_of_turn>": 3, "<h1>": 4, "\n\n": 4, "   ": 4}
    path = sentencepiece_gguf(tmp_path / "t.gguf", pieces, added, add_space_prefix=False)
    tokenizer, first = Tokenizer.load(path), pieces.vocab_size()
    text = "<start_of_turn>page\n\n<h1>   page</h1>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [index - first for index in ids if index >= first] == [0, 2, 1, 3]
    assert tokenizer.decode(ids) == text.removeprefix("<start_of_turn>")
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


# -- a directory in Hugging Face's layout ---------------------------------------------------------------------------


def write_directory(path: Path, backend: tokenizers.Tokenizer, settings: dict, **files: dict) -> Path:
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in ({"config": {"architectures": ["LlamaForCausalLM"]}} | files).items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_a_directory(tmp_path: Path) -> None:
    backend = trained_byte_level("gpt-2")
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    backend.enable_truncation(4)
    backend.enable_padding()
    settings = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ a }}"}
    files = {"config": {"eos_token_id": 0}, "generation_config": {"eos_token_id": [2, 0]}}
    tokenizer = Tokenizer.load(write_directory(tmp_path / "m", backend, settings, **files))
    backend.no_truncation()
    for text in [*SENTENCES, *random_texts(100)]:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_id, tokenizer.eos_token, tokenizer.eos_ids) == (1, "<|im_end|>", [2, 0])
    assert tokenizer.chat_template == "{{ a }}"
    assert tokenizer.special_ids == {0, 1, 2}


def test_settings_overrule_the_post_processor(tmp_path: Path) -> None:
    backend = trained_byte_level("gpt-2")
    plain = backend.encode("page").ids
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": True, "add_eos_token": True}
    assert Tokenizer.load(write_directory(tmp_path / "a", backend, settings)).encode("page") == [1, *plain, 2]
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    settings["add_bos_token"] = settings["add_eos_token"] = False
    assert Tokenizer.load(write_directory(tmp_path / "b", backend, settings)).encode("page") == plain


@pytest.mark.parametrize("metaspace", [False, True])
def test_a_directory_with_sentencepieces_decoder(tmp_path: Path, metaspace: bool) -> None:
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(parts)
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    content = json.loads(backend.to_str())
    content["added_tokens"] = content["added_tokens"][:1]  # the bytes are tokens like others
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer = Tokenizer.load(write_directory(tmp_path / "m", backend, {"unk_token": "<unk>"}))
    for text in [*SENTENCES, " two  spaces"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == backend.decode(ids)
        assert tokenizer.decode(ids).lstrip() == text.lstrip(), "Metaspace gives no second space to a text that has one"
    assert tokenizer.decode(tokenizer.encode("🎉 page")) == "🎉 page", "bytes, which Metaspace would leave as <0xF0>"


def test_chat_templates_in_their_other_places(tmp_path: Path) -> None:
    backend = trained_byte_level("gpt-2")
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    path = write_directory(tmp_path / "m", backend, {"chat_template": several})
    assert Tokenizer.load(path).chat_template == "D"
    (path / "chat_template.jinja").write_text("{{ é }}", encoding="utf-8")
    assert Tokenizer.load(path).chat_template == "{{ é }}"


def test_a_directory_with_nothing_but_a_tokenizer(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "m", trained_byte_level("gpt-2"), {"eos_token": "<|im_end|>"})
    (path / "config.json").unlink()
    assert Tokenizer.load(path).eos_ids == [2]


def test_word_pieces_are_words_again(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "page": 1, "##s": 2, "of": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer.load(write_directory(tmp_path / "m", backend, {}))
    assert tokenizer.encode("pages of") == [1, 2, 3] and tokenizer.decode([1, 2, 3]) == "pages of"


def test_a_directory_without_a_tokenizer_or_with_a_strange_one(tmp_path: Path) -> None:
    backend = trained_byte_level("gpt-2")
    backend.decoder = decoders.CTC()
    path = write_directory(tmp_path / "m", backend, {})
    with pytest.raises(Unsupported, match="the decoder is CTC"):
        Tokenizer.load(path)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json is damaged"):
        Tokenizer.load(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(Unsupported, match=r"has no tokenizer\.json"):
        Tokenizer.load(path)


# -- the default model ----------------------------------------------------------------------------------------------


def test_the_default_models_tokenizer(default_model: Path) -> None:
    tokenizer = Tokenizer.load(default_model)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, [2, 0])
    assert tokenizer.encode("Hello 12345 world") == [19556, 216, 33, 34, 35, 36, 37, 905]
    assert tokenizer.encode("<|im_start|>user\n")[0] == 1
    assert tokenizer.chat_template is not None and "<|im_start|>" in tokenizer.chat_template
    for text in [*SENTENCES, *random_texts(200)]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
