"""What a parser of tool calls is, and what it finds."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class CallDelta:
    """What one call gained. The first delta of a call has its name, and only that one."""

    index: int  # which call of the answer
    name: str = ""
    arguments: str = ""  # JSON, as the model wrote it


@dataclass(slots=True)
class ToolParserOutput:
    """What was found in a piece of text: text for the user, and calls."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ToolParser(Protocol):
    """Reads one sample. The pieces may be cut anywhere; what is found, taken together, does not depend on where."""

    def push(self, text: str) -> ToolParserOutput: ...

    def flush(self) -> ToolParserOutput:
        """The text has ended. What began like a call and never became one is content."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes its calls."""

    parser: Callable[[], ToolParser]
    signs: tuple[str, ...]  # any of these in a chat template tells that its model writes so
    keep_special: bool = False  # its markers are special tokens, which would be left out of the text
    short_ids: bool = False  # its template wants ids of nine letters
