"""Thoughts before the answer: how models mark them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    begin: str
    end: str
    always: bool = False  # thoughts come first even if nothing opened them


# In the order in which `begin` is looked for in a chat template.
FORMATS = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
}
