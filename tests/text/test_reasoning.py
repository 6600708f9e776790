"""Thoughts split from answers."""

import pytest

from quire.text.answer_parser import AnswerDelta
from quire.text.chat.chat_format import ChatFormat, chat_format
from quire.text.reasoning import FORMATS
from quire.text.reasoning.thoughts import Thoughts
from quire.text.tools.use import ToolUse


def split(name: str, pieces: list[str], begun: bool = False) -> tuple[str, str]:
    thoughts = Thoughts(FORMATS[name], begun)
    parts = [*map(thoughts.push, pieces), thoughts.flush()]
    return "".join(thought for thought, _ in parts), "".join(answer for _, answer in parts)


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
def test_thoughts_are_split_however_the_text_is_cut(name: str, begun: bool, text: str, parts: tuple[str, str]) -> None:
    assert split(name, [text], begun) == parts
    assert split(name, list(text), begun) == parts
    for at in range(1, len(text)):
        assert split(name, [text[:at], text[at:]], begun) == parts


def test_every_format_has_a_case() -> None:
    assert {name for name, *_ in CASES} == FORMATS.keys()


def test_templates_tell_how_their_model_thinks() -> None:
    assert chat_format("{{ content.split('</think>') }}").reasoning is FORMATS["qwen3"]
    assert chat_format("{{ messages }}").reasoning is None
    assert chat_format("{{ messages }}", reasoning_parser="deepseek_r1").reasoning is FORMATS["deepseek_r1"]
    assert chat_format("</think>", reasoning_parser="none").reasoning is None


def test_thoughts_may_speak_of_calls() -> None:
    form = ChatFormat(chat_format("").tools, FORMATS["qwen3"], False, False)
    tools = ToolUse([{"type": "function", "function": {"name": "f"}}])
    reader = form.reader(tools, "<|assistant|><think>\n")
    assert reader is not None
    text = 'I could <tool_call>. </think> Now: <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    whole = AnswerDelta()
    for gain in [*map(reader.push, text), reader.push("", ended=True)]:
        whole.reasoning += gain.reasoning
        whole.content += gain.content
        whole.calls += gain.calls
    assert (whole.reasoning, whole.content) == ("I could <tool_call>.", "Now:")
    assert [call.name for call in whole.calls if call.name] == ["f"]
    assert form.reader(ToolUse(), thinks=False) is None
