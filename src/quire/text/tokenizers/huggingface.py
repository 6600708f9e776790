"""The tokenizer of a directory in the Hugging Face layout: tokenizer.json and tokenizer_config.json. Without a
tokenizer.json, the directory may have the files that one is made of: those of SentencePiece (sentencepiece.py), plain
vocabularies (vocab_files.py), or Mistral's tekken.json (tekken.py)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from quire.core.errors import BadCheckpoint, Unsupported
from quire.text.tokenizers.token_bytes import TokenBytes, byte_level, sentencepiece, wordpiece
from quire.text.tokenizers.vocabulary import Vocabulary, refuse_damaged
from quire.weights.config import CheckpointConfig
from quire.weights.huggingface import read_config, read_json

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_vocabulary(directory: Path) -> Vocabulary:
    settings = CheckpointConfig(directory / "tokenizer_config.json", read_json(directory / "tokenizer_config.json"))
    named = _named_tokens(settings, read_json(directory / "special_tokens_map.json"))
    path = directory / "tokenizer.json"
    if not path.exists():
        return _read_older_files(directory, settings, named)
    with refuse_damaged(f"{path} is damaged"):
        backend = tokenizers.Tokenizer.from_file(str(path))
    backend.no_truncation()  # a text that is too long is refused, not cut
    backend.no_padding()
    token_bytes, strips_space = _decoder(backend, path)
    prefix, suffix = _special_around(backend, settings, named)
    added = backend.get_added_tokens_decoder()
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return Vocabulary(
        backend=backend,
        token_bytes=token_bytes,
        strips_space=strips_space,
        added={token: entry.content for token, entry in added.items()},
        special_ids=frozenset(token for token, entry in added.items() if entry.special),
        prefix=prefix,
        suffix=suffix,
        eos_ids=_eos_ids(directory, eos),
        named=named,
        chat_template=_chat_template(directory, settings),
    )


def _read_older_files(directory: Path, settings: CheckpointConfig, named: dict[str, str]) -> Vocabulary:
    vocabulary = _first_reader(directory)(directory, settings, named)
    eos = vocabulary.backend.token_to_id(vocabulary.named["eos_token"]) if "eos_token" in vocabulary.named else None
    return replace(vocabulary, eos_ids=_eos_ids(directory, eos), chat_template=_chat_template(directory, settings))


def _first_reader(directory: Path) -> Callable[[Path, CheckpointConfig, dict[str, str]], Vocabulary]:
    """The reader of the first tokenizer file that is there."""
    from quire.text.tokenizers import longest_match, tekken, vocab_files
    from quire.text.tokenizers import sentencepiece as pieces

    readers: dict[str, Callable[[Path, CheckpointConfig, dict[str, str]], Vocabulary]] = {
        tekken.TEKKEN_FILE: lambda directory, settings, named: tekken.read_tekken(directory),
        pieces.MODEL_FILE: pieces.read_tokenizer_model,
        pieces.T5_FILE: pieces.read_t5,
        pieces.FAIRSEQ_FILE: pieces.read_fairseq,
        pieces.SOURCE_FILE: pieces.read_marian,
        longest_match.WORLD_FILE: vocab_files.read_world,
        vocab_files.MERGES_FILE: vocab_files.read_byte_pairs,
        vocab_files.WORDS_FILE: vocab_files.read_word_pieces,
    }
    for file, reader in readers.items():
        if (directory / file).exists():
            return reader
    raise Unsupported(
        f"{directory} has no tokenizer.json, nor {', '.join(readers)}",
        "save the tokenizer as a fast one with transformers",
    )


def _eos_ids(directory: Path, named: int | None) -> list[int]:
    ids = read_config(directory).eos_ids if (directory / "config.json").exists() else []
    return list(dict.fromkeys([*ids, *([] if named is None else [named])]))


def _decoder(backend: tokenizers.Tokenizer, path: Path) -> tuple[TokenBytes, bool]:
    """How tokens encode bytes, and whether decoding strips the first space: both follow from the decoder's parts."""
    decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    parts = {part["type"]: part for part in decoder.get("decoders", [decoder] if decoder else [])}
    if "ByteLevel" in parts:
        return byte_level, False
    if "Metaspace" in parts:
        return sentencepiece, parts["Metaspace"].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in parts or parts.get("Replace", {}).get("content") == " ":
        return sentencepiece, parts.get("Strip", {}).get("start", 0) > 0
    if "WordPiece" in parts:
        return wordpiece, True
    name = " + ".join(parts) or "none"
    raise Unsupported(f"{path}: the decoder is {name}", "supported: ByteLevel, Metaspace, SentencePiece's, WordPiece")


def _named_tokens(settings: CheckpointConfig, older: Mapping[str, Any]) -> dict[str, str]:
    """A token is given as its text, or as an object with its text as `content`."""
    named = {}
    for name in NAMED_TOKENS:
        token = settings.get(name, older.get(name))
        token = token.get("content") if isinstance(token, dict) else token
        if token is None:
            continue
        if not isinstance(token, str):
            raise BadCheckpoint(f"{settings.source}: {name} is {token!r}, not a token's text")
        named[name] = token
    return named


def _special_around(
    backend: tokenizers.Tokenizer, settings: CheckpointConfig, named: Mapping[str, str]
) -> tuple[list[int], list[int]]:
    """Special tokens before and after a text: by the post-processor, or by add_bos_token and add_eos_token."""
    plain = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    begin = next((index for index in range(len(whole) + 1) if whole[index : index + len(plain)] == plain), None)
    if begin is None:
        raise Unsupported(f"{settings.source}: the post-processor changes the ids of the text itself")
    prefix, suffix = whole[:begin], whole[begin + len(plain) :]
    for name, side in (("bos_token", prefix), ("eos_token", suffix)):
        token = backend.token_to_id(named[name]) if name in named else None
        if f"add_{name}" not in settings or token is None:
            continue
        if not settings.bool(f"add_{name}"):
            side[:] = [other for other in side if other != token]
        elif token not in side:
            side.insert(0 if side is prefix else len(side), token)
    return prefix, suffix


def _chat_template(directory: Path, settings: CheckpointConfig) -> str | None:
    """From chat_template.jinja, or from tokenizer_config.json: a string, or a list of named templates."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    if template is not None and not isinstance(template, str):
        raise BadCheckpoint(f"{settings.source}: chat_template is neither a text nor a list of named templates")
    return template
