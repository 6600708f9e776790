"""What a chat template can render, found by rendering small conversations with it."""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from quire.core.errors import BadRequest
from quire.text.chat.chat_template import ChatTemplate

PROBE_NAME = "probe_function"
_KEY, _VALUE, _SYSTEM = "probe_key", "probe_value", "probe system"
_RESULT = "probe result"
_USER = {"role": "user", "content": "probe user"}
_IDS = ("probe1234", "probe5678")  # nine characters, as Mistral's templates demand
_FUNCTION = {
    "name": PROBE_NAME,
    "description": "probe",
    "parameters": {
        "type": "object",
        "properties": {_KEY: {"type": "string", "description": "probe"}},
        "required": [_KEY],
    },
}
_TOOL = {"type": "function", "function": _FUNCTION}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    has_system: bool = True  # a system message is shown
    shows_calls: bool = True  # the tool calls of a message are shown
    one_call: bool = False  # but not more than one
    result_role: str = "tool"  # of a message with the result of a call
    text_arguments: bool = False  # arguments of tool calls are JSON text, not objects
    null_content: bool = False  # calls are shown only beside a content that is null
    needs_description: bool = False  # a tool without a description is refused
    rendered: str = ""  # what became of a tool call and of the prompt for an answer: its markers are those of the model


@lru_cache(64)
def template_traits(source: str) -> TemplateTraits:
    """Traits of a template that refuses everything are the defaults: its own message says why."""
    template = ChatTemplate(source, "<s>", "</s>")
    plain = _render(template, [_USER])
    if plain is None:
        return TemplateTraits()
    system = _render(template, [{"role": "system", "content": _SYSTEM}, _USER])
    has_system = system is not None and _SYSTEM in system
    for text_arguments, null_content in ((False, False), (False, True), (True, False), (True, True)):
        shown = _render(template, _conversation(text_arguments, null_content, 1), [_TOOL])
        if shown is not None and _num_calls(shown) == 1:
            both = _render(template, _conversation(text_arguments, null_content, 2), [_TOOL])
            one_call = both is None or _num_calls(both) < 2
            role = "tool" if _RESULT in shown else _result_role(template)
            needs = _needs_description(template)
            return TemplateTraits(has_system, True, one_call, role, text_arguments, null_content, needs, plain + shown)
    return TemplateTraits(
        has_system,
        False,
        result_role=_result_role(template),
        needs_description=_needs_description(template),
        rendered=plain,
    )


def _needs_description(template: ChatTemplate) -> bool:
    function = {name: value for name, value in _FUNCTION.items() if name != "description"}
    bare = {**_TOOL, "function": function}
    return _render(template, [_USER], [_TOOL]) is not None and _render(template, [_USER], [bare]) is None


def _result_role(template: ChatTemplate) -> str:
    """The first role whose message is shown after an answer; `tool` where none is."""
    for role in ("tool", "observation", "ipython", "function", "user"):
        shown = _render(
            template, [_USER, {"role": "assistant", "content": "probe"}, {"role": role, "content": _RESULT}]
        )
        if shown is not None and _RESULT in shown:
            return role
    return "tool"


def _conversation(text_arguments: bool, null_content: bool, num_calls: int) -> list[dict[str, Any]]:
    arguments: Any = {_KEY: _VALUE}
    function = {"name": PROBE_NAME, "arguments": json.dumps(arguments) if text_arguments else arguments}
    calls = [{"id": id, "type": "function", "function": function} for id in _IDS[:num_calls]]
    return [
        _USER,
        {"role": "assistant", "content": None if null_content else "", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": id, "name": PROBE_NAME, "content": _RESULT} for id in _IDS[:num_calls]),
    ]


def _num_calls(text: str) -> int:
    """Calls that are shown. Python's own notation of a dict, or JSON in JSON, is not what a model was trained on."""
    answer = text[text.rfind(_USER["content"]) :]
    return 0 if f"{{'{_KEY}'" in answer or f'\\"{_KEY}\\"' in answer else answer.count(_VALUE)


def _render(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> str | None:
    try:
        return template.render(messages, tools=tools)
    except BadRequest:
        return None
