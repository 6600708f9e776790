"""The tokenizer of a GGUF file: byte-level BPE ("gpt2"), SentencePiece BPE ("llama"), BPE of characters ("gemma4"), the
longest match ("rwkv"), and of encoders WordPiece ("bert") or SentencePiece unigram ("t5")."""

import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from quire.core.errors import BadCheckpoint, Unsupported
from quire.ops.compiled import native
from quire.text.tokenizers.gguf_pre_tokenizers import PRE_TOKENIZERS
from quire.text.tokenizers.longest_match import LongestMatch, escaped_bytes
from quire.text.tokenizers.piece_backends import SPACE, SentencePieceBPE
from quire.text.tokenizers.sentencepiece import unigram_backend
from quire.text.tokenizers.sentencepiece_model import SentencePieceModel
from quire.text.tokenizers.token_bytes import TokenBytes, byte_level, sentencepiece, wordpiece
from quire.text.tokenizers.vocabulary import Vocabulary, refuse_damaged
from quire.weights.config import CheckpointConfig
from quire.weights.gguf.container import GGUFFile
from quire.weights.gguf.names import end_ids

KEY = "tokenizer.ggml."
CHAT_TEMPLATE = "tokenizer.chat_template"
CONTINUED = "##"  # before a piece that continues a word
CAPITALS = re.compile(r"(##)?[A-Z][a-z]")  # in vocabularies that tell capital letters apart

# tokenizer.ggml.token_type; 6 is BYTE.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

# Control tokens that end a turn or a text in some family. A file names only one of them as eos.
END_TOKENS = frozenset(
    ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "</s>")
)


def read_vocabulary(path: Path) -> Vocabulary:
    pieces = GGUFTokens.read(CheckpointConfig(path, GGUFFile(path, with_strings=True).metadata))
    return READERS[pieces.metadata.expect(KEY + "model", *READERS)](pieces)


@dataclass(frozen=True, slots=True)
class GGUFTokens:
    """The vocabulary as the file lists it."""

    metadata: CheckpointConfig
    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]
    uncommon: list[int]  # ids of tokens that are not NORMAL

    @classmethod
    def read(cls, metadata: CheckpointConfig) -> "GGUFTokens":
        tokens = _strings(metadata, "tokens")
        given = KEY + "token_type" in metadata
        kinds = _numbers(metadata, "token_type", len(tokens)) if given else [NORMAL] * len(tokens)
        ids = dict(zip(tokens, range(len(tokens)), strict=True))
        if len(ids) != len(tokens):
            first, token = next((index, token) for index, token in enumerate(tokens) if ids[token] != index)
            raise BadCheckpoint(f"{metadata.source}: {KEY}tokens has {token!r} twice, at {first} and {ids[token]}")
        return cls(metadata, tokens, kinds, ids, [index for index, kind in enumerate(kinds) if kind != NORMAL])

    def id(self, name: str, default: int | None = None) -> int | None:
        """The id of the token with a role, such as "bos"; `default`, if the vocabulary has it, where the file does not
        say."""
        key = f"{KEY}{name}_token_id"
        if key not in self.metadata:
            return default if default is not None and default < len(self.tokens) else None
        token = self.metadata.int(key)
        if not 0 <= token < len(self.tokens):
            raise BadCheckpoint(f"{self.metadata.source}: {key} is {token}, and there are {len(self.tokens)} tokens")
        return token

    def of(self, *kinds: int) -> list[int]:
        """The ids of tokens of these kinds, other than NORMAL."""
        return [index for index in self.uncommon if self.kinds[index] in kinds]


def _byte_level(pieces: GGUFTokens) -> Vocabulary:
    name = pieces.metadata.str(KEY + "pre", default="default")
    if name not in PRE_TOKENIZERS:
        source = pieces.metadata.source
        raise Unsupported(f"{source}: {KEY}pre is {name!r}", f"supported: {', '.join(PRE_TOKENIZERS)}")
    style = PRE_TOKENIZERS[name]
    with refuse_damaged(f"{pieces.metadata.source}: {KEY}merges do not fit {KEY}tokens"):
        model = models.BPE(pieces.ids, _pairs(pieces.metadata), ignore_merges=style.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = style.make()
    if style.nfc:
        backend.normalizer = normalizers.NFC()
    tokens = pieces.tokens
    special = [AddedToken(tokens[index], normalized=False, special=True) for index in pieces.of(CONTROL, UNKNOWN)]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(tokens[index], normalized=False) for index in pieces.of(USER_DEFINED)])
    return _finish(pieces, backend, byte_level, bos=pieces.id("bos"), eos=pieces.id("eos"), add_bos=style.add_bos)


