"""The whole answer is `{"name": ..., "parameters": {...}}`, several divided by semicolons: Llama 3."""

from quire.text.tools.json_parser import JsonCalls
from quire.text.tools.parser import ToolFormat

FORMAT = ToolFormat(
    lambda: JsonCalls(prefix="<|python_tag|>"),
    signs=("<|python_tag|>", "Environment: ipython", '{"name": function name, "parameters"'),
    keep_special=True,
)
