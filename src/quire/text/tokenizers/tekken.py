"""`tekken.json`, the tokenizer that Mistral publishes beside newer models: tokens as bytes, in the order they merge in.

    {"config": {"pattern", "default_vocab_size", "default_num_special_tokens"},
     "vocab": [{"rank", "token_bytes"}, ...], "special_tokens": [{"rank", "token_str"}, ...]}

Special tokens have the first ids, then the vocabulary as far as the size goes."""

import binascii
from base64 import b64decode
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, pre_tokenizers

from quire.core.errors import BadCheckpoint
from quire.text.tokenizers.token_bytes import byte_level, byte_level_text
from quire.text.tokenizers.vocabulary import Vocabulary, refuse_damaged
from quire.weights.config import CheckpointConfig
from quire.weights.huggingface import read_json

TEKKEN_FILE = "tekken.json"
MAX_TOKENS = 1 << 20
# The first special tokens of files that do not list them.
FIRST_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
)  # fmt: skip


def read_tekken(directory: Path) -> Vocabulary:
    path = directory / TEKKEN_FILE
    content = read_json(path)
    config = CheckpointConfig(path, content).section("config")
    size, num_special = config.int("default_vocab_size"), config.int("default_num_special_tokens")
    if not 0 < num_special < size <= MAX_TOKENS:
        raise BadCheckpoint(f"{path}: {num_special} special tokens of {size} tokens cannot be")
    special = _special(path, content, num_special)
    ranks = _ranks(path, content, size - num_special)
    vocab = {token: index for index, token in enumerate(special)}
    vocab |= {byte_level_text(token): num_special + rank for token, rank in ranks.items()}
    with refuse_damaged(f"{path} is damaged"):
        backend = tokenizers.Tokenizer(models.BPE(vocab, _merges(ranks), ignore_merges=True))
        words = pre_tokenizers.Split(Regex(config.str("pattern")), behavior="isolated")
    byte_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, byte_words])
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return Vocabulary(
        backend=backend,
        token_bytes=byte_level,
        strips_space=False,
        added=dict(enumerate(special)),
        special_ids=frozenset(range(num_special)),
        prefix=[vocab["<s>"]] if "<s>" in vocab else [],
        named={role: token for role, token in named.items() if token in vocab},
    )


def _special(path: Path, content: dict[str, Any], count: int) -> list[str]:
    tokens = [f"<SPECIAL_{index}>" for index in range(count)]
    listed = content.get("special_tokens")
    if not isinstance(listed, list):
        listed = [{"rank": index, "token_str": token} for index, token in enumerate(FIRST_SPECIAL)]
    for entry in listed:
        rank, token = (entry.get("rank"), entry.get("token_str")) if isinstance(entry, dict) else (None, None)
        if type(rank) is not int or not 0 <= rank < count or not isinstance(token, str):
            raise BadCheckpoint(f"{path}: the special token {str(entry)[:80]} has no rank below {count} and text")
        tokens[rank] = token
    return tokens


def _ranks(path: Path, content: dict[str, Any], count: int) -> dict[bytes, int]:
    """The bytes of a token -> its rank."""
    listed = content.get("vocab")
    if not isinstance(listed, list) or len(listed) < count:
        raise BadCheckpoint(f"{path} has fewer than the {count} tokens that its config promises")
    try:
        tokens = [b64decode(entry["token_bytes"], validate=True) for entry in listed[:count]]
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise BadCheckpoint(f"{path}: a token of vocab has no token_bytes in base 64: {error}") from error
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if len(ranks) != count or b"" in ranks or any(bytes([byte]) not in ranks for byte in range(256)):
        raise BadCheckpoint(f"{path}: vocab repeats a token, or lacks one of the 256 bytes")
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, in the order of the tokens that result; of one token, the parts that are
    made first come first."""
    spelled = {token: byte_level_text(token) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in ranks:
        parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        made = [(ranks[left], ranks[right], left, right) for left, right in parts if left in ranks and right in ranks]
        merges += [(spelled[left], spelled[right]) for _, _, left, right in sorted(made)]
    return merges
