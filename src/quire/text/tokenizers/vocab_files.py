"""The tokenizer of a directory with a vocabulary in plain files instead of a tokenizer.json: `vocab.txt` of WordPiece,
`vocab.json` and `merges.txt` of byte-level BPE, or RWKV's list of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from quire.core.errors import BadCheckpoint, Unsupported
from quire.text.tokenizers.gguf_pre_tokenizers import GPT2, QWEN2, PreTokenizerStyle
from quire.text.tokenizers.longest_match import END, WORLD_FILE, LongestMatch, escaped_bytes, read_world_file
from quire.text.tokenizers.token_bytes import TokenBytes, byte_level, wordpiece
from quire.text.tokenizers.vocabulary import Vocabulary, refuse_damaged
from quire.weights.config import CheckpointConfig
from quire.weights.huggingface import read_json

WORDS_FILE, VOCAB_FILE, MERGES_FILE = "vocab.txt", "vocab.json", "merges.txt"
MAX_FILE_BYTES = 64 << 20
FAIRSEQ_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
BERT_TOKENS = {"bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}


@dataclass(frozen=True, slots=True)
class BytePairStyle:
    """What differs between families that have a vocab.json and merges.txt."""

    words: PreTokenizerStyle = GPT2
    named: Mapping[str, str] = field(default_factory=dict)  # where the settings do not say
    ends: bool = False  # a text begins with bos and ends with eos


GPT2_TOKENS = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
BYTE_PAIR_STYLES = {  # by `tokenizer_class`, or `model_type` of config.json
    "gpt2": BytePairStyle(named=GPT2_TOKENS),
    "gpt_bigcode": BytePairStyle(named=GPT2_TOKENS),
    "codegen": BytePairStyle(named=GPT2_TOKENS),
    "phi": BytePairStyle(named=GPT2_TOKENS),
    "opt": BytePairStyle(named=dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")),
    "qwen2": BytePairStyle(QWEN2, named={"eos_token": "<|endoftext|>"}),
    "roberta": BytePairStyle(named=FAIRSEQ_TOKENS, ends=True),
    "bart": BytePairStyle(named=FAIRSEQ_TOKENS, ends=True),
}


def read_word_pieces(directory: Path, settings: CheckpointConfig, named: Mapping[str, str]) -> Vocabulary:
    tokens = _text(directory / WORDS_FILE).split("\n")
    vocab = {token.rstrip("\r"): index for index, token in enumerate(tokens) if token or index < len(tokens) - 1}
    for role, name in (("bos_token", "cls_token"), ("eos_token", "sep_token")):
        if isinstance(token := settings.get(name), str):
            named = {**named, role: token}
    defaults = BERT_TOKENS if BERT_TOKENS["bos_token"] in vocab else FAIRSEQ_TOKENS | {"unk_token": "[UNK]"}
    named = {**defaults, **named}
    with refuse_damaged(f"{directory / WORDS_FILE} is damaged"):
        backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=named["unk_token"]))
    backend.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=settings.bool("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.bool("do_lower_case", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    doubled = named["bos_token"] == FAIRSEQ_TOKENS["bos_token"]
    return _finish(directory, backend, vocab, named, settings, wordpiece, ends=True, doubled=doubled)


def read_world(directory: Path, settings: CheckpointConfig, named: Mapping[str, str]) -> Vocabulary:
    """RWKV's, whose first token begins and ends texts where nothing else is named."""
    return Vocabulary(
        backend=LongestMatch(read_world_file(directory / WORLD_FILE)),
        token_bytes=escaped_bytes,
        strips_space=False,
        added={0: END},
        special_ids=frozenset([0]),
        named={"bos_token": END, "eos_token": END, **named},
    )


