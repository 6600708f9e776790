"""Reasoning split from answers."""

import pytest

from quire.text.answer_parser import AnswerDelta
from quire.text.chat.chat_format import ChatFormat, chat_format
from quire.text.reasoning import FORMATS, NAMES, detect, load
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
    (
        "cohere_command3",
        False,
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        ("Hm.", "Yes."),
    ),
    ("cohere_command3", False, "<|START_RESPONSE|>Yes <|no", ("", "Yes <|no")),
    ("gemma4", False, "<|channel>thought\nHm.\n<channel|>Yes.", ("Hm.", "Yes.")),
    (
        "kimi_k3",
        True,
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>",
        ("Hm.", "Yes."),
    ),
    ("solar_open", False, "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.", ("Hm.", "Yes.")),
    ("solar_open", False, "<|content|>Yes.", ("", "Yes.")),
    ("apertus", False, "<|inner_prefix|>Hm.<|inner_suffix|>Yes.", ("Hm.", "Yes.")),
    ("hy_v3", True, "Hm.</think:opensource>Yes.", ("Hm.", "Yes.")),
    ("granite3_3", False, "<think>Hm.</think>\n<response>Yes.</response>", ("Hm.", "Yes.")),
    ("ernie45", True, "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", ("Hm.", "Yes.\n\n")),
    ("hunyuan_a13b", False, "<think>Hm.</think><answer>Yes.</answer>", ("Hm.", "Yes.")),
    ("minimax_m3", True, "Hm.</mm:think>Yes.", ("Hm.", "Yes.")),
    ("apriel", True, "Hm.\n[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]", ("Hm.", "Yes.\n")),
]


@pytest.mark.parametrize(("name", "begun", "text", "parts"), CASES)
def test_reasoning_is_split_however_the_text_is_cut(name: str, begun: bool, text: str, parts: tuple[str, str]) -> None:
    assert split(name, [text], begun) == parts
    assert split(name, list(text), begun) == parts
    for at in range(1, len(text)):
        assert split(name, [text[:at], text[at:]], begun) == parts


def test_every_format_has_a_case() -> None:
    assert {name for name, *_ in CASES} == FORMATS.keys() - {"openai_gptoss"}, "which test_harmony.py has"


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


@pytest.mark.parametrize("structured", [True, False])
def test_a_structured_answer_is_passed_on_as_it_is(structured: bool) -> None:
    """White space and markers in it are its own."""
    reader = ChatFormat(None, FORMATS["granite3_3"], False, False).reader(prompt_tail="<think>", structured=structured)
    assert reader is not None
    gains = [*map(reader.push, 'Hm. </think>\n["<response>"]'), reader.push("", ended=True)]
    assert "".join(gain.reasoning for gain in gains) == "Hm."
    assert "".join(gain.content for gain in gains) == ('\n["<response>"]' if structured else '[""]')


UNCLOSED = [
    ('<think>I call.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', ("I call.", "", ["f"])),
    ('<think>I call <tool_call>{"name": "f", "arguments": {}}', ("I call", "", ["f"])),
    ("<think>I could <tool_call> but", ("I could <tool_call> but", "", [])),
    ("<think>I could <tool_call>. </think>No.", ("I could <tool_call>.", "No.", [])),
    ("<think>Never <tool_", ("Never <tool_", "", [])),
]


@pytest.mark.parametrize(("text", "parts"), UNCLOSED)
def test_a_call_in_a_thought_that_is_never_closed_is_a_call(text: str, parts: tuple[str, str, list[str]]) -> None:
    chat = ChatFormat(chat_format("").tools, FORMATS["qwen3"], False, False)
    tools = ToolParams([{"type": "function", "function": {"name": "f"}}])
    for pieces in ([text], list(text), [text[:20], text[20:]]):
        reader = chat.reader(tools)
        assert reader is not None
        gains = [*map(reader.push, pieces), reader.push("", ended=True)]
        calls = [call.name for gain in gains for call in gain.calls if call.name]
        assert ("".join(g.reasoning for g in gains), "".join(g.content for g in gains), calls) == parts


def test_every_name_of_a_reasoning_parser_is_one() -> None:
    assert all(load(name) in FORMATS.values() for name in NAMES)
    assert detect("</think> <response> <|start_of_role|>") is FORMATS["granite3_3"]
