"""Where reasoning is free before structured output, by the end of the prompt and the markers of the model."""

import re
from typing import Any

import pytest

from quire.core.thinking import Thinking
from quire.text.reasoning import FORMATS
from quire.text.reasoning.before_answer import thinking_before_answer

VOCAB = 320


class MarkedTokenizer:
    """Bytes are tokens, and so are some markers."""

    def __init__(self, *markers: str, special: bool = True) -> None:
        self._ids = {marker: 256 + number for number, marker in enumerate(markers)}
        self.special_ids = frozenset(self._ids.values() if special else ())

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, self._ids)) + ")", text)
        return [token for part in parts for token in ([self._ids[part]] if part in self._ids else part.encode())]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        names = {token: marker for marker, token in self._ids.items()}
        return "".join(names.get(token) or chr(token) for token in ids)


THINK = MarkedTokenizer("<think>", "</think>", special=False)


def opened(name: str, prompt: str, tokenizer: Any = THINK, **options: Any) -> Thinking | None:
    ids = tokenizer.encode(prompt)
    return thinking_before_answer(FORMATS[name], ids, options, tokenizer, VOCAB)


def test_a_prompt_that_opens_reasoning_leaves_it_free() -> None:
    assert opened("qwen3", "<|assistant|><think>\n") == Thinking(256, (257,), begun=True)
    off = opened("qwen3", "<|assistant|><think>\n", enable_thinking=False)
    assert off == Thinking(256, (257,), begun=True), "the template does not look at it: the model reasons anyway"


def test_where_the_model_opens_it_itself_it_may() -> None:
    assert opened("qwen3", "<|assistant|>\n") == Thinking(256, (257,), begun=False)
    assert opened("qwen3", "</think> Yes.<|user|>Hm<|assistant|>\n") is not None, "that was an earlier turn's"
    assert opened("deepseek_r1", "<|assistant|>") == Thinking(256, (257,), begun=True), "it always does"


@pytest.mark.parametrize(
    ("name", "prompt", "options"),
    [
        ("qwen3", "<|assistant|>\n<think>\n\n</think>\n\n", {}),
        ("qwen3", "<|assistant|></think>", {}),
        ("deepseek_r1", "<|assistant|></think>", {}),
        ("hunyuan_a13b", "<think>\n\n</think>\n<answer>\n", {}),
        ("qwen3", "<|assistant|>\n", {"enable_thinking": False}),
        ("qwen3", "<|assistant|>\n", {"thinking": False}),
        ("qwen3", '<|assistant|>\n{"name": ', {"continue_final_message": True}),
        ("deepseek_r1", '<|assistant|>\n{"name": ', {"continue_final_message": True}),
    ],
)
def test_there_is_no_room_where_it_is_over_or_off(name: str, prompt: str, options: dict[str, Any]) -> None:
    assert opened(name, prompt, **options) is None


def test_markers_of_text_leave_no_room() -> None:
    """Text is not always the same tokens."""
    assert opened("granite", "Here is my thought process:") is None
    assert opened("qwen3", "<think>", MarkedTokenizer("<other>")) is None
    assert opened("qwen3", "<|assistant|>", MarkedTokenizer("</think>")) is None, "an answer may begin like this"
    assert opened("qwen3", "<think>", MarkedTokenizer("</think>")) is not None


def test_markers_of_several_tokens_are_those_between_special_ones() -> None:
    harmony = MarkedTokenizer("<|channel|>", "<|message|>", "<|start|>", "final", special=True)
    assert opened("openai_gptoss", "<|start|>assistant", harmony) == Thinking(256, (256, 259, 257), begun=False)
    assert opened("openai_gptoss", "<|channel|>analysis<|message|>", harmony) == Thinking(
        256, (256, 259, 257), begun=True
    )
    gemma = MarkedTokenizer("<|channel>", "<channel|>")
    assert opened("gemma4", "<start_of_turn>model\n", gemma) == Thinking(256, (257,), begun=False)


def test_a_marker_that_the_model_does_not_have_leaves_no_room() -> None:
    ids = THINK.encode("<think>")
    assert thinking_before_answer(FORMATS["qwen3"], ids, {}, THINK, 257) is None  # type: ignore[arg-type]
