"""The tools of one request, and what the client wants of them."""

from dataclasses import dataclass, field
from typing import Any, Literal

from quire.core.errors import BadRequest
from quire.core.structured import Structured
from quire.text.tools.forced_calls import NamedCallParser, structured_named_call, structured_required_calls
from quire.text.tools.json_parser import JsonToolParser
from quire.text.tools.parser import ToolFormat, ToolParser

ToolChoiceMode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class ToolParams:
    tools: list[dict[str, Any]] = field(default_factory=list)  # {"type": "function", "function": {"name", ...}}
    choice: ToolChoiceMode = "auto"
    name: str = ""  # of the function that has to be called
    parallel: bool = True  # whether several calls may come in one answer

    def __post_init__(self) -> None:
        if self.choice in ("required", "named") and not self.tools:
            raise BadRequest("tool_choice asks for a call, and there are no tools", param="tool_choice")
        names = [tool["function"]["name"] for tool in self.tools]
        if self.choice == "named" and self.name not in names:
            raise BadRequest(
                f"tool_choice names `{self.name}`", f"the tools are {', '.join(names)}", param="tool_choice"
            )
        if len(set(names)) < len(names):
            raise BadRequest("two tools have the same name", param="tools")

    @property
    def active(self) -> bool:
        """Whether the model is told of the tools."""
        return bool(self.tools) and self.choice != "none"

    @property
    def forced(self) -> bool:
        return self.choice in ("required", "named")

    def language(self) -> Structured | None:
        """What a forced call is written in; no other answer can then be drawn."""
        if self.choice == "named":
            return structured_named_call(next(tool for tool in self.tools if tool["function"]["name"] == self.name))
        if self.choice == "required":
            return structured_required_calls(self.tools, self.parallel)
        return None

    def parser(self, form: ToolFormat) -> ToolParser | None:
        """A new one, for one sample."""
        if self.choice == "named":
            return NamedCallParser(self.name)
        if self.choice == "required":
            return JsonToolParser()
        return form.parser() if self.active else None
