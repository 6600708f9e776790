"""Tokens of parts between special tokens are remembered, and are those of the whole text."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from quire.text.tokenizers import segments
from quire.text.tokenizers.segments import SegmentedTokenizer, special_cuts
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tokenizers.vocabulary import Vocabulary

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|im"]
PARTS = st.sampled_from([*SPECIAL, " ", "\n", "user", "hello world", "a", "▁", "é", "  two", "<|", "im_end|>", "ab"])
TEXTS = st.lists(PARTS, max_size=12).map("".join)


def bpe(**added: bool) -> tokenizers.Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("a", "b"), ("u", "s"), ("us", "e"), ("use", "r")]
    vocabulary = {
        token: number for number, token in enumerate([*sorted(alphabet), *("".join(pair) for pair in merges)])
    }
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True, **added) for token in SPECIAL])
    return made


def with_prefix_space() -> tokenizers.Tokenizer:
    made = bpe()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.normalizer = normalizers.NFC()
    return made


def wrapped(backend: tokenizers.Tokenizer) -> tuple[SegmentedTokenizer, Tokenizer]:
    added = {token: entry.content for token, entry in backend.get_added_tokens_decoder().items()}
    vocabulary = Vocabulary(
        backend=backend,
        token_bytes=lambda token: b"",
        strips_space=False,
        added=added,
        special_ids=frozenset(added),  # type: ignore[arg-type]
    )
    return SegmentedTokenizer(vocabulary), Tokenizer(vocabulary)


@given(st.lists(TEXTS, min_size=1, max_size=4), st.booleans())
@settings(max_examples=100, deadline=None)
def test_tokens_are_those_of_the_whole_text(texts: list[str], prefix_space: bool) -> None:
    """Also when parts were seen before."""
    segmented, plain = wrapped(with_prefix_space() if prefix_space else bpe())
    assert segmented._cuts is not None
    for text in [*texts, *texts]:
        assert segmented.encode(text) == plain.encode(text)


@given(st.lists(TEXTS, min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_so_are_those_of_the_default_model(default_model: Path, texts: list[str]) -> None:
    segmented, plain = _default(default_model)
    for text in texts:
        assert segmented.encode(text) == plain.encode(text)


_made: list[tuple[SegmentedTokenizer, Tokenizer]] = []


def _default(model: Path) -> tuple[SegmentedTokenizer, Tokenizer]:
    if not _made:
        segmented = SegmentedTokenizer.load(model)
        assert isinstance(segmented, SegmentedTokenizer) and segmented._cuts is not None
        _made.append((segmented, Tokenizer.load(model)))
    return _made[0]


def test_where_parts_depend_on_each_other_nothing_is_cut() -> None:
    assert special_cuts(bpe(lstrip=True)) is None and special_cuts(bpe(rstrip=True)) is None
    assert special_cuts(bpe(single_word=True)) is None
    first = bpe()
    first.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    assert special_cuts(first) is None


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_CHARACTERS", 20)
    segmented, plain = wrapped(bpe())
    for number in range(50):
        text = f"hello {number}<|im_end|>hello"
        assert segmented.encode(text) == plain.encode(text)
        assert sum(map(len, segmented._known)) == segmented._num_characters <= 20
