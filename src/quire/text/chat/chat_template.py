"""Renders a conversation into a prompt, with the chat template of the model.

Templates are untrusted programs: they run in a sandbox, within a budget, and their exceptions become bad requests. The
dialect is Hugging Face's (block trimming, `raise_exception`, `tojson` without HTML escapes, `strftime_now`,
`{% generation %}`), so a template renders as it does in transformers."""

import json
from contextlib import nullcontext
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.core.errors import BadRequest, QuireError
from quire.text.chat.render_budget import RenderBudget, current_budget, render_budget

if TYPE_CHECKING:
    from jinja2 import Template

# Marks the end of the message to be continued; what the template adds after it is cut off. The space shows whether the
# template keeps trailing white space.
_CONTINUE_HERE = "\ufdd0continue here\ufdd0 "

MAX_SOURCE = 1 << 18  # characters; the longest known template has a tenth of that

_RESERVED = frozenset({"messages", "tools", "bos_token", "eos_token", "add_generation_prompt"})


class ChatTemplate:
    """Compiled on first use."""

    def __init__(self, source: str, bos_token: str | None = None, eos_token: str | None = None) -> None:
        if len(source) > MAX_SOURCE:
            raise BadRequest(
                f"the model's chat template has {len(source)} characters, and {MAX_SOURCE} are allowed",
                "use /v1/completions",
                param="messages",
            )
        self.source = source
        self._special = {"bos_token": bos_token or "", "eos_token": eos_token or ""}

    def render(
        self,
        messages: list[dict[str, Any]],
        /,  # a variable of the template may have any name
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        if not messages:
            raise BadRequest("messages is empty", "give at least one message", param="messages")
        if taken := _RESERVED & kwargs.keys():
            raise BadRequest(
                f"chat_template_kwargs sets `{min(taken)}`, which the server sets", param="chat_template_kwargs"
            )
        final = ""
        if continue_final_message:
            if add_generation_prompt:
                raise BadRequest(
                    "add_generation_prompt and continue_final_message are both true",
                    "continue the last message, or begin a new one",
                    param="continue_final_message",
                )
            final = messages[-1].get("content") or ""
            if not isinstance(final, str) or not final:
                raise BadRequest("the last message has no text to continue", param="continue_final_message")
            messages = [*messages[:-1], {**messages[-1], "content": final + _CONTINUE_HERE}]
        text = self._run(messages, {"tools": tools, "add_generation_prompt": add_generation_prompt, **kwargs})
        return _cut_at_mark(text) if continue_final_message else text

    def _run(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        from jinja2 import TemplateSyntaxError

        try:
            with nullcontext() if current_budget() else render_budget(RenderBudget()):
                return self._template.render({"messages": messages, **self._special, **variables})
        except QuireError:  # the budget is spent
            raise
        except TemplateSyntaxError as error:
            raise BadRequest(
                f"the model's chat template does not compile: {error.message} (line {error.lineno})",
                "use /v1/completions, or start the server with another chat template",
                param="messages",
            ) from error
        except Exception as error:  # any failure of a template is the request's, not the server's
            raise BadRequest(
                f"the model's chat template refused these messages: {error or type(error).__name__}", param="messages"
            ) from error

    @cached_property
    def _template(self) -> "Template":
        from jinja2 import TemplateError

        from quire.text.chat.sandbox import TemplateSandbox

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        sandbox = TemplateSandbox()
        sandbox.add_filter("tojson", _tojson)
        sandbox.globals["raise_exception"] = raise_exception
        sandbox.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        return sandbox.from_string(self.source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_CONTINUE_HERE.strip())
    if end < 0:
        raise BadRequest(
            "the model's chat template does not show the last message, so it cannot be continued",
            param="continue_final_message",
        )
    kept = text[:end]
    return kept if text.startswith(_CONTINUE_HERE, end) else kept.rstrip()
