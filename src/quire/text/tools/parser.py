"""The interface of tool parsers: they split a completion into text for the user and tool calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Schemas = Mapping[str, Any]  # the parameters of each tool, by its name


@dataclass(slots=True)
class CallDelta:
    """The next piece of one call. The first delta of a call has the name, and no other has."""

    index: int  # of the call in the completion
    name: str = ""
    arguments: str = ""  # JSON
    id: str = ""  # beside the name, where the model writes ids


@dataclass(slots=True)
class ToolParserOutput:
    """What a parser made of a piece of text."""

    content: str = ""  # for the user
    calls: list[CallDelta] = field(default_factory=list)


class ToolParser(Protocol):
    """Parses one completion. Its outputs, joined, do not depend on how the text was cut into pieces."""

    def push(self, text: str) -> ToolParserOutput: ...

    def flush(self) -> ToolParserOutput:
        """The text has ended. A call that was begun and not recognized becomes content."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes its calls."""

    parser: Callable[[Schemas], ToolParser]
    template_markers: tuple[str, ...]  # a chat template with any of these belongs to this format
    begins: tuple[str, ...] = ()  # what opens calls in the text; none: a completion is calls or it is not
    special: bool = False  # its markers are special tokens, so they must not be skipped by the detokenizer
    stops: tuple[str, ...] = ()  # special tokens that end a completion with calls, whether or not the model says so
    short_ids: bool = False  # its template accepts only call ids of nine characters
    function_ids: bool = False  # its template shows ids, which are `functions.name:number`
    write: Callable[[list[dict[str, Any]]], str] | None = None  # for templates that leave out the calls of a message
    json_end: str | None = None  # calls are JSON between `begins` and this; None: they are something else
