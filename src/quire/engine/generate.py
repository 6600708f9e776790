"""What a dialect, a command or `LLM` asks the engine for: one prompt, not yet tokenized."""

from dataclasses import dataclass, field
from typing import Any

from quire.core.params import SamplingParams


@dataclass(slots=True, kw_only=True)
class GenerateRequest:
    """Exactly one of `prompt`, `prompt_ids` and `messages` is given."""

    id: str
    params: SamplingParams
    prompt: str | None = None
    prompt_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None  # rendered with the model's chat template
    template_options: dict[str, Any] = field(default_factory=dict)  # add_generation_prompt, continue_final_message, ...
    add_special_tokens: bool = True  # for `prompt` only: a rendered chat already has them
    truncate_prompt_tokens: int | None = None  # keep the last that many
    tenant: str = ""
    salt: str = ""
    priority: int = 0
    timeout: float | None = None  # seconds until the request is given up
