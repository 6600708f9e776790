"""Tool calls that are complete, folded from the deltas they were streamed in."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.text.tools.parser import CallDelta


@dataclass(slots=True)
class CompletedCall:
    name: str
    arguments: dict[str, Any] | None  # None: `written` is not a JSON object, because the answer was cut short
    written: str  # the arguments as the model wrote them


def completed_calls(deltas: list[CallDelta]) -> list[CompletedCall]:
    calls: list[CompletedCall] = []
    for delta in deltas:
        if delta.name:
            calls.append(CompletedCall(delta.name, None, ""))
        calls[-1].written += delta.arguments
    for call in calls:
        with suppress(msgspec.DecodeError):
            call.arguments = msgspec.json.decode(call.written or "{}", type=dict)
    return calls
