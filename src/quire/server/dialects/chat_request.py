"""Turns a conversation with tools into what the engine client is asked to generate, or into text."""

from dataclasses import replace
from typing import Any

from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest
from quire.server.dialects.chat_text import chat_text
from quire.server.dialects.dialect import Context
from quire.text.tools.answer_or_calls import structured_answer_or_calls
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
    structured = request.params.structured
    if structured is not None and use.active and not use.forced:
        if form.tools is None or not form.tools.begins:
            raise BadRequest(
                "structured output and tools are both given, and this model's calls have no marker to tell them apart",
                "leave one of them out, or force or forbid a call",
                param="tools",
            )
        structured = structured_answer_or_calls(structured, form.tools, use.tools, use.parallel)
    budget = context.options.reasoning_budget
    if request.params.thinking_token_budget is None and budget >= 0 and form.reasoning is not None:
        request.params.thinking_token_budget = budget
    request.reasoning = form.reasoning
    request.messages = form.messages(messages, use)
    request.chat_template = context.chat_template
    request.template_options = {
        **context.options.template_defaults,
        **template_options,
        "tools": form.template_tools(use),
    }
    request.params.structured = use.structured() or structured  # a forced call has its own schema
    if use.forced and form.is_harmony(use):
        request.params.enable_in_reasoning = True  # nothing would split the call from the channels
    elif request.params.enable_in_reasoning is None and form.reasoning is not None:
        request.params.enable_in_reasoning = context.info.structured_defaults.enable_in_reasoning
    request.params.stop_token_ids = [*request.params.stop_token_ids, *form.stop_ids(use, context.tokenizer)]
    if form.keeps_special(use, context.tokenizer):
        request.params.skip_special_tokens = False


def prompt_text(context: Context, messages: list[dict[str, Any]], use: ToolParams, /, **template_options: Any) -> str:
    """The prompt that `set_chat` leads to, as text."""
    form = context.chat_format()
    options = {**context.options.template_defaults, **template_options}
    return chat_text(context.tokenizer, form.messages(messages, use), tools=form.template_tools(use), **options)


def with_chat_template(context: Context, template: str | None) -> Context:
    """For a request that brings its own template."""
    if template is not None and not context.options.trust_request_chat_template:
        raise BadRequest(
            "`chat_template` is refused: a template is a program",
            "leave it out, or start the server with --trust-request-chat-template",
            param="chat_template",
        )
    return context if template is None else replace(context, chat_template=template)
