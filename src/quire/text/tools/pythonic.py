"""`[name(city="Paris", days=3), other()]`: Llama 3.2 and 4, LFM2, OLMo 3 and others that write Python."""

import ast
import json
from typing import Any

from quire.text.tools.parser import CallDelta, ToolParserOutput

_MAX_CHARACTERS = 1 << 16  # bounds the time of Python's parser
_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonicToolParser:
    """The whole completion is a list of calls, emitted when it is complete: only then it is known to be one."""

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
        calls = [CallDelta(index, *call) for index, call in enumerate(python_calls(self._text))]
        return ToolParserOutput(calls=calls) if calls else ToolParserOutput(self._text)


def python_calls(text: str) -> list[tuple[str, str]]:
    """The calls in a list of calls, or of a call a line, with literal keyword arguments; empty if the text is anything
    else."""
    if len(text) > _MAX_CHARACTERS:
        return []
    for source in (text.strip(), text.strip().replace("\n", "\\n")):  # some leave newlines in their strings
        try:
            return [_call(call) for call in _expressions(source)]
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass
    return []


def _expressions(source: str) -> list[ast.expr]:
    expressions: list[ast.expr] = []
    for statement in ast.parse(source).body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("not an expression")
        expressions += statement.value.elts if isinstance(statement.value, ast.List) else [statement.value]
    return expressions


def _call(call: ast.expr) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("not a call with keywords alone")
    arguments = {str(keyword.arg): ast.literal_eval(_JsonNames().visit(keyword.value)) for keyword in call.keywords}
    return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False)


class _JsonNames(ast.NodeTransformer):
    """Models mix `true`, `false` and `null` into Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def write_python_calls(calls: list[dict[str, Any]]) -> str:
    texts = []
    for call in calls:
        pairs = ", ".join(f"{key}={value!r}" for key, value in call["arguments"].items())
        texts.append(f"{call['name']}({pairs})")
    return f"[{', '.join(texts)}]"
