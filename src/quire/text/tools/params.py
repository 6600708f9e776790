"""The tools of one request, and how the model may use them."""

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
    name: str = ""  # the function to call, if the choice is "named"
    parallel: bool = True  # whether one completion may have several calls

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
        """Whether the prompt describes the tools."""
        return bool(self.tools) and self.choice != "none"

    @property
    def forced(self) -> bool:
        return self.choice in ("required", "named")

    def structured(self) -> Structured | None:
        """The structured output that forces a call; None if no call is forced."""
        if self.choice == "named":
            return structured_named_call(next(tool for tool in self.tools if tool["function"]["name"] == self.name))
        if self.choice == "required":
            return structured_required_calls(self.tools, self.parallel)
        return None

    def parser(self, tool_format: ToolFormat | None) -> ToolParser | None:
        """A new parser for one completion; None if it can have no calls. Forced calls need no format."""
        if self.choice == "named":
            return NamedCallParser(self.name)
        if self.choice == "required":
            return JsonToolParser()
        if tool_format is None or not self.active:
            return None
        return tool_format.parser({tool["function"]["name"]: tool["function"].get("parameters") for tool in self.tools})