def _sentencepiece(pieces: GGUFTokens) -> Vocabulary:
    add_space = pieces.metadata.bool(KEY + "add_space_prefix", default=True)
    backend = SentencePieceBPE(
        pieces.tokens,
        _numbers(pieces.metadata, "scores", len(pieces.tokens)),
        mergeable=[kind == NORMAL for kind in pieces.kinds],
        added=pieces.of(CONTROL, UNKNOWN, USER_DEFINED),
        unknown=pieces.id("unknown", 0),
        add_space=add_space,
    )
    bos, eos = pieces.id("bos", 1), pieces.id("eos", 2)
    return _finish(pieces, backend, sentencepiece, bos=bos, eos=eos, add_bos=True, strips_space=add_space)


def _characters(pieces: GGUFTokens) -> Vocabulary:
    """Merges of characters within runs of newlines, and between these; a run that is a token is not merged. Spaces are
    U+2581, and a character without a token is its bytes."""
    with refuse_damaged(f"{pieces.metadata.source}: {KEY}merges do not fit {KEY}tokens"):
        model = models.BPE(pieces.ids, _pairs(pieces.metadata), byte_fallback=True, ignore_merges=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[^\n]+|\n+"), behavior="isolated")
    tokens = pieces.tokens
    special = [AddedToken(tokens[index], normalized=False, special=True) for index in pieces.of(CONTROL, UNKNOWN)]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(tokens[index], normalized=False) for index in pieces.of(USER_DEFINED)])
    return _finish(pieces, backend, sentencepiece, bos=pieces.id("bos", 2), eos=pieces.id("eos", 1), add_bos=True)


def _unigram(pieces: GGUFTokens) -> Vocabulary:
    metadata = pieces.metadata
    char_map = metadata.get(KEY + "precompiled_charsmap")
    model = SentencePieceModel(
        pieces.tokens,
        _numbers(metadata, "scores", len(pieces.tokens)),
        pieces.kinds,
        algorithm="unigram",
        char_map=char_map.tobytes() if isinstance(char_map, array) else b"",
        add_space=metadata.bool(KEY + "add_space_prefix", default=True),
        collapse_spaces=metadata.bool(KEY + "remove_extra_whitespaces", default=True),
    )
    special = pieces.of(CONTROL, UNKNOWN)
    added = {index: pieces.tokens[index] for index in (*special, *pieces.of(USER_DEFINED))}
    backend = unigram_backend(model, metadata.source, added, special)
    roles = {"bos": pieces.id("bos"), "eos": pieces.id("eos", 1)}
    return _finish(pieces, backend, sentencepiece, **roles, add_bos=False, add_eos=True, strips_space=model.add_space)


def _word_pieces(pieces: GGUFTokens) -> Vocabulary:
    """The converter writes a word's first piece with U+2581 before it, and takes the ## off the others."""

    def spelled(index: int, token: str) -> str:
        if pieces.kinds[index] == CONTROL:
            return token
        return token[1:] if token.startswith(SPACE) else CONTINUED + token

    tokens = [spelled(index, token) for index, token in enumerate(pieces.tokens)]
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = pieces.id("unknown", 100)
    with refuse_damaged(f"{pieces.metadata.source}: {KEY}tokens are no WordPiece vocabulary"):
        backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=tokens[unknown or 0]))
    cased = any(CAPITALS.match(tokens[index]) for index, kind in enumerate(pieces.kinds) if kind == NORMAL)
    lowercase = pieces.metadata.bool(KEY + "normalizer.lowercase", default=not cased)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [AddedToken(tokens[index], normalized=False, special=True) for index in pieces.of(CONTROL)]
    backend.add_special_tokens(special)
    first, last = (
        pieces.id("cls", pieces.id("bos", 101)),
        pieces.id("seperator", pieces.id("eos", 102)),
    )  # as GGUF spells it
    pieces = replace(pieces, tokens=tokens)
    return _finish(pieces, backend, wordpiece, bos=first, eos=last, add_bos=True, add_eos=True, strips_space=True)


def _longest_match(pieces: GGUFTokens) -> Vocabulary:
    tokens = [
        b"" if kind != NORMAL else escaped_bytes(token) for token, kind in zip(pieces.tokens, pieces.kinds, strict=True)
    ]
    bos, eos = pieces.id("bos", 0), pieces.id("eos", 0)
    return _finish(pieces, LongestMatch(tokens), escaped_bytes, bos=bos, eos=eos, add_bos=False)


