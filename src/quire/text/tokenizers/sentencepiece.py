"""The tokenizer of a directory with SentencePiece files instead of a tokenizer.json: `tokenizer.model`, T5's
`spiece.model`, XLM-RoBERTa's `sentencepiece.bpe.model`, or Marian's `source.spm`, `target.spm` and `vocab.json`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

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

MODEL_FILE, SOURCE_FILE = "tokenizer.model", "source.spm"
T5_FILE, FAIRSEQ_FILE = "spiece.model", "sentencepiece.bpe.model"
NUM_SENTINELS = 100  # <extra_id_0> and so on, of T5
PEGASUS_OFFSET = 103  # from the ids of pieces in the file to those of the model


def read_tokenizer_model(directory: Path, settings: CheckpointConfig, named: Mapping[str, str]) -> Vocabulary:
    """`tokenizer.model`, with the added tokens of tokenizer_config.json."""
    path = directory / MODEL_FILE
    model = read_sentencepiece_model(path)
    added, special = _added_tokens(model, settings)
    is_bpe = model.algorithm == "bpe"
    backend = _bpe_backend(model, path, added) if is_bpe else unigram_backend(model, path, added, special)
    ids = {piece: token for token, piece in enumerate(model.pieces)} | {text: token for token, text in added.items()}
    around = {}
    for name, default in (("bos_token", True), ("eos_token", False)):
        token = ids.get(named[name]) if name in named else None
        around[name] = [token] if token is not None and settings.bool(f"add_{name}", default) else []
    return Vocabulary(
        backend=backend,
        token_bytes=sentencepiece,
        strips_space=model.add_space,
        added=added | dict.fromkeys(model.of(UNUSED), ""),
        special_ids=frozenset(special),
        prefix=around["bos_token"],
        suffix=around["eos_token"],
        named=named,
    )


def read_t5(directory: Path, settings: CheckpointConfig, named: Mapping[str, str]) -> Vocabulary:
    """`spiece.model`: the pieces, then the sentinels, of which the first has the last id. Pegasus has the same file."""
    if _check_class(directory, settings, T5_FILE, "t5", "mt5", "pegasus") == "pegasus":
        return _read_pegasus(directory, settings, named)
    named = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"} | dict(named)
    path = directory / T5_FILE
    model = _unigram_model(path)
    count, sentinels = len(model.pieces), settings.int("extra_ids", NUM_SENTINELS)
    if not 0 <= sentinels <= 10 * NUM_SENTINELS:
        raise BadCheckpoint(f"{settings.source}: extra_ids is {sentinels}, and 0 to {10 * NUM_SENTINELS} are possible")
    added, special = _added_tokens(model, settings)
    made = {count + index: f"<extra_id_{sentinels - 1 - index}>" for index in range(sentinels)}
    special += [token for token in made if token not in added]
    added = made | added
    ends = [model.pieces.index(named["eos_token"])] if named["eos_token"] in model.pieces else []
    return Vocabulary(
        backend=unigram_backend(model, path, added, special),
        token_bytes=sentencepiece,
        strips_space=model.add_space,
        added=added,
        special_ids=frozenset(special),
        suffix=ends,
        named=named,
    )


def _read_pegasus(directory: Path, settings: CheckpointConfig, named: Mapping[str, str]) -> Vocabulary:
    """103 tokens of pretraining stand before the pieces, after <pad> and </s>."""
    settings.expect("offset", PEGASUS_OFFSET, None)
    path = directory / T5_FILE
    model = _unigram_model(path)
    masks = ["<mask_1>", "<mask_2>", *(f"<unk_{number}>" for number in range(2, PEGASUS_OFFSET))]
    first = ["<pad>", "</s>", *masks]
    shifted = replace(
        model,
        pieces=[*first, *model.pieces[2:]],
        scores=[0.0] * len(first) + model.scores[2:],
        kinds=[CONTROL] * len(first) + model.kinds[2:],
    )
    special = shifted.of(CONTROL, UNKNOWN)
    added = {token: shifted.pieces[token] for token in special}
    return Vocabulary(
        backend=unigram_backend(shifted, path, added, special),
        token_bytes=sentencepiece,
        strips_space=model.add_space,
        added=added,
        special_ids=frozenset(special),
        suffix=[1],
        named={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"} | dict(named),
    )


def read_fairseq(directory: Path, settings: CheckpointConfig, named: Mapping[str, str]) -> Vocabulary:
    """`sentencepiece.bpe.model` of XLM-RoBERTa: fairseq's four special tokens have the first ids, the other pieces
    follow, and a mask is the last."""
    _check_class(directory, settings, FAIRSEQ_FILE, "xlm-roberta", "xlmroberta")
    path = directory / FAIRSEQ_FILE
    model = _unigram_model(path)
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"} | dict(named)
    first = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [*first, *model.pieces[3:], "<mask>"]
    special = [*range(len(first)), len(pieces) - 1]
    kinds = [CONTROL, CONTROL, CONTROL, UNKNOWN, *model.kinds[3:], CONTROL]
    shifted = replace(model, pieces=pieces, scores=[0.0] * 4 + model.scores[3:] + [0.0], kinds=kinds)
    added = {token: pieces[token] for token in special}
    backend = unigram_backend(shifted, path, added, special)
    ends = [("<s>", 0), ("</s>", 2)]
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> </s> $B </s>", ends)
    return Vocabulary(
        backend=backend,
        token_bytes=sentencepiece,
        strips_space=model.add_space,
        added=added,
        special_ids=frozenset(special),
        prefix=[0],
        suffix=[2],
        named=named,
    )


def _check_class(directory: Path, settings: CheckpointConfig, file: str, *families: str) -> str:
    """The family, one of `families`: others have the same file, and ids of their own."""
    given = settings.get("tokenizer_class") or read_json(directory / "config.json").get("model_type", "")
    name = str(given).removesuffix("Fast").removesuffix("Tokenizer").lower()
    if name not in families:
        raise Unsupported(
            f"{directory} has a {file} of `{given or 'an unknown family'}`, and no tokenizer.json",
            f"it is read of {', '.join(families)}: save the tokenizer as a fast one with transformers",
        )
    return name


def _unigram_model(path: Path) -> SentencePieceModel:
    model = read_sentencepiece_model(path)
    if model.algorithm != "unigram":
        raise Unsupported(f"{path} is a BPE model", "this family has unigram models")
    return model


def _added_tokens(model: SentencePieceModel, settings: CheckpointConfig) -> tuple[dict[int, str], list[int]]:
    """Tokens that are matched before the others, by id, and the ids of those that are not text."""
    special = model.of(CONTROL, UNKNOWN)
    added = {token: model.pieces[token] for token in (*special, *model.of(USER_DEFINED))}
    for key, entry in sorted(settings.dict("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        token = int(key)
        if token > len(model.pieces) + sum(number >= len(model.pieces) for number in added):
            raise BadCheckpoint(
                f"{settings.source}: added_tokens_decoder has {token}, and the tokens before it are missing"
            )
        added[token] = entry["content"]
        if entry.get("special") and token not in special:
            special.append(token)
    return added, special


def _bpe_backend(model: SentencePieceModel, path: Path, added: Mapping[int, str]) -> SentencePieceBPE:
    if model.char_map or model.collapse_spaces:
        raise Unsupported(f"{path}: a BPE model with normalization", "save it as a fast tokenizer with transformers")
    extra = [added[token] for token in sorted(added) if token >= len(model.pieces)]
    return SentencePieceBPE(
        [*model.pieces, *extra],
        [*model.scores, *[0.0] * len(extra)],
        mergeable=[kind == NORMAL for kind in model.kinds] + [False] * len(extra),
        added=sorted(added),
        unknown=next(iter(model.of(UNKNOWN)), None),
        add_space=model.add_space,
    )


def unigram_backend(
    model: SentencePieceModel, path: Path, added: Mapping[int, str], special: Sequence[int]
) -> tokenizers.Tokenizer:
    backend = _unigram(model, path)
    for token in sorted(added):
        backend.add_tokens([AddedToken(added[token], normalized=False, special=token in special)])
    return backend


def _unigram(model: SentencePieceModel, path: Path) -> tokenizers.Tokenizer:
    unknown = next(iter(model.of(UNKNOWN)), None)
    vocab = list(zip(model.pieces, model.scores, strict=True))
    with refuse_damaged(f"{path} is damaged"):
        backend = tokenizers.Tokenizer(models.Unigram(vocab, unknown, byte_fallback=bool(model.of(BYTE))))
        steps: list[normalizers.Normalizer] = []
        if model.char_map:
            steps.append(normalizers.Precompiled(model.char_map))
        if model.collapse_spaces:
            steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if model.add_space else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    return backend


# -- Marian ------------------------------------------------------------------------------------------------------------


def read_marian(directory: Path, settings: CheckpointConfig, named: Mapping[str, str]) -> Vocabulary:
    named = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"} | dict(named)
    ids = _read_vocab(directory / "vocab.json", named)
    targets = _read_vocab(directory / "target_vocab.json", named) if settings.bool("separate_vocabs", False) else ids
    path = directory / SOURCE_FILE
    source = _unigram(_unigram_model(path), path)
    special = [named[name] for name in ("eos_token", "unk_token", "pad_token")]
    source.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return Vocabulary(
        backend=MarianBackend(source, ids, targets, named["unk_token"]),
        token_bytes=sentencepiece,
        strips_space=True,
        added={targets[token]: token for token in special if token in targets},
        special_ids=frozenset(targets[token] for token in special if token in targets),
        suffix=[ids[named["eos_token"]]],
        named=named,
    )


def _read_vocab(path: Path, named: Mapping[str, str]) -> dict[str, int]:
    vocab = read_json(path)
    for name in ("eos_token", "unk_token"):
        if type(vocab.get(named[name])) is not int:
            raise BadCheckpoint(f"{path} has no id for {named[name]!r}, the {name}")
    return vocab
