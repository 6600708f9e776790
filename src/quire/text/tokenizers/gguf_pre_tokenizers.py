"""Pre-tokenizers of byte-level BPE: how a text is split into words before merging, by `tokenizer.ggml.pre`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _gpt2_words() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


def _falcon_words() -> Any:
    punctuation = pre_tokenizers.Punctuation("contiguous")
    return pre_tokenizers.Sequence([punctuation, _gpt2_words(), _split("[0-9][0-9][0-9]")])


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _matches(*patterns: str) -> Callable[[], Any]:
    """Words are what the patterns match, one pattern after the other, and what lies between."""

    def make() -> Any:
        splits = [_split(pattern) for pattern in patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


def _tiktoken_words(digits: str) -> Callable[[], Any]:
    """The pattern of OpenAI's cl100k vocabulary. Families differ in how many digits stay together."""
    return _matches(rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}")


def _cased_words(digits: str, contractions: str) -> Callable[[], Any]:
    """The pattern of OpenAI's o200k vocabulary: words end before a capital letter, combining marks belong to words, and
    slashes to punctuation."""
    words = rf"[{UPPER}]*[{LOWER}]+{contractions}|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*{contractions}"
    return _matches(rf"[^\r\n\p{{L}}\p{{N}}]?{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}")


@dataclass(frozen=True, slots=True)
class PreTokenizerStyle:
    make: Callable[[], Any]  # a new pre-tokenizer
    nfc: bool = False  # normalize to Unicode's NFC first
    ignore_merges: bool = False  # a word that is a token is not merged
    add_bos: bool = False  # if the file does not say


GPT2 = PreTokenizerStyle(_gpt2_words)
STARCODER = PreTokenizerStyle(_single_digits)
FALCON = PreTokenizerStyle(_falcon_words)
BLOOM = PreTokenizerStyle(_matches(r" ?[^(\s|.,!?…。，、।۔،)]+"))
DBRX = PreTokenizerStyle(_tiktoken_words(r"\p{N}{1,3}"))
LLAMA3 = PreTokenizerStyle(_tiktoken_words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
STABLELM2 = PreTokenizerStyle(_tiktoken_words(r"\p{N}"))
QWEN2 = PreTokenizerStyle(_tiktoken_words(r"\p{N}"), nfc=True)
TEKKEN = PreTokenizerStyle(_cased_words(r"\p{N}", ""), ignore_merges=True, add_bos=True)
GPT4O = PreTokenizerStyle(_cased_words(r"\p{N}{1,3}", CONTRACTIONS + "?"))
DEEPSEEK_V3 = PreTokenizerStyle(
    _matches(
        r"\p{N}{1,3}",
        r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
    )
)

PRE_TOKENIZERS: Mapping[str, PreTokenizerStyle] = {
    "default": GPT2,
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "mpt": GPT2,
    "olmo": GPT2,
    "starcoder": STARCODER,
    "refact": STARCODER,
    "command-r": STARCODER,
    "smollm": STARCODER,
    "falcon": FALCON,
    "bloom": BLOOM,
    "dbrx": DBRX,
    "smaug-bpe": DBRX,
    "llama-bpe": LLAMA3,
    "llama-v3": LLAMA3,
    "llama3": LLAMA3,
    "falcon3": LLAMA3,
    "pixtral": LLAMA3,
    "stablelm2": STABLELM2,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": TEKKEN,
    "gpt-4o": GPT4O,
    "llama4": GPT4O,
    "deepseek-v3": DEEPSEEK_V3,
}
