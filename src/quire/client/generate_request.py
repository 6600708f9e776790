"""What a dialect, a command or `LLM` asks the engine for: one prompt, not yet tokenized."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.text.reasoning import ReasoningFormat

# Text, ids, or {"prompt": ...} or {"prompt_token_ids": ...}; with "decoder_prompt" for an encoder-decoder.
Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class GenerateRequest:
    """Exactly one of `prompt`, `prompt_ids` and `messages` is given."""

    id: str
    params: SamplingParams
    prompt: str | None = None
    prompt_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None  # rendered with the model's chat template
    chat_template: str | None = None  # instead of the model's
    reasoning: ReasoningFormat | None = None  # how the model marks it, where its chat template does not show that
    template_options: dict[str, Any] = field(default_factory=dict)  # add_generation_prompt, continue_final_message, ...
    add_special_tokens: bool | None = None  # None: to a prompt, and not to a rendered chat, which has them
    truncate_prompt_tokens: int | None = None  # keep the last that many
    truncate_end: bool = False  # keep the first that many instead
    window: int | None = None  # tokens that prompt and answer may have together, where that is less than the context
    decoder_prompt: str | None = None  # of an encoder-decoder: what the answer goes on from, the language say
    tenant: str = ""
    salt: str = ""
    priority: int = 0
    weight: float = 1.0  # of its tenant's share
    adapter: str = ""  # the name of a LoRA adapter; none: the model as it is
    timeout: float | None = None  # seconds until the request is given up
    delivered: list[list[int]] = field(default_factory=list)  # tokens of the one completion, by event: it goes on there


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter, loaded when it is first asked for. The number is vLLM's, and nothing here depends on it."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


def request_for(prompt: Prompt, **given: Any) -> GenerateRequest:
    """A request for a prompt in any of its forms."""
    if isinstance(prompt, Mapping):
        if unknown := set(prompt) - {"prompt", "prompt_token_ids", "decoder_prompt"}:
            hint = "use prompt or prompt_token_ids, and decoder_prompt"
            raise BadRequest(f"a prompt has no key {sorted(unknown)[0]!r}", hint, param="prompt")
        given["decoder_prompt"] = prompt.get("decoder_prompt")
        prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
    if isinstance(prompt, str):
        return GenerateRequest(prompt=prompt, **given)
    return GenerateRequest(prompt_ids=[int(token) for token in prompt], **given)
