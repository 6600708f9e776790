"""Sequence breakers as token ids, against llama.cpp's search written plainly."""

from pathlib import Path

import pytest

from quire.core.errors import BadRequest
from quire.core.params import BREAKERS, SamplingParams
from quire.text import dry_breakers
from quire.text.dry_breakers import DryBreakers
from quire.text.tokenizers.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.load(default_model)


def written_plainly(tokenizer: Tokenizer, text: bytes) -> set[tuple[int, ...]]:
    """Every token that contains the text, and every token that ends with its beginning, with the tokens of its end."""
    sequences = set()
    for token in range(tokenizer.vocab_size):
        word = tokenizer.token_bytes(token)
        if text in word:
            sequences.add((token,))
            continue
        for start in range(len(word)):
            if text.startswith(word[start:]):
                rest = tokenizer.encode(text[len(word) - start :].decode(), add_special_tokens=False)
                sequences.add((token, *rest))
    return sequences


@pytest.mark.parametrize("breaker", [*BREAKERS, "\n\n", "###", "</s>", "User:", "e"])
def test_breakers_are_those_that_llama_cpp_finds(tokenizer: Tokenizer, breaker: str) -> None:
    found = DryBreakers(tokenizer, tokenizer.vocab_size).find([breaker])
    sequences = {(head, *one.tail) for one in found for head in one.heads}
    assert sequences == written_plainly(tokenizer, breaker.encode()) and len(sequences) > 1


def test_tokens_that_are_breakers_alone_are_listed_once(tokenizer: Tokenizer) -> None:
    breakers = DryBreakers(tokenizer, tokenizer.vocab_size)
    (one,) = breakers.find(BREAKERS)
    assert one.tail == [] and one.heads == sorted(set(one.heads))
    assert set(one.heads) == {head for text in BREAKERS for found in breakers.find([text]) for head in found.heads}


def test_breakers_are_searched_for_once_and_not_all_are_remembered(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_breakers, "MAX_CACHED", 2)
    breakers = DryBreakers(tokenizer, tokenizer.vocab_size)
    assert breakers.num_new(["\n", ":"]) == 2
    breakers.find(["\n"])
    assert breakers.num_new(["\n", ":"]) == 1
    breakers.find([":", "*"])
    assert breakers.num_new(["\n"]) == 1


def test_breakers_that_half_the_vocabulary_begins_are_refused(tokenizer: Tokenizer) -> None:
    breakers = DryBreakers(tokenizer, tokenizer.vocab_size)
    with pytest.raises(BadRequest, match="tokens can begin one of the sequence breakers") as refused:
        breakers.find([f"{letter}{number}#" for letter in "aeinrst" for number in range(4)])
    assert refused.value.param == "dry_sequence_breakers"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": ["x" * 41]}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": ["x"] * 33}, "dry_sequence_breakers"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"dry_multiplier": float("nan")}, "dry_multiplier"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n"),
        ({"xtc_probability": 1.1}, "xtc_probability"),
        ({"mirostat": 3}, "mirostat"),
        ({"mirostat_eta": -0.1}, "mirostat_eta"),
        ({"top_n_sigma": 101.0}, "top_n_sigma"),
        ({"dynatemp_range": -1.0}, "dynatemp_range"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"samplers": ["top_k", "infill"]}, "samplers"),
        ({"samplers": ["top_k", "top_k"]}, "samplers"),
        ({"samplers": ["top_k", "dry"]}, "samplers"),
        ({"samplers": "kz"}, "samplers"),
    ],
)
def test_wrong_values_are_refused_by_name(given: dict, field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        SamplingParams(**given)
    assert refused.value.param == field


def test_samplers_are_spelled_as_llama_cpp_spells_them() -> None:
    order = ["penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature"]
    assert SamplingParams(samplers="edskypmxt").samplers == order
    spelled = ["penalties", "dry", "top_n_sigma", "top-k", "typ_p", "nucleus", "min_p", "xtc", "temp"]
    assert SamplingParams(samplers=spelled).samplers == order
    assert SamplingParams(samplers=[]).samplers == []
