"""Pre-tokenizers of byte-level BPE: how a text is split into words before merging, by `tokenizer.ggml.pre`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UNCASED_SCRIPTS = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"  # from Samaritan to Han, and Hangul
HAN_AND_KANA = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Letters with an upper and a lower case, but for scripts that DeepSeek's first vocabularies leave out: Armenian's lower
# case, Georgian's, some of Latin Extended, Vithkuqi, Garay, Medefaidrin, and letters of mathematics.
DEEPSEEK_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    r"\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{16eff}\x{1d400}-\x{1df1e}]]"
)
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


def _tiktoken_pattern(digits: str, spaces: str = SPACES) -> str:
    """The pattern of OpenAI's cl100k vocabulary. Families differ in how many digits stay together."""
    return rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{spaces}"


def _tiktoken_words(digits: str) -> Callable[[], Any]:
    return _matches(_tiktoken_pattern(digits))


def _cased_pattern(digits: str, contractions: str, others: str = "", after_punctuation: str = "/") -> str:
    """The pattern of OpenAI's o200k vocabulary: words end before a capital letter, combining marks belong to words, and
    slashes to punctuation. `others`: letters that are not part of words."""
    upper, lower = (f"[{letters}{f'&&[^{others}]' if others else ''}]" for letters in (UPPER, LOWER))
    words = rf"{upper}*{lower}+{contractions}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{contractions}"
    punctuation = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n{after_punctuation}]*"
    return rf"[^\r\n\p{{L}}\p{{N}}]?{words}|{digits}|{punctuation}|{SPACES}"


def _cased_words(digits: str, contractions: str) -> Callable[[], Any]:
    return _matches(_cased_pattern(digits, contractions))


@dataclass(frozen=True, slots=True)
class PreTokenizerStyle:
    make: Callable[[], Any]  # a new pre-tokenizer
    nfc: bool = False  # normalize to Unicode's NFC first
    ignore_merges: bool = False  # a word that is a token is not merged
    add_bos: bool = False  # if the file does not say


GPT2 = PreTokenizerStyle(_gpt2_words)
GPT_NEOX = PreTokenizerStyle(_gpt2_words, nfc=True)
COMMAND_R = PreTokenizerStyle(_single_digits, nfc=True)
STARCODER = PreTokenizerStyle(_single_digits)
FALCON = PreTokenizerStyle(_falcon_words)
BLOOM = PreTokenizerStyle(_matches(r" ?[^(\s|.,!?…。，、।۔،)]+"))
DBRX = PreTokenizerStyle(_tiktoken_words(r"\p{N}{1,3}"))
LLAMA3 = PreTokenizerStyle(_tiktoken_words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
STABLELM2 = PreTokenizerStyle(_tiktoken_words(r"\p{N}"))
QWEN2 = PreTokenizerStyle(_tiktoken_words(r"\p{N}"), nfc=True)
TEKKEN = PreTokenizerStyle(_cased_words(r"\p{N}", ""), ignore_merges=True, add_bos=True)
GPT4O = PreTokenizerStyle(_cased_words(r"\p{N}{1,3}", CONTRACTIONS + "?"))
DEEPSEEK_WORDS = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES
ASIAN_SCRIPTS = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    r"\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
DEEPSEEK_V3 = PreTokenizerStyle(
    _matches(
        r"\p{N}{1,3}",
        HAN_AND_KANA,
        DEEPSEEK_WORDS,
    )
)
AFMOE = PreTokenizerStyle(  # digits in threes from the right
    _matches(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", ASIAN_SCRIPTS, DEEPSEEK_WORDS)
)
DEEPSEEK_LLM = PreTokenizerStyle(
    _matches(
        r"[\r\n]",
        rf"\s?{DEEPSEEK_LETTERS}+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        UNCASED_SCRIPTS,
        r"\p{N}",
    )
)
DEEPSEEK_CODER = PreTokenizerStyle(_matches(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", UNCASED_SCRIPTS, r"\p{N}"))
SEED = PreTokenizerStyle(
    _matches(rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}")
)
JAIS2 = PreTokenizerStyle(
    _matches(
        _tiktoken_pattern(
            r"\p{N}{1,3}",
            r"\s*[\r\n]+|" + "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s",
        )
    )
)
LAGUNA = PreTokenizerStyle(_matches(r"\n+", _tiktoken_pattern(r"\p{N}")))
YOUTU = PreTokenizerStyle(
    _matches(
        r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
        rf"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{HAN_AND_KANA}",
        _cased_pattern(r"\p{N}", CONTRACTIONS + "?"),
    ),
    ignore_merges=True,
)
KIMI = PreTokenizerStyle(
    _matches(r"\p{Han}+|" + _cased_pattern(r"\p{N}{1,3}", CONTRACTIONS + "?", r"\p{Han}", after_punctuation=""))
)
AYA = PreTokenizerStyle(
    _matches(r"\d{1,3}(?=(?:\d{3})*\b)", _cased_pattern(r"\p{N}{1,3}", CONTRACTIONS + "?")),
    nfc=True,
)
MINICPM5 = PreTokenizerStyle(_matches(r"\p{N}{1,3}", _tiktoken_pattern(r"\p{N}+")), ignore_merges=True)
VIKING = PreTokenizerStyle(_matches(r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"))

_STYLES: Sequence[tuple[PreTokenizerStyle, str]] = (  # with the names of `tokenizer.ggml.pre`
    (GPT2, "default gpt-2 phi-2 roberta-bpe exaone4 trillion granite-docling gigachat a.x-4.0 mellum"),
    (GPT_NEOX, "mpt olmo modern-bert"),
    (COMMAND_R, "command-r"),
    (STARCODER, "starcoder refact smollm exaone minerva-7b codeshell mellum2"),
    (FALCON, "falcon"),
    (BLOOM, "bloom poro-chat gpt3-finnish"),
    (VIKING, "viking"),
    (DBRX, "dbrx smaug-bpe glm4 chatglm-bpe"),
    (LLAMA3, "llama-bpe llama-v3 llama3 falcon3 pixtral midm-2.0"),
    (STABLELM2, "stablelm2 hunyuan solar-open grok-2 bailingmoe bailingmoe2"),
    (QWEN2, "qwen2 deepseek-r1-qwen megrez kormo f2llmv2"),
    (TEKKEN, "tekken"),
    (GPT4O, "gpt-4o llama4 minimax-m2 kanana2"),
    (DEEPSEEK_V3, "deepseek-v3 hunyuan-dense joyai-llm"),
    (AFMOE, "afmoe"),
    (DEEPSEEK_LLM, "deepseek-llm"),
    (DEEPSEEK_CODER, "deepseek-coder"),
    (SEED, "seed-coder"),
    (JAIS2, "jais-2"),
    (LAGUNA, "laguna"),
    (YOUTU, "youtu"),
    (KIMI, "kimi-k2"),
    (AYA, "tiny_aya"),
    (MINICPM5, "minicpm5"),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizerStyle] = {name: style for style, names in _STYLES for name in names.split()}