READERS: Mapping[str, Callable[[GGUFTokens], Vocabulary]] = {  # by `tokenizer.ggml.model`
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _characters,
    "rwkv": _longest_match,
    "bert": _word_pieces,
    "t5": _unigram,
}


def _finish(
    pieces: GGUFTokens,
    backend: tokenizers.Tokenizer | SentencePieceBPE | LongestMatch,
    token_bytes: TokenBytes,
    *,
    bos: int | None,
    eos: int | None,
    add_bos: bool,  # if the file does not say
    add_eos: bool = False,
    strips_space: bool = False,
) -> Vocabulary:
    """The part that both models share: added tokens, special tokens around a text, and tokens with a role."""
    tokens, metadata = pieces.tokens, pieces.metadata
    control, defined = pieces.of(CONTROL, UNKNOWN), pieces.of(USER_DEFINED)
    no_text = dict.fromkeys(pieces.of(UNUSED), "")  # padding of the vocabulary
    named = [*control, *(index for index in defined if tokens[index] != "</s>")]  # in Gemma it is also an HTML tag
    ends = [*end_ids(metadata), eos, *(index for index in named if tokens[index] in END_TOKENS)]
    prefix = _role_ids(metadata, "bos", bos, add_bos)
    suffix = _role_ids(metadata, "eos", eos, add_eos)
    if isinstance(backend, tokenizers.Tokenizer) and prefix and suffix:
        backend.post_processor = _pairs_of_texts(pieces, prefix[0], suffix[0], doubled=token_bytes is not wordpiece)
    roles = {"bos": bos, "eos": eos, "unk": pieces.id("unknown"), "pad": pieces.id("padding")}
    return Vocabulary(
        backend=backend,
        token_bytes=token_bytes,
        strips_space=strips_space,
        added={index: tokens[index] for index in (*control, *defined)} | no_text,
        special_ids=frozenset(control),
        prefix=prefix,
        suffix=suffix,
        eos_ids=list(dict.fromkeys(end for end in ends if end is not None)),
        named={f"{role}_token": tokens[index] for role, index in roles.items() if index is not None},
        chat_template=metadata.str(CHAT_TEMPLATE) if CHAT_TEMPLATE in metadata else None,
    )


def _pairs_of_texts(pieces: GGUFTokens, first: int, last: int, doubled: bool) -> Any:
    """Special tokens around one text and two. `doubled`: RoBERTa has two between texts, and one type for all tokens."""
    begin, end = pieces.tokens[first], pieces.tokens[last]
    pair = f"{begin} $A {end} {end} $B {end}" if doubled else f"{begin} $A {end} $B:1 {end}:1"
    return processors.TemplateProcessing(f"{begin} $A {end}", pair, [(begin, first), (end, last)])


def _role_ids(metadata: CheckpointConfig, name: str, token: int | None, default: bool) -> list[int]:
    if token is not None:
        return [token] if metadata.bool(f"{KEY}add_{name}_token", default) else []
    if metadata.bool(f"{KEY}add_{name}_token", default=False):
        raise BadCheckpoint(f"{metadata.source}: {KEY}add_{name}_token is true, and {KEY}{name}_token_id is missing")
    return []


def _pairs(metadata: CheckpointConfig) -> list[tuple[str, str]]:
    """The merges as pairs. A merge is two tokens with a space between, which no byte-level token contains."""
    merges = _strings(metadata, "merges")
    try:
        pairs: list[tuple[str, str]] = native.split_pairs(merges)
    except ValueError as error:
        wrong = next(merge for merge in merges if merge.count(" ") != 1)
        raise BadCheckpoint(f"{metadata.source}: {KEY}merges has {wrong!r}, which is not two tokens") from error
    return pairs


def _strings(metadata: CheckpointConfig, name: str) -> list[str]:
    value = metadata.get(KEY + name)
    if not isinstance(value, list):
        raise BadCheckpoint(
            f"{metadata.source}: {KEY}{name} is {'missing' if value is None else 'no array of strings'}"
        )
    return value


def _numbers(metadata: CheckpointConfig, name: str, count: int) -> list[Any]:
    value = metadata.get(KEY + name)
    if not isinstance(value, array):
        raise BadCheckpoint(
            f"{metadata.source}: {KEY}{name} is {'missing' if value is None else 'no array of numbers'}"
        )
    if len(value) != count:
        raise BadCheckpoint(f"{metadata.source}: {KEY}{name} has {len(value)} items for {count} tokens")
    return value.tolist()
