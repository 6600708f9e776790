"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, SmolLM and others; a list inside is fine.

It is also how models are told to write whose own template knows no tools."""

from quire.text.tools.call import ToolFormat
from quire.text.tools.json_calls import JsonCalls

FORMAT = ToolFormat(lambda: JsonCalls("<tool_call>", "</tool_call>"), signs=("<tool_call>",))
