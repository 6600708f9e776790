"""Tool calls in the text of a model: the known formats. Each is a module with a `FORMAT`."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.text.tools.parser import ToolFormat

# In the order in which their `template_markers` are looked for in a chat template.
FORMATS = {
    "mistral": "quire.text.tools.mistral",
    "qwen3_coder": "quire.text.tools.qwen3_coder",
    "granite": "quire.text.tools.granite",
    "hermes": "quire.text.tools.hermes",
    "pythonic": "quire.text.tools.pythonic",
    "llama3_json": "quire.text.tools.llama3_json",
    "phi4": "quire.text.tools.phi4",
}


def load(name: str) -> "ToolFormat":
    tool_format: ToolFormat = import_module(FORMATS[name]).FORMAT
    return tool_format
