"""`<|tool_call|>[{"name": ..., "arguments": {...}}]`: Granite 3."""

from quire.text.tools.json_parser import JsonToolParser
from quire.text.tools.parser import ToolFormat

FORMAT = ToolFormat(
    lambda: JsonToolParser("<|tool_call|>"),
    template_markers=("<|tool_call|>",),
    begins=("<|tool_call|>",),
    json_end="",
    keep_special=True,
)
