"""Reasoning content before the answer: how models mark it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    begin: str
    end: str
    always: bool = False  # the completion starts with reasoning even without `begin`
    silent: tuple[str, ...] = ()  # markers of the answer itself, which are not shown
    special: bool = False  # its markers are special tokens, so they must not be skipped by the detokenizer
    signs: tuple[str, ...] = ()  # beside `end`, what a chat template of this format has

    def end_id(self, id_of: Callable[[str], int | None]) -> int | None:
        """The token that ends reasoning; None: it takes several."""
        return id_of(self.end.strip())


# In the order in which they are looked for in a chat template. Names are those of vLLM where it has the format.
FORMATS = {
    "openai_gptoss": ReasoningFormat("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", special=True),
    "cohere_command3": ReasoningFormat(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        special=True,
    ),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>", special=True),
    "kimi_k3": ReasoningFormat(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        silent=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        special=True,
    ),
    "solar_open": ReasoningFormat(
        "<|think|>",
        "<|end|><|begin|>assistant",
        silent=("<|content|>", "<|begin|>assistant"),
        special=True,
        signs=("<|tool_call:begin|>",),
    ),
    "apertus": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>", special=True),
    "hy_v3": ReasoningFormat("<think:opensource>", "</think:opensource>"),
    "granite3_3": ReasoningFormat(
        "<think>", "</think>", silent=("<response>", "</response>"), signs=("<|start_of_role|>",)
    ),
    "ernie45": ReasoningFormat(
        "<think>", "</think>", silent=("<response>", "</response>"), signs=("<response>", "<|im_end|>")
    ),
    "hunyuan_a13b": ReasoningFormat("<think>", "</think>", silent=("<answer>", "</answer>"), signs=("<answer>",)),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", special=True),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "minimax_m3": ReasoningFormat("<mm:think>", "</mm:think>"),
    "apriel": ReasoningFormat(
        "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", silent=("[END FINAL RESPONSE]",)
    ),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
}

# Names of vLLM's for formats that have another name here.
ALIASES = {
    "cohere_command4": "cohere_command3",
    "deepseek_v3": "qwen3",
    "deepseek_v4": "qwen3",
    "glm45": "qwen3",
    "glm47": "qwen3",
    "holo2": "qwen3",
    "kimi_k2": "qwen3",
    "mimo": "qwen3",
    "minimax_m2": "deepseek_r1",
    "nemotron_v3": "qwen3",
    "olmo3": "deepseek_r1",
    "poolside_v1": "qwen3",
    "step3": "deepseek_r1",
    "step3p5": "deepseek_r1",
}

NAMES = (*FORMATS, *ALIASES)


def load(name: str) -> ReasoningFormat:
    return FORMATS[ALIASES.get(name, name)]


def detect(text: str) -> ReasoningFormat | None:
    """The format whose markers are in the text of a chat template, or in what it renders."""
    return next((each for each in FORMATS.values() if all(sign in text for sign in (each.end, *each.signs))), None)
