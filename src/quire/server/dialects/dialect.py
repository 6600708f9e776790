"""What a dialect of HTTP has to say about itself. Adding one means one file here and one line in the registry."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec
from starlette.routing import Route

from quire.client.generate_request import GenerateRequest
from quire.core.errors import QuireError
from quire.server.dialects.completion import Completion
from quire.server.http.body import decode
from quire.server.options import ServerOptions
from quire.text.chat.chat_format import ChatFormat, chat_format
from quire.text.event import TextEvent

if TYPE_CHECKING:
    from quire.client.service import ModelInfo
    from quire.server.app_state import AppState
    from quire.text.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Context:
    """What a dialect may look at while it reads a body."""

    info: "ModelInfo"
    tokenizer: "Tokenizer"
    tenant: str = ""
    model: str = ""  # as the client called it: the model's name, or that of an adapter of it
    options: ServerOptions = field(default_factory=ServerOptions)

    def chat_format(self) -> ChatFormat:
        """How the model thinks and calls tools."""
        template = self.tokenizer.chat_template or ""
        return chat_format(template, self.options.tool_call_parser, self.options.reasoning_parser)


class Call(Protocol):
    """One HTTP request, understood: what to generate, and how to tell the client what came of it."""

    requests: list[GenerateRequest]  # one for each prompt
    stream: bool

    def begin(self, prompts: list[list[int]]) -> None:
        """All prompts were accepted; these are their ids."""

    def chunks(self, prompt: int, event: TextEvent) -> list[object]:
        """What to send when the `prompt`-th request gained something."""

    def end(self) -> list[object]:
        """What to send when all of them have ended."""

    def full(self, completions: list[Completion]) -> object:
        """The answer that is not streamed."""


class _Named(msgspec.Struct):
    """The one field that says who is to read the others."""

    model: str | None = None


_named = msgspec.json.Decoder(_Named)


# What Hugging Face's client calls the model when its user has named none.
_NAMELESS = frozenset({"dummy", "tgi"})


def model_field(body: bytes) -> str | None:
    name = decode(body, _named).model
    return None if name in _NAMELESS else name


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    routes: Mapping[str, Callable[[bytes, Context], Call]]  # path -> how to read a body posted there
    error: Callable[[QuireError], object]
    frame: Callable[[object], bytes]  # one streamed object, as bytes on the wire
    status: Callable[[QuireError], int] = lambda error: error.status
    model: Callable[[bytes], str | None] = model_field  # which model a body asks for; None: the first one
    media_type: str = "text/event-stream"
    json_only: bool = True  # a body whose Content-Type is not JSON is refused
    last: bytes = b""  # sent after a stream that went well
    idle: bytes = b""  # sent when a stream was silent for long, and passed over by clients
    below: str = ""  # paths that begin so are its own, those that do not exist among them
    pages: Callable[["AppState"], list[Route]] = lambda state: []  # what is answered without generating
