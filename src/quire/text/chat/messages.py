"""Messages as a chat template can render them: its traits say what it cannot."""

import hashlib
import json
import re
from typing import Any

from quire.text.chat.template_traits import TemplateTraits
from quire.text.tools.parser import ToolFormat

Messages = list[dict[str, Any]]

_NINE = re.compile("[a-zA-Z0-9]{9}")


def fit_messages(messages: Messages, traits: TemplateTraits, tool_format: ToolFormat | None) -> Messages:
    """Content that is null or missing becomes an empty text: most templates refuse it."""
    messages = _with_ids(messages, tool_format)
    if traits.one_call:
        messages = _split_calls(messages)
    messages = [_fit(message, traits, tool_format) for message in messages]
    return messages if traits.has_system else _without_system(messages)


def _with_ids(messages: Messages, tool_format: ToolFormat | None) -> Messages:
    """Every call has an id that its format allows, and every result the id of its call: of the next one without a
    result, where it names none."""
    ids: dict[str, str] = {}  # as given -> as the template gets them
    waiting: list[str] = []  # calls without a result
    num_calls = 0
    result: Messages = []
    for message in messages:
        if calls := message.get("tool_calls"):
            waiting = [_call_id(call, num_calls + number, tool_format) for number, call in enumerate(calls)]
            ids |= {call.get("id") or id: id for call, id in zip(calls, waiting, strict=True)}
            message = {**message, "tool_calls": [{**call, "id": id} for call, id in zip(calls, waiting, strict=True)]}
            num_calls += len(calls)
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            id = ids.get(given, given) if given else next(iter(waiting), None)
            waiting = [other for other in waiting if other != id]
            message = message if id is None else {**message, "tool_call_id": id}
        result.append(message)
    return result


def _call_id(call: dict[str, Any], number: int, tool_format: ToolFormat | None) -> str:
    given: str = call.get("id") or f"call{number:05d}"
    if tool_format is not None and tool_format.short_ids and not _NINE.fullmatch(given):
        return hashlib.sha256(given.encode()).hexdigest()[:9]
    if tool_format is not None and tool_format.function_ids and not given.startswith("functions."):
        return f"functions.{call['function']['name']}:{number}"
    return given


def _fit(message: dict[str, Any], traits: TemplateTraits, tool_format: ToolFormat | None) -> dict[str, Any]:
    content, calls = message.get("content"), message.get("tool_calls")
    fitted = {**message, "content": "" if content is None else content}
    if "reasoning_content" in message:
        fitted["reasoning"] = message["reasoning_content"]
        if not (content and calls):  # gpt-oss's template refuses both beside calls
            fitted["thinking"] = message["reasoning_content"]
    if message["role"] == "tool":
        fitted["role"] = traits.result_role
    if not calls:
        return fitted
    if not traits.shows_calls and tool_format is not None and tool_format.write is not None:
        functions = [{"name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in calls]
        fitted["content"] = "\n".join(filter(None, [fitted["content"], tool_format.write(functions)]))
        del fitted["tool_calls"]
        return fitted
    if traits.null_content and not fitted["content"]:
        fitted["content"] = None
    if traits.text_arguments:
        fitted["tool_calls"] = [_with_text_arguments(call) for call in calls]
    return fitted


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _without_system(messages: Messages) -> Messages:
    """System messages become the begin of the user's next message."""
    result: Messages = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
        elif message["role"] == "user" and waiting:
            result.append({**message, "content": "\n\n".join([*filter(None, waiting), message["content"]])})
            waiting = []
        else:
            result.append(message)
    return [*result, {"role": "user", "content": "\n\n".join(waiting)}] if waiting else result


def _split_calls(messages: Messages) -> Messages:
    """A message for each call, followed by its result."""
    results = {m["tool_call_id"]: m for m in messages if m["role"] == "tool" and "tool_call_id" in m}
    done: set[str] = set()
    split: Messages = []
    for message in messages:
        calls = message.get("tool_calls") or []
        if message.get("tool_call_id") in done and message["role"] == "tool":
            continue
        if len(calls) < 2:
            split.append(message)
            continue
        for number, call in enumerate(calls):
            rest = {"role": message["role"], "content": ""}
            split.append({**(rest if number else message), "tool_calls": [call]})
            if (result := results.get(call.get("id"))) is not None:
                split.append(result)
                done.add(call["id"])
    return split
