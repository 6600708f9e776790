"""What a chat template shows about its model: the formats of reasoning and of tool calls, and its roles."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from quire.core.errors import BadRequest
from quire.text import reasoning, tools
from quire.text.answer_parser import AnswerParser
from quire.text.reasoning import ReasoningFormat
from quire.text.reasoning.parser import ReasoningParser
from quire.text.tools.params import ToolParams
from quire.text.tools.parser import ToolFormat
from quire.text.tools.system_prompt import add_tools_to_messages

NO_TOOLS = ToolParams()


@dataclass(frozen=True, slots=True)
class ChatFormat:
    tools: ToolFormat | None  # None: the template has tools, in an unknown format
    reasoning: ReasoningFormat | None
    has_tools: bool  # the template renders tools
    has_developer: bool  # the template has the role "developer"

    def messages(self, messages: list[dict[str, Any]], use: ToolParams = NO_TOOLS) -> list[dict[str, Any]]:
        """The messages as the template can render them. Arguments of tool calls are objects, not JSON text."""
        if use.active and not use.forced and self.tools is None:
            raise BadRequest(
                "the chat template does not show how this model writes tool calls",
                f"start the server with --tool-call-parser, one of {', '.join(tools.FORMATS)}",
                param="tools",
            )
        if not self.has_developer:
            messages = _without_developer(messages)
        return messages if self.has_tools else add_tools_to_messages(messages, use.tools if use.active else [])

    def template_tools(self, use: ToolParams) -> list[dict[str, Any]] | None:
        """The template's variable `tools`."""
        return use.tools if use.active and self.has_tools else None

    @property
    def short_ids(self) -> bool:
        """Whether ids of calls have nine characters; see `ToolFormat`."""
        return self.tools is not None and self.tools.short_ids

    def keeps_special(self, use: ToolParams) -> bool:
        """Whether the text needs its special tokens, for the tool parser."""
        return use.active and not use.forced and self.tools is not None and self.tools.keep_special

    def reader(self, use: ToolParams = NO_TOOLS, prompt_tail: str = "", thinks: bool = True) -> AnswerParser | None:
        """A reader of one completion; None if the text is only content. `prompt_tail` is the end of the prompt;
        `thinks` is false if structured output leaves no room for reasoning."""
        reasoning_parser = None
        if self.reasoning is not None and thinks:
            reasoning_parser = ReasoningParser(self.reasoning, prompt_tail.rstrip().endswith(self.reasoning.begin))
        tool_parser = use.parser(self.tools)
        if reasoning_parser is None and tool_parser is None:
            return None
        return AnswerParser(reasoning_parser, tool_parser, use.parallel)


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
    has_tools = re.search(r"\btools\b", template) is not None
    if tool_parser != "auto":
        tool_format: ToolFormat | None = tools.load(tool_parser)
    elif not has_tools:
        tool_format = tools.load("hermes")  # as the system prompt asks for
    else:
        known = map(tools.load, tools.FORMATS)
        tool_format = next((each for each in known if any(m in template for m in each.template_markers)), None)
    if reasoning_parser == "auto":
        reasoning_format = next((each for each in reasoning.FORMATS.values() if each.end in template), None)
    else:
        reasoning_format = reasoning.FORMATS.get(reasoning_parser)
    return ChatFormat(tool_format, reasoning_format, has_tools, "developer" in template)
