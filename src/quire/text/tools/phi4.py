"""`functools[{"name": ..., "arguments": {...}}]`: Phi-4 mini."""

from quire.text.tools.call import ToolFormat
from quire.text.tools.json_calls import JsonCalls

FORMAT = ToolFormat(lambda: JsonCalls("functools"), signs=("functools[", "<|tool|>"))
