"""RWKV's tokenizer: the longest token at each place, from its own file and from GGUF."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from quire.core.errors import BadCheckpoint
from quire.text.tokenizers.longest_match import WORLD_FILE
from quire.text.tokenizers.tokenizer import Tokenizer
from weights.gguf_files import finish

WORDS = ["\n\n", " the", " then", " there", "quire", "it's", "a \"b\" 'c'", "数", "页"]
PARTS = [b"\xe6\x95", b"\xf0\x9f\x98"]  # of characters
TOKENS = [b"", *(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS), *PARTS]
TEXTS = ["", "the then therefore", "A quire, it's\n\n 12 pages", "数页数", "😀 \\x41 \\n", 'a "b" \'c\' a "b"']


def longest(text: str) -> list[int]:
    """By trying every token."""
    data, ids = text.encode(), []
    while data:
        best = max((token for token in TOKENS if token and data.startswith(token)), key=len)
        ids.append(TOKENS.index(best))
        data = data[len(best) :]
    return ids


def from_file(folder: Path) -> Tokenizer:
    lines = []
    for index, token in enumerate(TOKENS[1:], 1):
        try:
            written = repr(token.decode())
        except UnicodeDecodeError:
            written = repr(token)
        lines.append(f"{index} {written} {len(token)}")
    (folder / WORLD_FILE).write_text("\n".join(lines) + "\n")
    (folder / "config.json").write_text('{"architectures": ["RWKV7ForCausalLM"], "eos_token_id": 0}')
    (folder / "model.safetensors").write_bytes(b"")
    return Tokenizer.load(folder)


def from_gguf(folder: Path) -> Tokenizer:
    writer = gguf.GGUFWriter(folder / "model.gguf", "rwkv7")
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(["<s>", *(repr(token)[2:-1] for token in TOKENS[1:]), "[PAD268]"])
    writer.add_token_types([3, *[1] * (len(TOKENS) - 1), 5])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(257)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    return Tokenizer.load(finish(writer, folder / "model.gguf"))


@pytest.mark.parametrize("load", [from_file, from_gguf])
def test_texts_are_cut_into_the_longest_tokens_and_back(load, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tokenizer = load(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == longest(text)
        assert tokenizer.decode(ids) == text
    assert [tokenizer.token_bytes(token) for token in range(1, len(TOKENS))] == TOKENS[1:]
    assert 0 in tokenizer.eos_ids and tokenizer.decode([0, 65]) == "@"
    assert tokenizer.id_of("\\n\\n") == 257 and tokenizer.id_of("<s>") == 0


@pytest.mark.parametrize("line", ["1 'a'", "2 'a' 1", "1 'a' 2", "1 __import__('os') 1", "1 a 1"])
def test_a_damaged_file_is_refused_by_its_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / WORLD_FILE).write_text(line)
    with pytest.raises(BadCheckpoint, match="line 1 is not the id 1"):
        Tokenizer.load(tmp_path)


def test_every_byte_must_be_a_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / WORLD_FILE).write_text("1 'a' 1")
    with pytest.raises(BadCheckpoint, match="no token of the byte 0"):
        Tokenizer.load(tmp_path)
