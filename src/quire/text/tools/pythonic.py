"""`[name(city="Paris", days=3), other()]`, the whole answer: Llama 3.2 and 4, LFM2 and others that write Python."""

import ast
import json

from quire.text.tools.parser import CallDelta, Found, ToolFormat

_LONGEST = 1 << 16  # characters; the parser's time grows with them


class PythonicCalls:
    """A call can be told when the list is complete: only then is it known to be one."""

    def __init__(self) -> None:
        self._text = ""
        self._plain = False

    def push(self, text: str) -> Found:
        if self._plain:
            return Found(text)
        self._text += text
        start = self._text.lstrip()
        if start and (not start.startswith("[") or len(start) > _LONGEST):
            self._plain = True
            return Found(self._text)
        return Found()

    def flush(self) -> Found:
        if self._plain:
            return Found()
        calls = _calls(self._text.strip())
        return Found(calls=calls) if calls else Found(self._text)


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


FORMAT = ToolFormat(PythonicCalls, signs=("[func_name1(params_name1=", "<|tool_list_start|>"))
