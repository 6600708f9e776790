"""`functools[{"name": ..., "arguments": {...}}]`: Phi-4 mini."""

from quire.text.tools.json_parser import JsonToolParser
from quire.text.tools.parser import ToolFormat

FORMAT = ToolFormat(
    lambda: JsonToolParser("functools"), template_markers=("functools[", "<|tool|>"), begins=("functools",), json_end=""
)
