"""Tool calls as clients of OpenAI receive them."""

from uuid import uuid4

from msgspec import UNSET, Struct, UnsetType

from quire.text.tools.parser import CallDelta


class FunctionDelta(Struct):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(Struct, kw_only=True):
    """A complete call, or a delta in a chunk. A delta has an index; the first delta of a call has its id and name."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


def tool_call_delta(delta: CallDelta, short_ids: bool) -> ToolCallDelta:
    call = ToolCallDelta(index=delta.index, function=FunctionDelta(arguments=delta.arguments))
    if delta.name:
        call.id, call.type, call.function.name = delta.id or new_call_id(short_ids), "function", delta.name
    return call


def merge_tool_calls(deltas: list[CallDelta], short_ids: bool) -> list[ToolCallDelta]:
    """The calls of an answer that is not streamed."""
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
