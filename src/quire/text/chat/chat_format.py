"""What a chat template shows about its model: the formats of reasoning and of tool calls, and what it can render."""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from quire.core.errors import BadRequest
from quire.text import reasoning
from quire.text.answer_parser import AnswerParser
from quire.text.chat.messages import fit_messages
from quire.text.chat.template_traits import PROBE_NAME, TemplateTraits, template_traits
from quire.text.harmony import HarmonyParser
from quire.text.reasoning import ReasoningFormat
from quire.text.reasoning.parser import ReasoningParser
from quire.text.tools import formats
from quire.text.tools.params import ToolParams
from quire.text.tools.parser import ToolFormat
from quire.text.tools.system_prompt import add_tools_to_messages

if TYPE_CHECKING:
    from quire.text.tokenizers.tokenizer import Tokenizer

NO_TOOLS = ToolParams()

# Formats that there is no parser for, by what a template has or renders.
_NOT_SUPPORTED = {
    "]<]minimax[>[": "MiniMax-M3's format",
    f">>>{PROBE_NAME}": "functionary v3.2's format",
    "<atem:function_calls>": "Muse Glimmer's format",
}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    tools: ToolFormat | None  # None: the template has tools, in an unknown format
    reasoning: ReasoningFormat | None
    has_tools: bool  # the template renders tools
    has_developer: bool  # the template has the role "developer"
    traits: TemplateTraits = TemplateTraits()  # noqa: RUF009 - it is immutable
    unknown: str = "how this model writes tool calls"  # what there is no parser for

    def messages(self, messages: list[dict[str, Any]], use: ToolParams = NO_TOOLS) -> list[dict[str, Any]]:
        """The messages as the template can render them. Arguments of tool calls are given as objects."""
        if use.active and not use.forced and self.tools is None:
            raise BadRequest(
                f"the chat template does not show {self.unknown}",
                f"start the server with --tool-call-parser, one of {', '.join(formats.FORMATS)}",
                param="tools",
            )
        if not self.has_developer:
            messages = _without_developer(messages)
        if not self.has_tools:
            messages = add_tools_to_messages(messages, use.tools if use.active else [])
        return fit_messages(messages, self.traits, self.tools)

    def template_tools(self, use: ToolParams) -> list[dict[str, Any]] | None:
        """The template's variable `tools`."""
        if not (use.active and self.has_tools):
            return None
        return list(map(_described, use.tools)) if self.traits.needs_description else use.tools

    @property
    def short_ids(self) -> bool:
        """Whether ids of calls have nine characters; see `ToolFormat`."""
        return self.tools is not None and self.tools.short_ids

    def keeps_special(self, use: ToolParams, tokenizer: "Tokenizer") -> bool:
        """Whether the text needs its special tokens, because they are what the parsers look for."""
        called = self.tools if use.active and not use.forced else None
        if (called is not None and called.special) or (self.reasoning is not None and self.reasoning.special):
            return True
        markers = () if called is None else called.begins
        if self.reasoning is not None:
            markers += (self.reasoning.begin, self.reasoning.end)
        return any(tokenizer.id_of(marker) in tokenizer.special_ids for marker in markers)

    def stop_ids(self, use: ToolParams, tokenizer: "Tokenizer") -> list[int]:
        """Tokens that end a completion with calls; see `ToolFormat`."""
        stops = self.tools.stops if self.tools is not None and use.active and not use.forced else ()
        ids = [tokenizer.id_of(stop) for stop in stops]
        return [token for token in ids if token is not None and token not in tokenizer.eos_ids]

    def reader(
        self, use: ToolParams = NO_TOOLS, prompt_tail: str = "", thinks: bool = True, structured: bool = False
    ) -> AnswerParser | None:
        """A reader of one completion; None if the text is only content. `prompt_tail` is the end of the prompt;
        `thinks` is false if structured output leaves no room for reasoning. An answer that is `structured` is passed on
        as it is."""
        if thinks and not use.forced and self.is_harmony(use):
            return HarmonyParser(use.active, use.parallel)
        tool_parser = use.parser(self.tools)
        reasoning_parser = None
        if self.reasoning is not None and thinks:
            begun = prompt_tail.rstrip().endswith(self.reasoning.begin.rstrip())
            begins = self.tools.begins if self.tools is not None and tool_parser is not None and not use.forced else ()
            reasoning_parser = ReasoningParser(self.reasoning, begun, begins, exact=structured)
        if reasoning_parser is None and tool_parser is None:
            return None
        return AnswerParser(reasoning_parser, tool_parser, use.parallel)

    def is_harmony(self, use: ToolParams) -> bool:
        """Whether answers have harmony's channels. Forced calls are not read in them."""
        called = use.active and self.tools is formats.FORMATS["openai"]
        return called or self.reasoning is reasoning.FORMATS["openai_gptoss"]


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {"description": "", **tool["function"]}}


def _without_developer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of the developer as those of the system. One that follows another joins it: many templates take a single
    one, at the beginning."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "developer":
            plain.append(message)
        elif plain and plain[-1]["role"] == "system":
            plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n\n{message['content']}"}
        else:
            plain.append({**message, "role": "system"})
    return plain


@lru_cache(64)
def chat_format(template: str, tool_parser: str = "auto", reasoning_parser: str = "auto") -> ChatFormat:
    """The parsers by name; `auto` looks at the template. Reasoning parser `none` leaves reasoning in the text."""
    traits = template_traits(template)
    shown = template + traits.rendered
    has_tools = re.search(r"\btools\b", template) is not None
    unknown = next((name for mark, name in _NOT_SUPPORTED.items() if mark in traits.rendered), "")
    tool_format: ToolFormat | None = None
    if tool_parser != "auto":
        tool_format = formats.load(tool_parser)
    elif not has_tools:
        tool_format = formats.load("hermes")  # as the system prompt asks for
    elif not unknown:
        tool_format = formats.detect(shown)
    if reasoning_parser == "auto":
        reasoning_format = reasoning.detect(shown)
    else:
        reasoning_format = None if reasoning_parser == "none" else reasoning.load(reasoning_parser)
    form = ChatFormat(tool_format, reasoning_format, has_tools, "developer" in template, traits)
    return replace(form, unknown=f"tool calls in a way that is known: {unknown} is not supported") if unknown else form
