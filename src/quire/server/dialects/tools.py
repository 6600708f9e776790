"""Tools as clients of OpenAI define them, and the choice among them."""

import re
from typing import Any, Literal

import msgspec
from msgspec import Struct

from quire.core.errors import BadRequest
from quire.server.access.request_context import note_ignored
from quire.server.dialects.custom_tools import CustomDefinition, custom_function
from quire.text.tools.params import ToolParams

# Tools that run at OpenAI, or whose schema only its models know. A model without them answers all the same.
_HOSTED = {"web_search", "web_search_preview", "image_generation", "code_interpreter", "computer"}
_HOSTED |= {"computer_use_preview", "local_shell", "shell", "apply_patch", "tool_search", "programmatic_tool_calling"}
_DATA = ("mcp", "file_search")  # an answer without what they find would be made up
_DATED = re.compile(r"_20[0-9]{2}_[0-9]{2}_[0-9]{2}\Z")


class FunctionDefinition(Struct, kw_only=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # forced calls follow the schema, with or without it


class ToolDefinition(Struct, kw_only=True):
    type: str
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None


class ToolName(Struct):
    name: str


class NamedTool(Struct, kw_only=True):
    type: str = "function"
    function: ToolName | None = None
    custom: ToolName | None = None
    allowed_tools: "AllowedTools | None" = None

    @property
    def name(self) -> str:
        named = self.function or self.custom
        return named.name if named else ""


class AllowedTools(Struct, kw_only=True):
    """The tools that may be called in this turn."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool]


def is_hosted(kind: str) -> bool:
    return _DATED.sub("", kind) in _HOSTED


def left_out(kind: str, where: str) -> bool:
    """Whether a tool of this type is left out, which the client is told. Unknown types are refused."""
    if kind in ("function", "custom"):
        return False
    if not is_hosted(kind):
        hint = "this server does not reach its data: give functions" if kind in _DATA else "give functions"
        raise BadRequest(f"a tool of type `{kind}` is not supported", hint, param=f"{where}.type")
    note_ignored(f"{where} ({kind})")
    return True


def tool_use(tools: list[ToolDefinition] | None, choice: str | NamedTool | None, parallel: bool | None) -> ToolParams:
    plain = [
        _plain(tool, f"tools[{index}]")
        for index, tool in enumerate(tools or ())
        if not left_out(tool.type, f"tools[{index}]")
    ]
    several = parallel is not False
    if isinstance(choice, NamedTool):
        if choice.type == "allowed_tools" and (allowed := choice.allowed_tools) is not None:
            names = [tool.name for tool in allowed.tools if not is_hosted(tool.type)]
            return allowed_tool_use(plain, names, allowed.mode, several)
        if choice.type not in ("function", "custom") or not choice.name:
            raise not_a_choice(choice.type)
        return ToolParams(plain, "named", choice.name, several)
    return ToolParams(plain, parse_tool_choice(choice), parallel=several)


def not_a_choice(kind: str) -> BadRequest:
    return BadRequest(f"tool_choice of type `{kind}` is not supported", "name a function", param="tool_choice")


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
    defined = tool.custom if tool.type == "custom" else tool.function
    if defined is None:
        raise BadRequest(f"{where} has no {tool.type}", param=f"{where}.{tool.type}")
    if not defined.name:
        raise BadRequest(f"{where} has no name", param=f"{where}.{tool.type}.name")
    if isinstance(defined, CustomDefinition):
        return custom_function(defined)
    return {"type": "function", "function": msgspec.to_builtins(defined)}
