"""The whole completion is `{"name": ..., "parameters": {...}}`, or several with semicolons between: Llama 3."""

from quire.text.tools.json_parser import JsonToolParser
from quire.text.tools.parser import ToolFormat

FORMAT = ToolFormat(
    lambda: JsonToolParser(prefix="<|python_tag|>"),
    template_markers=("<|python_tag|>", "Environment: ipython", '{"name": function name, "parameters"'),
    keep_special=True,
)
