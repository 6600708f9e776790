"""Turns a conversation with tools into what the engine client is asked to generate."""

from typing import Any

from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest
from quire.server.dialects.dialect import Context
from quire.text.tools.answer_or_calls import structured_answer_or_calls
from quire.text.tools.params import ToolParams


def set_chat(
    request: GenerateRequest, context: Context, messages: list[dict[str, Any]], use: ToolParams, **template_options: Any
) -> None:
    """Set the request's messages, the options of the chat template, and what follows from the tools."""
    form = context.chat_format()
    structured = request.params.structured
    if structured is not None and use.active and not use.forced:
        if form.tools is None or not form.tools.begins:
            raise BadRequest(
                "structured output and tools are both given, and this model's calls have no marker to tell them apart",
                "leave one of them out, or force or forbid a call",
                param="tools",
            )
        structured = structured_answer_or_calls(structured, form.tools, use.tools, use.parallel)
    request.messages = form.messages(messages, use)
    request.template_options = {**template_options, "tools": form.template_tools(use)}
    request.params.structured = use.structured() or structured  # a forced call has its own schema
    if form.keeps_special(use):
        request.params.skip_special_tokens = False
