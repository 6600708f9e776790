"""`<|tool_call|>[{"name": ..., "arguments": {...}}]`: Granite 3."""

from quire.text.tools.call import ToolFormat
from quire.text.tools.json_calls import JsonCalls

FORMAT = ToolFormat(lambda: JsonCalls("<|tool_call|>"), signs=("<|tool_call|>",), keep_special=True)
