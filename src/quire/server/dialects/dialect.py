"""The interface of a dialect. A new dialect is one package here and one line in the registry."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec
from starlette.routing import Route

from quire.client.generate_request import GenerateRequest
from quire.server.dialects.completion import Completion
from quire.server.http.body import decode
from quire.server.http.wire_format import WireFormat
from quire.server.options import ServerOptions
from quire.text.answer_parser import AnswerParser
from quire.text.chat.chat_format import ChatFormat, chat_format
from quire.text.event import TextEvent
from quire.text.reasoning.before_answer import prompt_tail, thinking_before_answer
from quire.text.tools.params import ToolParams

if TYPE_CHECKING:
    from quire.client.service import ModelInfo
    from quire.server.app_state import AppState
    from quire.text.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Context:
    """What a dialect knows while it parses a body."""

    info: "ModelInfo"
    tokenizer: "Tokenizer"
    tenant: str = ""
    model: str = ""  # the name the client used: the model's, or an adapter's
    options: ServerOptions = field(default_factory=ServerOptions)
    chat_template: str | None = None  # the request's own

    def chat_format(self) -> ChatFormat:
        """How the model writes reasoning and tool calls."""
        template = self.chat_template or self.tokenizer.chat_template or ""
        return chat_format(template, self.options.tool_call_parser, self.options.reasoning_parser)

    def answer_parser(self, request: GenerateRequest, use: ToolParams, prompt_ids: list[int]) -> AnswerParser:
        """For one sample of `request`. The end of the prompt tells whether the answer begins with reasoning."""
        form, is_structured = self.chat_format(), request.params.structured is not None
        if form.reasoning is None:
            return form.reader(use, thinks=not is_structured) or AnswerParser()
        thinks = not is_structured
        if is_structured and not request.params.enable_in_reasoning:
            given = form.reasoning, prompt_ids, request.template_options, self.tokenizer, self.info.vocab_size
            thinks = thinking_before_answer(*given) is not None
        return form.reader(use, prompt_tail(prompt_ids, self.tokenizer), thinks, is_structured) or AnswerParser()


class Call(Protocol):
    """One parsed HTTP request: what to generate, and how to write the output for the client."""

    requests: list[GenerateRequest]  # one for each prompt
    stream: bool

    def begin(self, prompts: list[list[int]]) -> None:
        """All prompts were accepted; these are their ids."""

    def chunks(self, prompt: int, event: TextEvent) -> list[object]:
        """The objects to stream for an event of the `prompt`-th request. Bytes are sent as they are: a frame."""

    def end(self) -> list[object]:
        """The objects to stream after the last event."""

    def full(self, completions: list[Completion]) -> object:
        """The response that is not streamed."""


class _ModelField(msgspec.Struct):
    """The one field that is needed before the rest of a body can be parsed."""

    model: str | None = None


_decoder = msgspec.json.Decoder(_ModelField)

_PLACEHOLDERS = frozenset({"dummy", "tgi"})  # what Hugging Face's client sends when its user names no model


def model_field(body: bytes) -> str | None:
    name = decode(body, _decoder).model
    return None if name in _PLACEHOLDERS else name


Parse = Callable[[bytes, Context], Call]


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    parsers: Mapping[str, Parse]  # path -> parser of the bodies posted there; a parameter `model` names the model
    wire: WireFormat
    # Whether a body at a path that another dialect has, too, is of this one; the last dialect takes all others.
    claims: Callable[[bytes], bool] = lambda body: True
    model: Callable[[bytes], str | None] = model_field  # the model that a body asks for; None: the first one
    json_only: bool = True  # a body whose Content-Type is not JSON is refused
    path_prefix: str = ""  # unknown paths below it are answered in this dialect
    routes: Callable[["AppState"], list[Route]] = lambda state: []  # routes that do not generate


Reader = tuple[Dialect, Parse]
