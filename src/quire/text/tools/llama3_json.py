"""The whole answer is `{"name": ..., "parameters": {...}}`, several divided by semicolons: Llama 3."""

from quire.text.tools.call import ToolFormat
from quire.text.tools.json_calls import JsonCalls

FORMAT = ToolFormat(
    lambda: JsonCalls(prefix="<|python_tag|>"),
    signs=("<|python_tag|>", "Environment: ipython", '{"name": function name, "parameters"'),
    keep_special=True,
)
