"""The whole answer is `{"name": ..., "parameters": {...}}`, several divided by semicolons: Llama 3."""

from quire.text.tools.json_parser import JsonToolParser
from quire.text.tools.parser import ToolFormat

FORMAT = ToolFormat(
    lambda: JsonToolParser(prefix="<|python_tag|>"),
    signs=("<|python_tag|>", "Environment: ipython", '{"name": function name, "parameters"'),
    keep_special=True,
)
