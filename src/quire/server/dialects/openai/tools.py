"""Tools as chat clients send them, and tool calls as they get them."""

from typing import Any, Literal
from uuid import uuid4

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quire.core.errors import BadRequest
from quire.text.tools.call import CallDelta
from quire.text.tools.use import ToolUse


class FunctionDefinition(Struct, kw_only=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # forced calls follow the schema either way; others are the model's own words


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
    """Of the tools, those that may be called this time."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool]


def tool_use(tools: list[ToolDefinition] | None, choice: str | NamedTool | None, parallel: bool | None) -> ToolUse:
    plain = [_plain(tool, f"tools[{at}]") for at, tool in enumerate(tools or ())]
    several = parallel is not False
    if isinstance(choice, NamedTool):
        if choice.type == "allowed_tools" and (allowed := choice.allowed_tools) is not None:
            names = [tool.function.name if tool.function else "" for tool in allowed.tools]
            return allowed_tool_use(plain, names, allowed.mode, several)
        if choice.type != "function" or choice.function is None:
            raise BadRequest(
                f"tool_choice of type `{choice.type}` is not supported", "name a function", param="tool_choice"
            )
        return ToolUse(plain, "named", choice.function.name, several)
    return ToolUse(plain, parse_tool_choice(choice), parallel=several)


def allowed_tool_use(
    plain: list[dict[str, Any]], names: list[str], mode: Literal["auto", "required"], several: bool
) -> ToolUse:
    """The model is told of those named, and of no others."""
    known = {tool["function"]["name"]: tool for tool in plain}
    for name in names:
        if name not in known:
            raise BadRequest(f"tool_choice allows `{name}`", f"the tools are {', '.join(known)}", param="tool_choice")
    return ToolUse([tool for name, tool in known.items() if name in names], mode, parallel=several)


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


class FunctionDelta(Struct):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(Struct, kw_only=True):
    """A call in a full answer, or what one gained in a chunk: then with its index, and id and name the first time."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


def tool_call_delta(delta: CallDelta, short_ids: bool) -> ToolCallDelta:
    gained = ToolCallDelta(index=delta.index, function=FunctionDelta(arguments=delta.arguments))
    if delta.name:
        gained.id, gained.type, gained.function.name = new_call_id(short_ids), "function", delta.name
    return gained


def merge_tool_calls(deltas: list[CallDelta], short_ids: bool) -> list[ToolCallDelta]:
    """The calls of a full answer."""
    calls: list[ToolCallDelta] = []
    for delta in deltas:
        if delta.name:
            calls.append(tool_call_delta(delta, short_ids))
            calls[-1].index = UNSET
        else:
            calls[delta.index].function.arguments += delta.arguments
    return calls


def new_call_id(short: bool) -> str:
    """`short`: as Mistral's templates insist on."""
    return uuid4().hex[:9] if short else f"call_{uuid4().hex[:24]}"
