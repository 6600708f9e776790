"""`StructuredOutputsParams` and `GuidedDecodingParams`, as scripts written for vLLM call a structured output."""

from typing import Any

from quire.core.errors import BadRequest
from quire.core.structured import Structured


def structured_outputs(**given: Any) -> Structured:
    """One of `json`, `json_object`, `regex`, `choice`, `grammar` and `structural_tag`, and how JSON is written."""
    given.pop("disable_fallback", None)  # there is one backend
    given.pop("backend", None)
    structured = Structured.of(**given)
    if structured is None:
        raise BadRequest(
            "the structured output says nothing", "give json, json_object, regex, choice, grammar or structural_tag"
        )
    return structured
