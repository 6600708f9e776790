"""`functools[{"name": ..., "arguments": {...}}]`: Phi-4 mini."""

from quire.text.tools.json_parser import JsonCalls
from quire.text.tools.parser import ToolFormat

FORMAT = ToolFormat(lambda: JsonCalls("functools"), signs=("functools[", "<|tool|>"))
