"""Turns a conversation with tools into what the engine client is asked to generate."""

from typing import Any

from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest
from quire.server.dialects.dialect import Context
from quire.text.tools.params import ToolParams


def set_chat(
    request: GenerateRequest,
    context: Context,
    messages: list[dict[str, Any]],
    use: ToolParams,
    /,  # a variable of the template may have any name
    **template_options: Any,
) -> None:
    """Set the request's messages, the options of the chat template, and what follows from the tools."""
    form = context.chat_format()
    if use.active and not use.forced and request.params.structured is not None:
        raise BadRequest(
            "structured output and tools are both given, and an answer cannot be either",
            "leave one of them out, or let no tool be called",
            param="tools",
        )
    request.messages = form.messages(messages, use)
    request.template_options = {**template_options, "tools": form.template_tools(use)}
    request.params.structured = use.structured() or request.params.structured  # a forced call has its own schema
    if form.keeps_special(use):
        request.params.skip_special_tokens = False
