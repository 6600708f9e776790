"""From the body of an HTTP request to the token ids of its prompt, as a server of the model makes them."""

from contextlib import suppress

from quire.client.prompt import Prompter
from quire.client.service import ModelInfo
from quire.core.errors import QuireError
from quire.hub import resolve_model
from quire.server.dialects import reader_of, readers
from quire.server.dialects.dialect import Context
from quire.text.tokenizers.segments import SegmentedTokenizer
from quire.text.tokenizers.tokenizer import Tokenizer

FIRST_CHAT = b'{"messages": [{"role": "user", "content": "Hello"}]}'  # compiles the template before a client waits
UNBOUNDED = 1 << 30  # tokens: the server refuses what is too long


class PromptReader:
    """Chats and completions, in every dialect whose path names no model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        info = ModelInfo("", UNBOUNDED, UNBOUNDED, 0, 0, 0, 0)
        self._context = Context(info, tokenizer)
        self._prompter = Prompter(tokenizer, UNBOUNDED, UNBOUNDED)
        self._readers = readers()

    @classmethod
    def load(cls, model: str) -> "PromptReader":
        """`model`: a directory, a .gguf file, a hub repository or an alias. Raises QuireError."""
        reader = cls(SegmentedTokenizer.load(resolve_model(model).path))
        with suppress(QuireError):  # a model may have no chat template
            reader.ids("/v1/chat/completions", FIRST_CHAT)
        return reader

    def ids(self, path: str, body: bytes) -> list[int]:
        """The ids of a body's first prompt. Raises QuireError for a body that the server would refuse."""
        if (several := self._readers.get(path)) is None:
            return []
        _, parse = reader_of(body, several)
        return self._prompter.encode(parse(body, self._context).requests[0])
