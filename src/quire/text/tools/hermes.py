"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, SmolLM and others; a list inside is fine.

It is also how models are told to write whose own template knows no tools."""

from quire.text.tools.json_parser import JsonToolParser
from quire.text.tools.parser import ToolFormat

FORMAT = ToolFormat(lambda: JsonToolParser("<tool_call>", "</tool_call>"), signs=("<tool_call>",))
