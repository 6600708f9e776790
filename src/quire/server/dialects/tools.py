"""Tools as clients of OpenAI define them, and the choice among them."""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from quire.core.errors import BadRequest
from quire.text.tools.params import ToolParams


class FunctionDefinition(Struct, kw_only=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # only forced calls follow the schema, with or without it


class ToolDefinition(Struct, kw_only=True):
    type: str
    function: FunctionDefinition | None = None


class FunctionName(Struct):
    name: str


class NamedTool(Struct, kw_only=True):
    type: str = "function"
    function: FunctionName | None = None
    allowed_tools: "AllowedTools | None" = None


class AllowedTools(Struct, kw_only=True):
    """The tools that may be called in this turn."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool]


def tool_use(tools: list[ToolDefinition] | None, choice: str | NamedTool | None, parallel: bool | None) -> ToolParams:
    plain = [_plain(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    several = parallel is not False
    if isinstance(choice, NamedTool):
        if choice.type == "allowed_tools" and (allowed := choice.allowed_tools) is not None:
            names = [tool.function.name if tool.function else "" for tool in allowed.tools]
            return allowed_tool_use(plain, names, allowed.mode, several)
        if choice.type != "function" or choice.function is None:
            raise BadRequest(
                f"tool_choice of type `{choice.type}` is not supported", "name a function", param="tool_choice"
            )
        return ToolParams(plain, "named", choice.function.name, several)
    return ToolParams(plain, parse_tool_choice(choice), parallel=several)


def allowed_tool_use(
    plain: list[dict[str, Any]], names: list[str], mode: Literal["auto", "required"], several: bool
) -> ToolParams:
    """Only the named tools are shown to the model."""
    known = {tool["function"]["name"]: tool for tool in plain}
    allowed = set(names)
    for name in names:
        if name not in known:
            raise BadRequest(f"tool_choice allows `{name}`", f"the tools are {', '.join(known)}", param="tool_choice")
    return ToolParams([tool for name, tool in known.items() if name in allowed], mode, parallel=several)


def parse_tool_choice(choice: str | None) -> Literal["none", "auto", "required"]:
    if choice in ("none", "auto", "required"):
        return choice  # type: ignore[return-value]
    if choice is None:
        return "auto"
    raise BadRequest(f"tool_choice is `{choice}`", "give none, auto, required, or name a function", param="tool_choice")


def _plain(tool: ToolDefinition, where: str) -> dict[str, Any]:
    if tool.type != "function":
        raise BadRequest(f"a tool of type `{tool.type}` is not supported", "give functions", param=f"{where}.type")
    if tool.function is None:
        raise BadRequest(f"{where} has no function", param=f"{where}.function")
    if not tool.function.name:
        raise BadRequest(f"{where} has no name", param=f"{where}.function.name")
    return {"type": "function", "function": msgspec.to_builtins(tool.function)}
