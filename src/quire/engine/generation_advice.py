"""Which defaults of sampling a model, or an option, may advise."""

import json
from typing import Any

from quire.core.errors import BadRequest
from quire.core.params import SamplingParams

# What generation_config.json can advise, by Hugging Face's names: those that vLLM takes from it.
GENERATION_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


def check_generation_override(text: str | None) -> None:
    name = "override_generation_config"
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{name} is not JSON: {error}", """write '{"temperature": 0.5}'""", param=name) from None
    if not isinstance(values, dict):
        raise BadRequest(f"{name} is no JSON object", """write '{"temperature": 0.5}'""", param=name)
    for key, value in values.items():
        if key not in GENERATION_FIELDS:
            raise BadRequest(f"{name} has `{key}`", f"it may have {', '.join(GENERATION_FIELDS)}", param=name)
        checked_advice(key, value)


def checked_advice(name: str, value: Any) -> int | float:
    """One value of a generation config; raises `BadRequest` where it is no number, or an impossible one."""
    field_name = "max_tokens" if name == "max_new_tokens" else name
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{name} is {value!r}", f"{name} must be a number", param=name)
    number: int | float = int(value) if field_name in ("top_k", "max_tokens") else value
    given: dict[str, Any] = {field_name: number}
    SamplingParams(**given)
    return number
