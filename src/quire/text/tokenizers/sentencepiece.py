"""The tokenizer of a directory that has files of SentencePiece in place of a tokenizer.json: `tokenizer.model`, or
Marian's `source.spm`, `target.spm` and `vocab.json`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from quire.core.errors import BadCheckpoint, Unsupported
from quire.text.tokenizers.piece_backends import SPACE, MarianBackend, SentencePieceBPE
from quire.text.tokenizers.sentencepiece_model import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceModel,
    read_sentencepiece_model,
)
from quire.text.tokenizers.token_bytes import sentencepiece
from quire.text.tokenizers.vocabulary import Vocabulary, refuse_damaged
from quire.weights.config import CheckpointConfig
from quire.weights.huggingface import read_json

MODEL, SOURCE = "tokenizer.model", "source.spm"


def read_tokenizer_model(directory: Path, settings: CheckpointConfig, named: Mapping[str, str]) -> Vocabulary:
    """Of `tokenizer.model`, and what tokenizer_config.json adds to it."""
    path = directory / MODEL
    file = read_sentencepiece_model(path)
    added, special = _added(file, settings)
    backend = _merging(file, path, added) if file.model == "bpe" else _cutting(file, path, added, special)
    ids = {piece: token for token, piece in enumerate(file.pieces)} | {text: token for token, text in added.items()}
    around = {}
    for name, default in (("bos_token", True), ("eos_token", False)):
        token = ids.get(named[name]) if name in named else None
        around[name] = [token] if token is not None and settings.bool(f"add_{name}", default) else []
    return Vocabulary(
        backend=backend,
        token_bytes=sentencepiece,
        strips_space=file.space_first,
        added=added | dict.fromkeys(file.of(UNUSED), ""),
        special_ids=frozenset(special),
        prefix=around["bos_token"],
        suffix=around["eos_token"],
        named=named,
    )


def _added(file: SentencePieceModel, settings: CheckpointConfig) -> tuple[dict[int, str], list[int]]:
    """Tokens that are matched before anything else, and which of them are no text."""
    special = file.of(CONTROL, UNKNOWN)
    added = {token: file.pieces[token] for token in (*special, *file.of(USER_DEFINED))}
    for key, entry in sorted(settings.dict("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        token = int(key)
        if token > len(file.pieces) + sum(number >= len(file.pieces) for number in added):
            raise BadCheckpoint(
                f"{settings.source}: added_tokens_decoder has {token}, and the tokens before it are missing"
            )
        added[token] = entry["content"]
        if entry.get("special") and token not in special:
            special.append(token)
    return added, special


def _merging(file: SentencePieceModel, path: Path, added: Mapping[int, str]) -> SentencePieceBPE:
    if file.characters or file.single_spaces:
        raise Unsupported(f"{path}: a model of merges that changes characters before", "save it as a fast tokenizer")
    behind = [added[token] for token in sorted(added) if token >= len(file.pieces)]
    return SentencePieceBPE(
        [*file.pieces, *behind],
        [*file.scores, *[0.0] * len(behind)],
        joined=[kind == NORMAL for kind in file.kinds] + [False] * len(behind),
        first=sorted(added),
        unknown=next(iter(file.of(UNKNOWN)), None),
        space_first=file.space_first,
    )


def _cutting(
    file: SentencePieceModel, path: Path, added: Mapping[int, str], special: Sequence[int]
) -> tokenizers.Tokenizer:
    backend = _unigram(file, path)
    for token in sorted(added):
        backend.add_tokens([AddedToken(added[token], normalized=False, special=token in special)])
    return backend


def _unigram(file: SentencePieceModel, path: Path) -> tokenizers.Tokenizer:
    unknown = next(iter(file.of(UNKNOWN)), None)
    vocab = list(zip(file.pieces, file.scores, strict=True))
    with refuse_damaged(f"{path} is damaged"):
        backend = tokenizers.Tokenizer(models.Unigram(vocab, unknown, byte_fallback=bool(file.of(BYTE))))
        steps: list[normalizers.Normalizer] = []
        if file.characters:
            steps.append(normalizers.Precompiled(file.characters))
        if file.single_spaces:
            steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if file.space_first else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    return backend


# -- Marian ------------------------------------------------------------------------------------------------------------


def read_marian(directory: Path, settings: CheckpointConfig, named: Mapping[str, str]) -> Vocabulary:
    named = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"} | dict(named)
    ids = _vocabulary(directory / "vocab.json", named)
    answers = _vocabulary(directory / "target_vocab.json", named) if settings.bool("separate_vocabs", False) else ids
    path = directory / SOURCE
    file = read_sentencepiece_model(path)
    if file.model != "unigram":
        raise Unsupported(f"{path} is a model of merges", "Marian's are unigram models")
    source = _unigram(file, path)
    special = [named[name] for name in ("eos_token", "unk_token", "pad_token")]
    source.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return Vocabulary(
        backend=MarianBackend(source, ids, answers, named["unk_token"]),
        token_bytes=sentencepiece,
        strips_space=True,
        added={answers[token]: token for token in special if token in answers},
        special_ids=frozenset(answers[token] for token in special if token in answers),
        suffix=[ids[named["eos_token"]]],
        named=named,
    )


def _vocabulary(path: Path, named: Mapping[str, str]) -> dict[str, int]:
    vocabulary = read_json(path)
    for name in ("eos_token", "unk_token"):
        if type(vocabulary.get(named[name])) is not int:
            raise BadCheckpoint(f"{path} has no id for {named[name]!r}, the {name}")
    return vocabulary
