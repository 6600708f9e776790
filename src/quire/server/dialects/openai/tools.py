"""Tools as chat clients send them, and tool calls as they get them."""

from typing import Any, Literal
from uuid import uuid4

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quire.core.errors import BadRequest
from quire.text.tools.params import ToolParams
from quire.text.tools.parser import CallDelta


class Function(Struct, kw_only=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # forced calls follow the schema either way; others are the model's own words


class Tool(Struct, kw_only=True):
    type: str
    function: Function | None = None


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


def tool_use(tools: list[Tool] | None, choice: str | NamedTool | None, parallel: bool | None) -> ToolParams:
    plain = [_plain(tool, f"tools[{at}]") for at, tool in enumerate(tools or ())]
    several = parallel is not False
    if isinstance(choice, NamedTool):
        if choice.type == "allowed_tools" and (allowed := choice.allowed_tools) is not None:
            names = [tool.function.name if tool.function else "" for tool in allowed.tools]
            return some_tools(plain, names, allowed.mode, several)
        if choice.type != "function" or choice.function is None:
            raise BadRequest(
                f"tool_choice of type `{choice.type}` is not supported", "name a function", param="tool_choice"
            )
        return ToolParams(plain, "named", choice.function.name, several)
    return ToolParams(plain, as_choice(choice), parallel=several)


def some_tools(
    plain: list[dict[str, Any]], names: list[str], mode: Literal["auto", "required"], several: bool
) -> ToolParams:
    """The model is told of those named, and of no others."""
    known = {tool["function"]["name"]: tool for tool in plain}
    for name in names:
        if name not in known:
            raise BadRequest(f"tool_choice allows `{name}`", f"the tools are {', '.join(known)}", param="tool_choice")
    return ToolParams([tool for name, tool in known.items() if name in names], mode, parallel=several)


def as_choice(choice: str | None) -> Literal["none", "auto", "required"]:
    if choice in ("none", "auto", "required"):
        return choice  # type: ignore[return-value]
    if choice is None:
        return "auto"
    raise BadRequest(f"tool_choice is `{choice}`", "give none, auto, required, or name a function", param="tool_choice")


def _plain(tool: Tool, where: str) -> dict[str, Any]:
    if tool.type != "function":
        raise BadRequest(f"a tool of type `{tool.type}` is not supported", "give functions", param=f"{where}.type")
    if tool.function is None:
        raise BadRequest(f"{where} has no function", param=f"{where}.function")
    if not tool.function.name:
        raise BadRequest(f"{where} has no name", param=f"{where}.function.name")
    return {"type": "function", "function": msgspec.to_builtins(tool.function)}


class FunctionGain(Struct):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallGain(Struct, kw_only=True):
    """A call in a full answer, or what one gained in a chunk: then with its index, and id and name the first time."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionGain


def gain_of(delta: CallDelta, short_ids: bool) -> ToolCallGain:
    gained = ToolCallGain(index=delta.index, function=FunctionGain(arguments=delta.arguments))
    if delta.name:
        gained.id, gained.type, gained.function.name = new_call_id(short_ids), "function", delta.name
    return gained


def folded(deltas: list[CallDelta], short_ids: bool) -> list[ToolCallGain]:
    """The calls of a full answer."""
    calls: list[ToolCallGain] = []
    for delta in deltas:
        if delta.name:
            calls.append(gain_of(delta, short_ids))
            calls[-1].index = UNSET
        else:
            calls[delta.index].function.arguments += delta.arguments
    return calls


def new_call_id(short: bool) -> str:
    """`short`: as Mistral's templates insist on."""
    return uuid4().hex[:9] if short else f"call_{uuid4().hex[:24]}"
