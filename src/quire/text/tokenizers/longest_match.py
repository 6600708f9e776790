"""RWKV's tokenizer: at each place of a text, the longest token whose bytes stand there. All single bytes are tokens."""

import ast
import re
from collections.abc import Sequence
from pathlib import Path

from quire.core.errors import BadCheckpoint
from quire.text.tokenizers.piece_backends import PieceEncoding

WORLD_FILE = "rwkv_vocab_v20230424.txt"
MAX_FILE_BYTES = 64 << 20
_LITERAL = re.compile(r"""b?('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")  # a string or bytes, as Python writes them
END = "<s>"  # token 0, which begins and ends texts


def escaped_bytes(token: str) -> bytes:
    """The bytes of a token that is written as Python writes them: `\\xe4\\xbd`."""
    try:
        return token.encode().decode("unicode_escape").encode("latin-1")
    except UnicodeError:
        return token.encode()


class LongestMatch:
    """`tokens`: the bytes of each, which may be empty: such a token is never in a text."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens
        self._ids = {token: index for index, token in enumerate(tokens) if token}
        lengths: dict[bytes, set[int]] = {}  # of tokens, by their first two bytes
        for token in self._ids:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        if missing := [byte for byte in range(256) if bytes([byte]) not in self._ids]:
            raise BadCheckpoint(f"the vocabulary has no token of the byte {missing[0]}")

    def encode(self, text: str, add_special_tokens: bool) -> PieceEncoding:
        assert not add_special_tokens, "the tokenizer adds special tokens itself"
        data, place, ids = text.encode(), 0, []
        while place < len(data):
            for length in self._lengths.get(data[place : place + 2], ()):
                found = self._ids.get(data[place : place + length])
                if found is not None:
                    break
            else:
                found, length = self._ids[data[place : place + 1]], 1
            ids.append(found)
            place += length
        return PieceEncoding(ids)

    def get_vocab_size(self) -> int:
        return len(self._tokens)

    def token_to_id(self, token: str) -> int | None:
        return 0 if token == END else self._ids.get(escaped_bytes(token))

    def id_to_token(self, token: int) -> str | None:
        if token == 0:
            return END
        return repr(self._tokens[token])[2:-1] if 0 < token < len(self._tokens) else None


def read_world_file(path: Path) -> list[bytes]:
    """Lines of an id, the token as Python writes it, and its length. -> the bytes of each id; 0 is not listed"""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise BadCheckpoint(f"{path} has more than {MAX_FILE_BYTES} bytes")
    tokens = {0: b""}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        index, _, rest = line.partition(" ")
        written, _, length = rest.rpartition(" ")
        try:
            token = ast.literal_eval(written) if _LITERAL.fullmatch(written) else None
            token = token.encode() if isinstance(token, str) else token
            if not isinstance(token, bytes) or len(token) != int(length) or int(index) != len(tokens):
                raise ValueError
        except (ValueError, SyntaxError) as error:
            raise BadCheckpoint(f"{path}: line {number} is not the id {len(tokens)}, a token and its length") from error
        tokens[int(index)] = token
    return list(tokens.values())
