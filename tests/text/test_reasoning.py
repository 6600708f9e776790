"""Reasoning split from answers."""

import pytest

from quire.text.answer_parser import AnswerDelta
from quire.text.chat.chat_format import ChatFormat, chat_format
from quire.text.reasoning import FORMATS
from quire.text.reasoning.parser import ReasoningParser
from quire.text.tools.params import ToolParams


def split(name: str, pieces: list[str], begun: bool = False) -> tuple[str, str]:
    parser = ReasoningParser(FORMATS[name], begun)
    parts = [*map(parser.push, pieces), parser.flush()]
    return "".join(reasoning for reasoning, _ in parts), "".join(answer for _, answer in parts)


CASES = [
    ("qwen3", False, "<think>\nHm.\n\n</think>\n\nYes.", ("Hm.", "Yes.")),
    ("qwen3", False, "\n<think>\n\n</think>\n\nYes. ", ("", "Yes. ")),
    ("qwen3", False, " No thoughts.", ("", " No thoughts.")),
    ("qwen3", False, "<think>never ends ", ("never ends", "")),
    ("qwen3", False, "<thin", ("", "<thin")),
    ("qwen3", False, "<think>", ("", "")),
    ("qwen3", True, "\nHm. </think> Yes.", ("Hm.", "Yes.")),
    ("qwen3", True, "<think>Hm.</think>Yes.", ("Hm.", "Yes.")),
    ("qwen3", True, "a < b </thin", ("a < b </thin", "")),
    ("deepseek_r1", False, "Hm.\n</think>\nYes.", ("Hm.", "Yes.")),
    ("deepseek_r1", False, "Yes", ("Yes", "")),
    ("mistral", False, "[THINK]Hm.[/THINK]Yes.", ("Hm.", "Yes.")),
    ("granite", False, "Here is my thought process: Hm. Here is my response: Yes.", ("Hm.", "Yes.")),
    ("seed_oss", False, "<seed:think>Hm.</seed:think>Yes.", ("Hm.", "Yes.")),
    ("kimi", False, "◁think▷Hm.◁/think▷Yes.", ("Hm.", "Yes.")),
]


@pytest.mark.parametrize(("name", "begun", "text", "parts"), CASES)
def test_reasoning_is_split_however_the_text_is_cut(name: str, begun: bool, text: str, parts: tuple[str, str]) -> None:
    assert split(name, [text], begun) == parts
    assert split(name, list(text), begun) == parts
    for at in range(1, len(text)):
        assert split(name, [text[:at], text[at:]], begun) == parts


def test_every_format_has_a_case() -> None:
    assert {name for name, *_ in CASES} == FORMATS.keys()


def test_the_template_shows_the_reasoning_format() -> None:
    assert chat_format("{{ content.split('</think>') }}").reasoning is FORMATS["qwen3"]
    assert chat_format("{{ messages }}").reasoning is None
    assert chat_format("{{ messages }}", reasoning_parser="deepseek_r1").reasoning is FORMATS["deepseek_r1"]
    assert chat_format("</think>", reasoning_parser="none").reasoning is None


def test_markers_of_calls_within_reasoning_are_text() -> None:
    chat = ChatFormat(chat_format("").tools, FORMATS["qwen3"], False, False)
    tools = ToolParams([{"type": "function", "function": {"name": "f"}}])
    reader = chat.reader(tools, "<|assistant|><think>\n")
    assert reader is not None
    text = 'I could <tool_call>. </think> Now: <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    whole = AnswerDelta()
    for gain in [*map(reader.push, text), reader.push("", ended=True)]:
        whole.reasoning += gain.reasoning
        whole.content += gain.content
        whole.calls += gain.calls
    assert (whole.reasoning, whole.content) == ("I could <tool_call>.", "Now:")
    assert [call.name for call in whole.calls if call.name] == ["f"]
    assert chat.reader(ToolParams(), thinks=False) is None
