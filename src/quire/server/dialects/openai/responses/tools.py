"""The tools of a response: functions, custom tools, and both in namespaces."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Struct

from quire.core.errors import BadRequest
from quire.server.dialects.custom_tools import CustomDefinition, CustomFormat, custom_function
from quire.server.dialects.tools import allowed_tool_use, is_hosted, left_out, not_a_choice, parse_tool_choice
from quire.text.tools.params import ToolParams


class ResponseTool(Struct, kw_only=True, omit_defaults=True):
    """A function, a custom tool, or a namespace of them. Tools that OpenAI itself would run are left out."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None  # of a custom tool
    tools: "list[ResponseTool] | None" = None  # of a namespace


class NamedResponseTool(Struct, kw_only=True, omit_defaults=True):
    """A tool that must be called, or with the type `allowed_tools`, the tools that may be."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: "list[NamedResponseTool] | None" = None


@dataclass(frozen=True, slots=True)
class ResponseTools:
    use: ToolParams
    custom: frozenset[str] = frozenset()  # custom tools, by the names that the model sees
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)  # such a name -> namespace, name in it


def full_name(namespace: str | None, name: str) -> str:
    """What the model sees of a tool in a namespace."""
    return name if not namespace else f"{namespace.removesuffix('__')}__{name}"


def response_tools(
    tools: list[ResponseTool] | None, choice: str | NamedResponseTool | None, parallel: bool | None
) -> ResponseTools:
    plain, custom, namespaces = [], set(), {}
    for tool, namespace, where in _flat(tools or []):
        if not tool.name:
            raise BadRequest(f"{where} has no name", param=f"{where}.name")
        name = full_name(namespace, tool.name)
        plain.append(_plain(tool, name))
        if tool.type == "custom":
            custom.add(name)
        if namespace:
            namespaces[name] = namespace, tool.name
    return ResponseTools(_use(plain, choice, parallel is not False), frozenset(custom), namespaces)


def served(tools: list[ResponseTool] | None) -> list[dict[str, Any]]:
    """The tools as the response lists them, without those that were left out."""
    shown = (msgspec.to_builtins(tool) for tool in tools or () if not is_hosted(tool.type))
    return [{"strict": None, "description": None, **tool} for tool in shown]


def _flat(tools: list[ResponseTool], namespace: str | None = None, prefix: str = "") -> Iterator[Any]:
    """Each tool with its namespace and its path."""
    for index, tool in enumerate(tools):
        where = f"{prefix}tools[{index}]"
        if tool.type == "namespace" and namespace is None:
            yield from _flat(tool.tools or [], tool.name or "", f"{where}.")
        elif not left_out(tool.type, where):
            yield tool, namespace, where


def _plain(tool: ResponseTool, name: str) -> dict[str, Any]:
    if tool.type == "custom":
        return custom_function(CustomDefinition(name=name, description=tool.description, format=tool.format))
    function = {
        key: value for key in ("description", "parameters", "strict") if (value := getattr(tool, key)) is not None
    }
    return {"type": "function", "function": {"name": name, **function}}


def _use(plain: list[dict[str, Any]], choice: str | NamedResponseTool | None, several: bool) -> ToolParams:
    if not isinstance(choice, NamedResponseTool):
        return ToolParams(plain, parse_tool_choice(choice), parallel=several)
    if choice.type == "allowed_tools" and choice.tools is not None:
        names = [full_name(tool.namespace, tool.name or "") for tool in choice.tools if not is_hosted(tool.type)]
        return allowed_tool_use(plain, names, choice.mode or "auto", several)
    if choice.type not in ("function", "custom") or not choice.name:
        raise not_a_choice(choice.type)
    return ToolParams(plain, "named", full_name(choice.namespace, choice.name), several)
