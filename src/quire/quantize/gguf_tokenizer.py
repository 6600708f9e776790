"""The tokenizer of a checkpoint in Hugging Face's layout as keys of a GGUF file.

What the reader of such files makes of the keys encodes some texts, and so does the tokenizer itself: one that GGUF
cannot say is refused, never written wrongly."""

import json
from array import array
from pathlib import Path
from typing import Any

import tokenizers

from quire.core.errors import Unsupported
from quire.text.tokenizers.gguf import (
    CHAT_TEMPLATE,
    CONTROL,
    KEY,
    NORMAL,
    READERS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GGUFTokens,
)
from quire.text.tokenizers.gguf_pre_tokenizers import PRE_TOKENIZERS
from quire.text.tokenizers.huggingface import read_vocabulary
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tokenizers.vocabulary import Vocabulary
from quire.weights.config import CheckpointConfig

BYTE = 6
PROBES = (
    "The quick brown fox jumps over 12345 lazy dogs. Don't they'll I'VE?",
    "  two spaces\n\n\ttabs\r\n   and\u00a0more ... !!! ((x)) {y: [1, 22, 333, 4444]};",
    "naïve café Ünïcode ﬁ 你好，世界 こんにちは 안녕 привет мир שלום नमस्ते 🙂👩‍💻 x²+y³",
    "def f(a_b, *args):\n    return camelCaseWord / HTTPServer2 # comment\n\n\n",
)
PREFERRED = {"default": "gpt-2", "starcoder": "smollm"}  # of names with one meaning


def tokenizer_keys(directory: Path, vocab_size: int) -> dict[str, Any]:
    vocabulary = read_vocabulary(directory)
    backend = vocabulary.backend
    if not isinstance(backend, tokenizers.Tokenizer):
        raise Unsupported(f"{directory}: its tokenizer has no tokenizer.json", "save it with transformers first")
    state = json.loads(backend.to_str())
    if state["model"]["type"] != "BPE":
        raise Unsupported(f"{directory}: the tokenizer's model is {state['model']['type']}", "GGUF output needs BPE")
    byte_level = not state["model"].get("byte_fallback")
    tokens, kinds = _tokens(backend, vocab_size, byte_level)
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["model"]["merges"]]
    keys: dict[str, Any] = {KEY + "model": "gpt2" if byte_level else "llama"}
    keys[KEY + "tokens"] = tokens
    keys[KEY + "token_type"] = array("i", kinds)
    if byte_level:
        keys[KEY + "merges"] = merges
        keys[KEY + "pre"] = _pre_tokenizer(directory, backend, state)
    else:
        keys[KEY + "scores"] = _scores(tokens, merges)
        keys[KEY + "add_space_prefix"] = vocabulary.strips_space
    keys |= _roles(vocabulary, backend)
    if vocabulary.chat_template:
        keys[CHAT_TEMPLATE] = vocabulary.chat_template
    _check(directory, vocabulary, keys)
    return keys


def _tokens(backend: tokenizers.Tokenizer, vocab_size: int, byte_level: bool) -> tuple[list[str], list[int]]:
    """Rows of the embedding table that no token has are padding."""
    by_id = {index: token for token, index in backend.get_vocab(with_added_tokens=True).items()}
    added = backend.get_added_tokens_decoder()
    tokens, kinds = [], []
    for index in range(max(vocab_size, max(by_id) + 1)):
        token = by_id.get(index)
        tokens.append(f"[PAD{index}]" if token is None else token)
        if token is None:
            kinds.append(UNUSED)
        elif index in added:
            kinds.append(UNKNOWN if token == "<unk>" else CONTROL if added[index].special else USER_DEFINED)
        elif not byte_level and len(token) == 6 and token.startswith("<0x"):
            kinds.append(BYTE)
        else:
            kinds.append(NORMAL)
    return tokens, kinds


def _pre_tokenizer(directory: Path, backend: tokenizers.Tokenizer, state: dict[str, Any]) -> str:
    """The name whose words are those of the tokenizer."""
    nfc = (state["normalizer"] or {}).get("type") == "NFC"
    ignore_merges = bool(state["model"].get("ignore_merges"))
    ours = [_words(backend.pre_tokenizer, probe) for probe in PROBES]
    for name, style in PRE_TOKENIZERS.items():
        if (style.nfc, style.ignore_merges) == (nfc, ignore_merges):
            other = style.make()
            if [_words(other, probe) for probe in PROBES] == ours:
                return PREFERRED.get(name, name)
    raise Unsupported(
        f"{directory}: the pre-tokenizer is none that GGUF has a name for", "choose a format of Hugging Face's layout"
    )


def _words(pre_tokenizer: Any, text: str) -> Any:
    return [text] if pre_tokenizer is None else pre_tokenizer.pre_tokenize_str(text)


def _scores(tokens: list[str], merges: list[str]) -> "array[float]":
    """Earlier merges first, then what no merge makes."""
    rank: dict[str, int] = {}
    for index, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), index)
    return array("f", [-float(rank.get(token, len(merges) + index)) for index, token in enumerate(tokens)])


def _roles(vocabulary: Vocabulary, backend: tokenizers.Tokenizer) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = vocabulary.named.get(f"{role}_token")
        if token is not None and (index := backend.token_to_id(token)) is not None:
            keys[f"{KEY}{name}_token_id"] = index
    for role, ids in (("bos", vocabulary.prefix), ("eos", vocabulary.suffix)):
        index = keys.get(f"{KEY}{role}_token_id")
        if index is not None:
            keys[f"{KEY}add_{role}_token"] = index in ids
    eot = [index for index in vocabulary.eos_ids if index != keys.get(f"{KEY}eos_token_id")]
    if eot and f"{KEY}eos_token_id" in keys:
        keys[f"{KEY}eot_token_id"] = eot[0]
    return keys


def _check(directory: Path, vocabulary: Vocabulary, keys: dict[str, Any]) -> None:
    pieces = GGUFTokens.read(CheckpointConfig(directory, keys))
    written, ours = Tokenizer(READERS[keys[KEY + "model"]](pieces)), Tokenizer(vocabulary)
    probes = [*PROBES, *(f"a{token}b" for token in list(vocabulary.added.values())[:8])]
    for probe in probes:
        if written.encode(probe) != ours.encode(probe):
            raise Unsupported(
                f"{directory}: as GGUF, the tokenizer would encode {probe!r} to other ids",
                "choose a format of Hugging Face's layout",
            )
