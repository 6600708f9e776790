"""A stream of ids gives the same text as all of them at once, and only whole characters."""

import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from quire.text.tokenizers.detokenizer import Detokenizer
from quire.text.tokenizers.token_bytes import byte_level, sentencepiece
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tokenizers.vocabulary import Vocabulary

BYTE_ALPHABET = {
    character: index for index, character in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
}
WORDS = ["<s>", "\u2581page", "page", "\u2581", "\u2581\u2581", "é", "数", "\ufffd", ",", "<b>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def make(style: str) -> Tokenizer:
    """Tokens that are bytes, parts of characters, words, and one that is special."""
    if style == "byte-level":
        ids = BYTE_ALPHABET | {"<s>": 256, "Ġpage": 257, "ð٨": 258}
        token_bytes, special, added = byte_level, 256, {256: "<s>"}
    else:
        ids = {token: index for index, token in enumerate([*WORDS, *BYTES])}
        token_bytes, special, added = sentencepiece, 0, {0: "<s>", 9: "<b>"}
    backend = tokenizers.Tokenizer(models.BPE(ids, []))
    return Tokenizer(
        Vocabulary(
            backend=backend,
            token_bytes=token_bytes,
            strips_space=style == "sentencepiece",
            added=added,
            special_ids=frozenset([special]),
        )
    )


TOKENIZERS = {style: make(style) for style in ("byte-level", "sentencepiece")}
TOKENS = st.lists(st.integers(0, 265), max_size=40)


@pytest.mark.parametrize("style", TOKENIZERS)
@given(ids=TOKENS, sizes=st.lists(st.integers(0, 4), max_size=40), skip=st.booleans())
def test_pieces_joined_are_the_whole(style: str, ids: list[int], sizes: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[style]
    stream, pieces, rest = Detokenizer(tokenizer, skip), [], ids
    for size in sizes:
        pieces.append(stream.push(rest[:size]))
        rest = rest[size:]
    pieces += [stream.push(rest), stream.flush()]
    assert "".join(pieces) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("style", TOKENIZERS)
@given(prompt=TOKENS, ids=TOKENS, skip=st.booleans())
def test_after_a_prompt_it_goes_on_where_the_prompt_ended(
    style: str, prompt: list[int], ids: list[int], skip: bool
) -> None:
    tokenizer = TOKENIZERS[style]
    prompt.append(257 if style == "byte-level" else 2)  # so that the prompt ends in a whole character
    stream = Detokenizer(tokenizer, skip, prompt)
    text = stream.push(ids) + stream.flush()
    assert tokenizer.decode(prompt, skip) + text == tokenizer.decode(prompt + ids, skip)


def test_a_character_comes_when_its_last_byte_does() -> None:
    for tokenizer, of in ((TOKENIZERS["byte-level"], None), (TOKENIZERS["sentencepiece"], "<0x{:02X}>")):
        by_byte = {byte_level(character)[0]: index for character, index in BYTE_ALPHABET.items()}
        ids = [by_byte[byte] if of is None else tokenizer.id_of(of.format(byte)) for byte in "🎉é".encode()]
        stream = Detokenizer(tokenizer)
        assert [stream.push([token]) for token in ids] == ["", "", "", "🎉", "", "é"]
        assert stream.flush() == ""


def test_a_character_that_never_ends_is_replaced() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    stream = Detokenizer(tokenizer)
    assert stream.push([tokenizer.id_of("<0xE6>"), tokenizer.id_of("<0x95>")]) == ""
    assert stream.push([2]) == "\ufffdpage"
    assert stream.push([tokenizer.id_of("<0xE6>")]) == ""
    assert stream.flush() == "\ufffd"


def test_sentencepieces_leading_space() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    assert Detokenizer(tokenizer).push([1, 1]) == "page page"
    assert Detokenizer(tokenizer, prompt_ids_tail=[2, 8]).push([1]) == " page"
    assert Detokenizer(tokenizer, prompt_ids_tail=[0]).push([1]) == "page", "a special token alone is no text"
    assert Detokenizer(tokenizer, skip_special_tokens=False, prompt_ids_tail=[0]).push([1]) == " page"


def test_a_character_begun_in_the_prompt_is_finished() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    begun = [tokenizer.id_of(f"<0x{byte:02X}>") for byte in "é".encode()]
    assert Detokenizer(tokenizer, prompt_ids_tail=[2, begun[0]]).push([begun[1]]) == "é"


def test_the_default_models_tokens(default_model: Path) -> None:
    tokenizer = Tokenizer.load(default_model)
    ids = random.Random(2).choices(range(tokenizer.vocab_size), k=3000)
    stream = Detokenizer(tokenizer)
    assert "".join(stream.push([token]) for token in ids) + stream.flush() == tokenizer.decode(ids)
