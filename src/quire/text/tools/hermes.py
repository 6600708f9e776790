"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, SmolLM and others; a list inside is fine.

Models whose chat template has no tools are prompted to write it, too."""

from quire.text.tools.json_parser import JsonToolParser
from quire.text.tools.parser import ToolFormat

FORMAT = ToolFormat(
    lambda: JsonToolParser("<tool_call>", "</tool_call>"),
    template_markers=("<tool_call>",),
    begins=("<tool_call>",),
    json_end="</tool_call>",
)
