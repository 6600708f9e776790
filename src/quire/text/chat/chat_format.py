"""What a chat template tells about its model: how it thinks, how it calls tools, which roles it knows."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from quire.core.errors import BadRequest
from quire.text import reasoning, tools
from quire.text.answer_parser import AnswerParser
from quire.text.reasoning import ReasoningFormat
from quire.text.reasoning.thoughts import Thoughts
from quire.text.tools.call import ToolFormat
from quire.text.tools.spelled import spelled_out
from quire.text.tools.use import ToolUse

NO_TOOLS = ToolUse()


@dataclass(frozen=True, slots=True)
class ChatFormat:
    tools: ToolFormat | None  # None: the template has tools, and nobody knows how its model calls them
    reasoning: ReasoningFormat | None
    knows_tools: bool
    knows_developer: bool

    def messages(self, messages: list[dict[str, Any]], use: ToolUse = NO_TOOLS) -> list[dict[str, Any]]:
        """As the template can show them. The arguments of calls in them are objects, not their texts."""
        if use.active and not use.forced and self.tools is None:
            raise BadRequest(
                "how this model writes tool calls cannot be told from its chat template",
                f"start the server with --tool-call-parser, one of {', '.join(tools.FORMATS)}",
                param="tools",
            )
        if not self.knows_developer:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        return messages if self.knows_tools else spelled_out(messages, use.tools if use.active else [])

    def template_tools(self, use: ToolUse) -> list[dict[str, Any]] | None:
        """What the template is given as `tools`."""
        return use.tools if use.active and self.knows_tools else None

    @property
    def short_ids(self) -> bool:
        """Of calls; see `ToolFormat`."""
        return self.tools is not None and self.tools.short_ids

    def keeps_special(self, use: ToolUse) -> bool:
        """Whether special tokens have to be in the text, for calls to be found in it."""
        return use.active and not use.forced and self.tools is not None and self.tools.keep_special

    def reader(self, use: ToolUse = NO_TOOLS, prompt_tail: str = "", thinks: bool = True) -> AnswerParser | None:
        """Reads one sample; None where there is nothing to tell apart. `prompt_tail` is how the prompt ends; `thinks`
        is false where the answer's language leaves no room for thoughts."""
        thoughts = None
        if self.reasoning is not None and thinks:
            thoughts = Thoughts(self.reasoning, prompt_tail.rstrip().endswith(self.reasoning.begin))
        parser = use.parser(self.tools) if self.tools is not None or use.forced else None  # type: ignore[arg-type]
        return AnswerParser(thoughts, parser, use.parallel) if thoughts or parser else None


@lru_cache(64)
def chat_format(template: str, tool_parser: str = "auto", reasoning_parser: str = "auto") -> ChatFormat:
    """The parsers by name; `auto` looks at the template, and `none`, for thoughts, leaves them in the text."""
    knows_tools = re.search(r"\btools\b", template) is not None
    if tool_parser != "auto":
        form: ToolFormat | None = tools.load(tool_parser)
    elif not knows_tools:
        form = tools.load("hermes")  # as it will be told to
    else:
        known = map(tools.load, tools.FORMATS)
        form = next((each for each in known if any(sign in template for sign in each.signs)), None)
    if reasoning_parser == "auto":
        thoughts = next((each for each in reasoning.FORMATS.values() if each.end in template), None)
    else:
        thoughts = reasoning.FORMATS.get(reasoning_parser)
    return ChatFormat(form, thoughts, knows_tools, "developer" in template)
