"""The tokenizer inside a GGUF file: byte-level BPE ("gpt2") or SentencePiece BPE ("llama")."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from quire.core.errors import BadCheckpoint, Unsupported
from quire.text.token_bytes import byte_level, sentencepiece
from quire.text.tokenizer import Vocabulary
from quire.weights.config import CheckpointConfig
from quire.weights.gguf import GGUFFile
from quire.weights.gguf_names import end_ids

KEY = "tokenizer.ggml."


# tokenizer.ggml.token_type. 5 is a token that is not used, 6 one that stands for a byte.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

# Control tokens that end a turn or a text in some family, whichever of them the file calls eos.
END_TOKENS = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|end_of_text|>",
    "</s>",
)


def _gpt2_words() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


def _tiktoken_words(digits: str) -> Callable[[], Any]:
    """The pattern of OpenAI's later vocabularies, which families vary in how many digits stay together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@dataclass(frozen=True, slots=True)
class ByteLevelStyle:
    """How a family splits a text into words before merging bytes."""

    words: Callable[[], Any]
    composes: bool = False  # to Unicode's NFC, first
    ignore_merges: bool = False  # a word that is a token is taken as it is
    add_bos: bool = False  # where the file does not say


GPT2 = ByteLevelStyle(_gpt2_words)
STARCODER = ByteLevelStyle(_single_digits)
LLAMA3 = ByteLevelStyle(_tiktoken_words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
QWEN2 = ByteLevelStyle(_tiktoken_words(r"\p{N}"), composes=True)

# tokenizer.ggml.pre -> style
BYTE_LEVEL_STYLES = {
    "default": GPT2, "gpt-2": GPT2, "smollm": STARCODER, "starcoder": STARCODER, "refact": STARCODER,
    "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "qwen2": QWEN2, "deepseek-r1-qwen": QWEN2,
}  # fmt: skip


def read_vocabulary(path: Path) -> Vocabulary:
    metadata = CheckpointConfig(path, GGUFFile(path, with_strings=True).metadata)
    model = metadata.str(KEY + "model")
    tokens = _strings(metadata, "tokens")
    kinds = list(metadata.get(KEY + "token_type", [NORMAL] * len(tokens)))
    if len(kinds) != len(tokens):
        raise BadCheckpoint(f"{path}: {KEY}token_type has {len(kinds)} items for {len(tokens)} tokens")
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        raise BadCheckpoint(f"{path}: {KEY}tokens has {twice!r} twice, at {tokens.index(twice)} and {ids[twice]}")
    if model == "gpt2":
        return _byte_level(metadata, tokens, kinds, ids)
    if model == "llama":
        return _sentencepiece(metadata, tokens, kinds, ids)
    raise Unsupported(f"{path}: {KEY}model is {model!r}", "supported: 'gpt2', 'llama'")


def _byte_level(metadata: CheckpointConfig, tokens: list[str], kinds: list[int], ids: dict[str, int]) -> Vocabulary:
    name = metadata.str(KEY + "pre", default="default")
    if name not in BYTE_LEVEL_STYLES:
        raise Unsupported(f"{metadata.source}: {KEY}pre is {name!r}", f"supported: {', '.join(BYTE_LEVEL_STYLES)}")
    style = BYTE_LEVEL_STYLES[name]
    backend = _bpe(metadata, ids, _pairs(metadata), ignore_merges=style.ignore_merges)
    backend.pre_tokenizer = style.words()
    if style.composes:
        backend.normalizer = normalizers.NFC()
    special = {"bos": _id(metadata, "bos"), "eos": _id(metadata, "eos")}
    return _finish(metadata, backend, tokens, kinds, special, add_bos=style.add_bos, bytes_like_gpt2=True)


def _sentencepiece(metadata: CheckpointConfig, tokens: list[str], kinds: list[int], ids: dict[str, int]) -> Vocabulary:
    scores = metadata.get(KEY + "scores")
    if scores is None or len(scores) != len(tokens):
        count = "no" if scores is None else len(scores)
        raise BadCheckpoint(f"{metadata.source}: {KEY}scores has {count} items for {len(tokens)} tokens")
    special = {"bos": _id(metadata, "bos", 1), "eos": _id(metadata, "eos", 2), "unknown": _id(metadata, "unknown", 0)}
    unknown = special["unknown"]
    pieces = {token: index for token, index in ids.items() if kinds[index] == NORMAL}
    backend = _bpe(
        metadata,
        ids,
        _merges_by_score(pieces, scores),
        unk_token=tokens[unknown] if unknown is not None and unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    space_first = metadata.bool(KEY + "add_space_prefix", default=True)
    spaces = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if space_first else spaces
    return _finish(metadata, backend, tokens, kinds, special, add_bos=True, strips_space=space_first)


def _merges_by_score(pieces: dict[str, int], scores: Any) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joint piece has the highest score, the leftmost first. So every way of
    cutting a piece into two pieces is a merge, in the order of scores; a short left part is the one further left."""
    by_score = sorted((index for token, index in pieces.items() if len(token) > 1), key=lambda index: -scores[index])
    spelling = {index: token for token, index in pieces.items()}
    merges = []
    for index in by_score:
        piece = spelling[index]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                merges.append((left, right))
    return merges


def _finish(
    metadata: CheckpointConfig,
    backend: tokenizers.Tokenizer,
    tokens: list[str],
    kinds: list[int],
    special: dict[str, int | None],
    *,
    add_bos: bool,
    bytes_like_gpt2: bool = False,
    strips_space: bool = False,
) -> Vocabulary:
    """What both models have in common: tokens that are matched first, those around a text, and those with a name."""
    uncommon = [(index, kind) for index, kind in enumerate(kinds) if kind != NORMAL]
    control = [index for index, kind in uncommon if kind in (CONTROL, UNKNOWN)]
    defined = [index for index, kind in uncommon if kind == USER_DEFINED]
    backend.add_special_tokens([AddedToken(tokens[index], normalized=False, special=True) for index in control])
    backend.add_tokens([AddedToken(tokens[index], normalized=False) for index in defined])

    around: dict[str, list[int]] = {}
    for name, default in (("bos", add_bos), ("eos", False)):
        token = special[name]
        wanted = metadata.bool(f"{KEY}add_{name}_token", default=default and token is not None)
        if wanted and token is None:
            raise BadCheckpoint(
                f"{metadata.source}: {KEY}add_{name}_token is true, and {KEY}{name}_token_id is missing"
            )
        around[name] = [token] if wanted and token is not None else []

    named = {
        "bos": special["bos"],
        "eos": special["eos"],
        "unk": _id(metadata, "unknown"),
        "pad": _id(metadata, "padding"),
    }
    ends = [*end_ids(metadata), *([special["eos"]] if special["eos"] is not None else [])]
    ends += [index for index in (*control, *defined) if tokens[index] in END_TOKENS]
    template = KEY.removesuffix("ggml.") + "chat_template"
    return Vocabulary(
        backend=backend,
        token_bytes=byte_level if bytes_like_gpt2 else sentencepiece,
        strips_space=strips_space,
        added={index: tokens[index] for index in (*control, *defined)},
        special_ids=frozenset(control),
        prefix=around["bos"],
        suffix=around["eos"],
        eos_ids=list(dict.fromkeys(ends)),
        named={
            f"{name}_token": tokens[index] for name, index in named.items() if index is not None and index < len(tokens)
        },
        chat_template=metadata.str(template) if template in metadata else None,
    )


def _bpe(
    metadata: CheckpointConfig, ids: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(ids, merges, **options))
    except Exception as error:  # the library's errors have no class of their own
        raise BadCheckpoint(f"{metadata.source}: {KEY}merges do not fit {KEY}tokens: {error}") from error


def _pairs(metadata: CheckpointConfig) -> list[tuple[str, str]]:
    """The merges: two tokens with a space between them, which no byte-level token contains."""
    merges = _strings(metadata, "merges")
    if set(map(str.count, merges, repeat(" "))) - {1}:
        wrong = next(merge for merge in merges if merge.count(" ") != 1)
        raise BadCheckpoint(f"{metadata.source}: {KEY}merges has {wrong!r}, which is not two tokens")
    halves = iter(" ".join(merges).split(" "))  # all at once: it halves the time of a large vocabulary
    return list(zip(halves, halves, strict=True)) if merges else []


def _strings(metadata: CheckpointConfig, name: str) -> list[str]:
    value = metadata.get(KEY + name)
    if not isinstance(value, list):
        raise BadCheckpoint(
            f"{metadata.source}: {KEY}{name} is {'missing' if value is None else 'no array of strings'}"
        )
    return value


def _id(metadata: CheckpointConfig, name: str, default: int | None = None) -> int | None:
    key = f"{KEY}{name}_token_id"
    return metadata.int(key) if key in metadata else default
