"""`<|tool_call|>[{"name": ..., "arguments": {...}}]`: Granite 3."""

from quire.text.tools.json_parser import JsonCalls
from quire.text.tools.parser import ToolFormat

FORMAT = ToolFormat(lambda: JsonCalls("<|tool_call|>"), signs=("<|tool_call|>",), keep_special=True)
