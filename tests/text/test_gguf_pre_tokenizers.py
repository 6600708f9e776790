"""Texts are split into words as each family's own tokenizer does, before anything is merged."""

import random
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import transformers

from quire.text.tokenizers.gguf_pre_tokenizers import PRE_TOKENIZERS

DECODE = {chr(256 + index): byte for index, byte in enumerate([*range(33), *range(127, 161), 173])}


@cache
def pre_tokenizer(style: str) -> Any:
    return PRE_TOKENIZERS[style].make()


def words(style: str, text: str) -> list[str]:
    pieces = pre_tokenizer(style).pre_tokenize_str(text)
    return [bytes(DECODE.get(character, ord(character) & 255) for character in piece).decode() for piece, _ in pieces]


@cache
def texts_of_all_scripts(count: int) -> list[str]:
    rng = random.Random(5)
    scripts: dict[int, list[str]] = {}
    for code in range(0x20, 0x20000):
        if unicodedata.category(chr(code)) not in ("Cs", "Cn", "Co"):
            scripts.setdefault(code >> 7, []).append(chr(code))
    common = [
        "'s",
        "'LL",
        "n't",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "\u3000",
        "\u00a0",
        "1",
        "1234567",
        "٣٤",
        "Ⅷ",
        "½",
        "_",
    ]
    common += [
        "/",
        "--",
        "...",
        "！",
        "，",
        "A",
        "aB",
        "ABc",
        "é",
        "e\u0301",
        " The",
        "我",
        "한국",
        "カナ",
        "🙂",
        "👩‍👧",
        "$",
        "<=",
    ]

    def text(script: list[str]) -> str:
        parts = (rng.choice([rng.choice(common), "".join(rng.choices(script, k=3))]) for _ in range(rng.randint(1, 12)))
        return "".join(parts)

    return [text(rng.choice(list(scripts.values()))) for _ in range(count)]


@pytest.mark.parametrize(
    ("style", "make"),
    [
        ("gpt-2", transformers.GPT2Tokenizer),
        ("olmo", transformers.GPTNeoXTokenizer),
        ("mpt", transformers.GPTNeoXTokenizer),
        ("command-r", transformers.CohereTokenizer),
        ("qwen2", transformers.Qwen2Tokenizer),
    ],
)
def test_words_are_those_of_transformers(style: str, make: Callable[[], Any]) -> None:
    theirs, ours = make()._tokenizer, PRE_TOKENIZERS[style]
    assert ours.nfc == (theirs.normalizer is not None), "both compose characters, or neither does"
    for text in texts_of_all_scripts(500):
        assert ours.make().pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text), text


@pytest.mark.parametrize(
    ("styles", "text", "expected"),
    [
        ("deepseek-llm", "I'LL\n\n 12 a.Bé！x 漢字한 x", "I|'|LL|\n|\n| |1|2| a|.|B|é|！|x| |漢字한| x"),
        ("deepseek-llm", "Яñ ab\u0561 \u10d0  ", "Яñ| ab|\u0561 |\u10d0|  "),
        ("deepseek-coder", "I'LL\n\n 12 a.B+é x", "I|'|LL|\n|\n| |1|2| a|.|B|+|é| x"),
        ("glm4 chatglm-bpe", "I'LL pay 12345!!\n\n x", "I|'LL| pay| |123|45|!!\n\n| x"),
        ("exaone4", "I'LL pay 12345!!\n\n x", "I|'|LL| pay| 12345|!!|\n\n| x"),
        ("exaone", "I'LL pay 12!!", "I|'|LL| pay| |1|2|!!"),
        ("hunyuan solar-open grok-2 bailingmoe bailingmoe2", "I'LL pay 12!!\n\n x", "I|'LL| pay| |1|2|!!\n\n| x"),
        ("hunyuan-dense joyai-llm", "a.LL か漢字x 12345!\n x", "a|.LL| |か漢字|x| |123|45|!\n| x"),
        ("minimax-m2 kanana2", "I'LL payMe 12345!/\n x", "I'LL| pay|Me| |123|45|!/\n| x"),
        ("seed-coder", "I'LL pay 12!!\n\n x", "I|'LL| pay| |1|2|!!|\n\n| x"),
        ("jais-2", "a" + " " * 7 + "b 1234", "a|    |  | b| |123|4"),
        ("youtu", "I'LL 12 한글，「漢字か」 aB", "I'LL| |1|2| |한글|，「|漢字か|」| a|B"),
        ("kimi-k2", "I'LL 漢字x1234!/か漢", "I'LL| |漢字|x|123|4|!/|か|漢"),
        ("afmoe", "in 1234567 か漢x of 12", "in| |1|234|567| |か漢|x| of| |12"),
        ("tiny_aya", "pay 1234567x 12", "pay| |123|456|7|x| |12"),
        ("minicpm5", "pay 12345!!\n", "pay| |123|45|!!\n"),
        ("viking", "pay 12, x", "pay| |1|2|,| x"),
    ],
)
def test_words_of_families_without_a_class_in_transformers(styles: str, text: str, expected: str) -> None:
    for style in styles.split():
        assert words(style, text) == expected.split("|"), style


def test_no_style_loses_a_character() -> None:
    for style in PRE_TOKENIZERS:
        for text in texts_of_all_scripts(20):
            assert "".join(words(style, text)) == text
