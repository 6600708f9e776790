"""`[name(city="Paris", days=3), other()]`, the whole answer: Llama 3.2 and 4, LFM2 and others that write Python."""

import ast
import json

from quire.text.tools.parser import CallDelta, ToolFormat, ToolParserOutput

_LONGEST = 1 << 16  # characters; the parser's time grows with them


class PythonicToolParser:
    """A call can be told when the list is complete: only then is it known to be one."""

    def __init__(self) -> None:
        self._text = ""
        self._plain = False

    def push(self, text: str) -> ToolParserOutput:
        if self._plain:
            return ToolParserOutput(text)
        self._text += text
        start = self._text.lstrip()
        if start and (not start.startswith("[") or len(start) > _LONGEST):
            self._plain = True
            return ToolParserOutput(self._text)
        return ToolParserOutput()

    def flush(self) -> ToolParserOutput:
        if self._plain:
            return ToolParserOutput()
        calls = _calls(self._text.strip())
        return ToolParserOutput(calls=calls) if calls else ToolParserOutput(self._text)


def _calls(text: str) -> list[CallDelta]:
    """None if it is anything but a list of calls with literal keywords."""
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


FORMAT = ToolFormat(PythonicToolParser, signs=("[func_name1(params_name1=", "<|tool_list_start|>"))
