"""The sandbox of chat templates: jinja2's, within a budget of time and characters.

Every loop and call checks the clock. An operation that can make a long value from short ones tells its size to the
budget before it runs: one call that takes seconds could not be interrupted."""

import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from quire.text.chat.render_budget import RenderBudget, current_budget

MAX_INT_BITS = 4096
ELEMENT_CHARACTERS = 64  # what an element of a new list counts as

# Filters and methods whose result can be longer than what they are given.
_GROWING = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice", "wordwrap", "round", "tojson"}
)
_CONSUMING = frozenset({"list", "join", "sort", "unique", "reverse", "sum"})  # of generators, whose length is unknown
_REMOVED_FILTERS = ("pprint", "urlize", "xmlattr")  # of no use in a prompt, and slow on long texts
_WIDE_FORMAT = re.compile(r"[0-9]{4}|\*|\{[^{}]*\{")  # a width of 1000 and more, or one that is an argument


class Generation(Extension):
    """`{% generation %}` marks assistant text for training. Here it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Templates see plain data only, and change none of it."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        # Not optimized: constants are then computed while it renders, within the budget.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], optimized=False)
        del self.globals["lipsum"]
        self.filters = {name: _bounded(name, made) for name, made in self.filters.items()}
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.tests = {name: _bounded(name, made) for name, made in self.tests.items()}

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = _bounded(name, function)

    # -- called by compiled templates ----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Each round of a loop and each call of a macro begins with it."""
        _budget().step()
        return True

    def concat(self, parts: Iterable[str]) -> str:
        """The output of a template, a macro or a block."""
        budget, made = _budget(), []
        for part in parts:
            budget.spend(len(part))
            made.append(part)
        return "".join(made)

    def joined(self, *values: Any) -> str:
        """`a ~ b`"""
        return self.concat(map(str, values))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _budget().spend(_size_of_operation(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        name, owner = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = _spend_on_call(name, owner, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        _spend_on_result(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatter = super().wrap_str_format(value)
        if formatter is not None:
            _check_format(getattr(value, "__self__", ""))
        return formatter

    # -- compiling -----------------------------------------------------------------------------------------------------

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _Steps().visit(template)
        return template


class _Steps(NodeTransformer):
    """Puts calls of the sandbox where jinja2 has no hook: in loops, macros and `~`."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_sandbox_call("step")).set_lineno(node.lineno))
        if node.test is not None:
            node.test = nodes.And(_sandbox_call("step"), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_sandbox_call("step")).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _sandbox_call("joined", node.nodes)


def _bounded(name: str, function: Any) -> Callable[..., Any]:
    """A filter or test of Jinja's that stays within the budget."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # the first argument is a context

    @wraps(function)
    def within_budget(*args: Any, **kwargs: Any) -> Any:
        before, value, rest = args[:skipped], args[skipped], args[skipped + 1 :]
        if name in _CONSUMING and not hasattr(value, "__len__"):
            value = list(value)
        rest = _spend_on_call(name, value, rest, kwargs)
        result = function(*before, value, *rest, **kwargs)
        _spend_on_result(result)
        return result

    return within_budget


def _sandbox_call(name: str, arguments: list[nodes.Expr] | None = None) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments or [], [], None, None)


def _budget() -> RenderBudget:
    budget = current_budget()
    assert budget is not None, "templates are rendered within a budget"
    return budget


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _cost(value: Any) -> int:
    """Characters that a copy of the value counts as."""
    return len(value) if isinstance(value, str) else ELEMENT_CHARACTERS * _length(value)


def _size_of_operation(operator: str, left: Any, right: Any) -> int:
    """An upper bound of the characters of its result."""
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**" and left.bit_length() * abs(right) > MAX_INT_BITS:
            raise TemplateError(f"{operator} of numbers that are too large")
        if operator == "*" and left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise TemplateError(f"{operator} of numbers that are too large")
        return 0
    if operator == "+":
        return _cost(left) + _cost(right)
    if operator == "*":
        number = next((each for each in (left, right) if isinstance(each, int)), 1)
        return (_cost(left) + _cost(right)) * max(number, 0)
    if operator == "%" and isinstance(left, str):
        _check_format(left)
        return len(left) + sum(map(len, map(str, right if isinstance(right, tuple) else [right])))
    return 0


def _spend_on_call(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Spend what a filter or a method of a text can make. -> its arguments, generators as lists"""
    budget = _budget()
    budget.step()
    given = [*args, *kwargs.values()]
    if name == "join":
        if not isinstance(value, str):  # the filter: the separator is an argument
            budget.spend(sum(map(_cost, value)) + len(value) * sum(map(_length, given)))
        elif args:
            args = (list(args[0]), *args[1:])
            budget.spend(sum(map(_cost, args[0])) + len(args[0]) * len(value))
    elif name == "replace" and len(given) >= 2:
        text, old, new = str(value), str(given[0]), str(given[1])
        budget.spend(len(text) + text.count(old) * len(new))
    elif name == "format":
        _check_format(str(value))
    elif name in _GROWING:
        sizes = [abs(each) for each in given if isinstance(each, int)] + list(map(_length, given))
        budget.spend((_length(value) + 1) * max(sizes, default=1))
    return args


def _spend_on_result(result: Any) -> None:
    _budget().spend(_cost(result))


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateError("a format with a width of 1000 or more")
