"""`[name(city="Paris", days=3), other()]`, the whole completion: Llama 3.2 and 4, LFM2 and others that write Python."""

import ast
import json

from quire.text.tools.parser import CallDelta, ToolFormat, ToolParserOutput

_MAX_CHARACTERS = 1 << 16  # bounds the time of Python's parser


class PythonicToolParser:
    """Calls are emitted when the list is complete: only then is it known to be one."""

    def __init__(self) -> None:
        self._text = ""
        self._plain = False  # not a list of calls: all text is content

    def push(self, text: str) -> ToolParserOutput:
        if self._plain:
            return ToolParserOutput(text)
        self._text += text
        start = self._text.lstrip()
        if start and (not start.startswith("[") or len(start) > _MAX_CHARACTERS):
            self._plain = True
            return ToolParserOutput(self._text)
        return ToolParserOutput()

    def flush(self) -> ToolParserOutput:
        if self._plain:
            return ToolParserOutput()
        calls = _parse_calls(self._text.strip())
        return ToolParserOutput(calls=calls) if calls else ToolParserOutput(self._text)


def _parse_calls(text: str) -> list[CallDelta]:
    """Empty if the text is anything but a list of calls with literal keyword arguments."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            return []
        calls = []
        for index, call in enumerate(tree.elts):
            if not isinstance(call, ast.Call) or call.args:
                return []
            arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
            calls.append(CallDelta(index, ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False)))
        return calls
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return []


FORMAT = ToolFormat(PythonicToolParser, template_markers=("[func_name1(params_name1=", "<|tool_list_start|>"))
