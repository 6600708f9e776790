"""Tool calls as clients of OpenAI receive them."""

from uuid import uuid4

from msgspec import UNSET, Struct, UnsetType

from quire.server.dialects.custom_tools import custom_input
from quire.text.tools.parser import CallDelta


class FunctionDelta(Struct):
    name: str | UnsetType = UNSET
    arguments: str = ""


class CustomCall(Struct):
    name: str
    input: str


class ToolCallDelta(Struct, kw_only=True):
    """A complete call, or a delta in a chunk. A delta has an index; the first delta of a call has its id and name."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET


class ToolCallDeltas:
    """The calls of one sample, as they are streamed. A call of a custom tool is one delta, sent when it is complete."""

    def __init__(self, custom: frozenset[str], short_ids: bool) -> None:
        self._custom, self._short_ids = custom, short_ids
        self._open: CallDelta | None = None  # a call of a custom tool

    def push(self, deltas: list[CallDelta], ended: bool) -> list[ToolCallDelta]:
        sent: list[ToolCallDelta] = []
        for delta in deltas:
            if delta.name:
                sent += self._close()
            if delta.name in self._custom:
                self._open = CallDelta(delta.index, delta.name, delta.arguments, delta.id)
            elif self._open is not None:
                self._open.arguments += delta.arguments
            else:
                sent.append(self._function(delta))
        return [*sent, *self._close()] if ended else sent

    def _function(self, delta: CallDelta) -> ToolCallDelta:
        call = ToolCallDelta(index=delta.index, function=FunctionDelta(arguments=delta.arguments))
        if delta.name:
            call = ToolCallDelta(
                index=delta.index,
                id=delta.id or new_call_id(self._short_ids),
                type="function",
                function=FunctionDelta(delta.name, delta.arguments),
            )
        return call

    def _close(self) -> list[ToolCallDelta]:
        if self._open is None:
            return []
        call, self._open = self._open, None
        custom = CustomCall(call.name, custom_input(call.arguments))
        call_id = call.id or new_call_id(self._short_ids)
        return [ToolCallDelta(index=call.index, id=call_id, type="custom", custom=custom)]


def merge_tool_calls(deltas: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """The calls of an answer that is not streamed."""
    calls: list[ToolCallDelta] = []
    for delta in deltas:
        if delta.id is not UNSET:
            delta.index = UNSET
            calls.append(delta)
        else:
            written, more = calls[-1].function, delta.function
            assert isinstance(written, FunctionDelta) and isinstance(more, FunctionDelta)
            written.arguments += more.arguments
    return calls


def new_call_id(short: bool) -> str:
    """`short`: as Mistral's templates insist on."""
    return uuid4().hex[:9] if short else f"call_{uuid4().hex[:24]}"
