"""How byte-level tokenizers split a text into words before they merge bytes: one row a tokenizer.ggml.pre."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers


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

    def words() -> Any:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return words


@dataclass(frozen=True, slots=True)
class ByteLevelStyle:
    words: Callable[[], Any]  # makes the pre-tokenizer
    composes: bool = False  # to Unicode's NFC, first
    ignore_merges: bool = False  # a word that is a token is taken as it is
    add_bos: bool = False  # where the file does not say


GPT2 = ByteLevelStyle(_gpt2_words)
STARCODER = ByteLevelStyle(_single_digits)
LLAMA3 = ByteLevelStyle(_tiktoken_words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
QWEN2 = ByteLevelStyle(_tiktoken_words(r"\p{N}"), composes=True)

BYTE_LEVEL_STYLES: Mapping[str, ByteLevelStyle] = {
    "default": GPT2,
    "gpt-2": GPT2,
    "starcoder": STARCODER,
    "refact": STARCODER,
    "smollm": STARCODER,
    "llama-bpe": LLAMA3,
    "llama-v3": LLAMA3,
    "llama3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
}