def read_byte_pairs(directory: Path, settings: CheckpointConfig, named: Mapping[str, str]) -> Vocabulary:
    style = BYTE_PAIR_STYLES.get(family := _family(directory, settings))
    if style is None:
        raise Unsupported(
            f"{directory} has a {VOCAB_FILE} and {MERGES_FILE} of `{family}`, and no tokenizer.json",
            f"such files are read of {', '.join(BYTE_PAIR_STYLES)}: save the tokenizer as a fast one with transformers",
        )
    vocab = read_json(directory / VOCAB_FILE)
    if not all(type(token) is int for token in vocab.values()):
        raise BadCheckpoint(f"{directory / VOCAB_FILE} does not give every token an id")
    lines = [line.rstrip("\r") for line in _text(directory / MERGES_FILE).split("\n")]
    lines = [line for line in lines if line and not line.startswith("#version")]
    if wrong := next((line for line in lines if line.count(" ") != 1), None):
        raise BadCheckpoint(f"{directory / MERGES_FILE} has {wrong!r}, which is not two tokens")
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    with refuse_damaged(f"{directory / MERGES_FILE} does not fit {VOCAB_FILE}"):
        backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=False))
    if settings.bool("add_prefix_space", False):
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        backend.pre_tokenizer = style.words.make()
    if style.words.nfc:
        backend.normalizer = normalizers.NFC()
    named = {**style.named, **named}
    return _finish(directory, backend, vocab, named, settings, byte_level, ends=style.ends, doubled=True)


def _finish(
    directory: Path,
    backend: tokenizers.Tokenizer,
    vocab: Mapping[str, int],
    named: Mapping[str, str],
    settings: CheckpointConfig,
    token_bytes: TokenBytes,
    *,
    ends: bool,
    doubled: bool,  # two texts have two ends between them
) -> Vocabulary:
    masks = [token for token in ("[MASK]", "<mask>") if token in vocab]
    special_tokens = dict.fromkeys([*named.values(), *masks])
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special_tokens])
    added = {token: index for token, index in read_json(directory / "added_tokens.json").items() if type(index) is int}
    decoder = settings.dict("added_tokens_decoder", {})
    special = {entry.get("content") for entry in decoder.values() if isinstance(entry, dict) and entry.get("special")}
    added |= {entry["content"]: int(index) for index, entry in decoder.items() if isinstance(entry, dict)}
    for token, index in sorted(added.items(), key=lambda item: item[1]):
        backend.add_tokens([AddedToken(token, normalized=False, special=token in special)])
        if backend.token_to_id(token) != index:
            raise BadCheckpoint(
                f"{directory}: the added token {token!r} has the id {index}, and the ids before it are missing"
            )
    first, last = (
        vocab.get(named.get(role, ""), backend.token_to_id(named.get(role, ""))) for role in ("bos_token", "eos_token")
    )
    prefix = [first] if first is not None and settings.bool("add_bos_token", ends) else []
    suffix = [last] if last is not None and settings.bool("add_eos_token", ends) else []
    if prefix and suffix:
        begin, end = named["bos_token"], named["eos_token"]
        pair = f"{begin} $A {end} {end} $B {end}" if doubled else f"{begin} $A {end} $B:1 {end}:1"
        backend.post_processor = processors.TemplateProcessing(
            f"{begin} $A {end}", pair, [(begin, prefix[0]), (end, suffix[0])]
        )
    matched = backend.get_added_tokens_decoder()
    return Vocabulary(
        backend=backend,
        token_bytes=token_bytes,
        strips_space=token_bytes is wordpiece,
        added={token: entry.content for token, entry in matched.items()},
        special_ids=frozenset(token for token, entry in matched.items() if entry.special),
        prefix=prefix,
        suffix=suffix,
        named=named,
    )


def _family(directory: Path, settings: CheckpointConfig) -> str:
    if "tokenizer_class" in settings:
        return settings.str("tokenizer_class").removesuffix("Fast").removesuffix("Tokenizer").lower()
    return str(read_json(directory / "config.json").get("model_type", "an unknown family"))


def _text(path: Path) -> str:
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise BadCheckpoint(f"{path} has {size} bytes, and at most {MAX_FILE_BYTES} are possible")
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}") from error
