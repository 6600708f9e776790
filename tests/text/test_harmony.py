"""gpt-oss's channels: reasoning, content and calls, however the text is cut."""

import pytest

from quire.text.chat.chat_format import chat_format
from quire.text.harmony import HarmonyParser
from quire.text.tools.params import ToolParams

Parts = tuple[str, str, list[tuple[str, str]]]

HEAD = "<|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>Rain?<|end|>"

CASES: list[tuple[str, Parts]] = [
    (f"{ANALYSIS}{HEAD}<|channel|>final<|message|>It rains.", ("Rain?", "It rains.", [])),
    (f"{ANALYSIS}{HEAD}{ANALYSIS}{HEAD}<|channel|>final<|message|>Yes.", ("Rain?\nRain?", "Yes.", [])),
    (
        f'{ANALYSIS}{HEAD}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": 1}}',
        ("Rain?", "", [("f", '{"a": 1}')]),
    ),
    (
        f"<|channel|>commentary<|message|>I look.<|end|>{HEAD} to=functions.f<|channel|>commentary json<|message|>{{}}"
        f"<|call|>{HEAD} to=functions.g<|channel|>commentary json<|message|><|call|>",
        ("", "I look.", [("f", "{}"), ("g", "{}")]),
    ),
    (" to=functions.f<|channel|>commentary<|message|>{}", ("", "", [("f", "{}")])),
    ("<|channel|>analysis<|message|>cut o", ("cut o", "", [])),
    ("<|channel|>ana", ("", "", [])),
    ("No channels <here>.", ("", "No channels <here>.", [])),
]


def parse(parser: HarmonyParser, pieces: list[str]) -> Parts:
    gains = [*map(parser.push, pieces), parser.push("", ended=True)]
    calls: list[tuple[str, str]] = []
    for delta in (call for gain in gains for call in gain.calls):
        if delta.name:
            calls.append((delta.name, ""))
        calls[delta.index] = calls[delta.index][0], calls[delta.index][1] + delta.arguments
    return "".join(g.reasoning for g in gains), "".join(g.content for g in gains), calls


@pytest.mark.parametrize(("text", "parts"), CASES)
def test_channels_are_split_however_the_text_is_cut(text: str, parts: Parts) -> None:
    assert parse(HarmonyParser(calls=True), [text]) == parts
    assert parse(HarmonyParser(calls=True), list(text)) == parts
    for at in range(1, len(text)):
        assert parse(HarmonyParser(calls=True), [text[:at], text[at:]]) == parts


def test_without_tools_what_is_written_to_one_is_content() -> None:
    text = "<|channel|>commentary to=functions.f<|message|>{}"
    assert parse(HarmonyParser(calls=False), [text]) == ("", "{}", [])


def test_one_call_where_calls_are_not_parallel() -> None:
    text = CASES[3][0]
    assert parse(HarmonyParser(calls=True, parallel=False), list(text))[2] == [("f", "{}")]


def test_a_template_with_channels_is_harmony() -> None:
    template = "{{ messages }}{{ tools }}<|channel|>final<|message|><|channel|>commentary"
    form, use = chat_format(template), ToolParams([{"type": "function", "function": {"name": "f"}}])
    assert isinstance(form.reader(), HarmonyParser) and isinstance(form.reader(use), HarmonyParser)
    assert form.reader(thinks=False) is None, "structured output has no channels"
    forced = form.reader(ToolParams(use.tools, "named", "f"), thinks=False)
    assert forced is not None and forced.push("{}").calls[0].name == "f"
