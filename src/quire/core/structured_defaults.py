"""How JSON is written in structured output: its white space, and whether objects may have other properties."""

import json
import re
from dataclasses import dataclass

from quire.core.errors import BadRequest

MAX_WHITESPACE_PATTERN = 200  # characters

# The last one has no effect: there is one backend.
_FLAGS = ("disable_any_whitespace", "disable_additional_properties", "enable_in_reasoning", "disable_fallback")

_BLANK = r"[ \t\n\r]|\\[tnrs]|\\x(?:20|09|0[aAdD])"
_WHITESPACE_PATTERN = re.compile(rf"(?:{_BLANK}|\[(?:{_BLANK})+\]|\(\?:|[()|?*+]|\{{\d+(?:,\d*)?\}})*")


@dataclass(frozen=True, slots=True)
class StructuredDefaults:
    """How structured output is written where a request does not say. The keys of `structured_outputs_config`."""

    whitespace_pattern: str | None = None
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False  # a chat's answer is held from its first token, so that it has no reasoning

    @classmethod
    def of(cls, text: str | None) -> "StructuredDefaults":
        """From a JSON object with vLLM's keys."""
        where = "structured_outputs_config"
        try:
            given = {} if text is None else json.loads(text)
        except ValueError as error:
            raise BadRequest(
                f"{where} is not JSON: {error}", 'write {"disable_any_whitespace": true}', param=where
            ) from None
        if not isinstance(given, dict):
            raise BadRequest(f"{where} is not a JSON object", 'write {"disable_any_whitespace": true}', param=where)
        if (backend := given.pop("backend", "auto")) not in ("auto", "guidance"):
            raise BadRequest(f"{where} has the backend `{backend}`", "there is one: guidance", param=where)
        flags = {name: given.pop(name, False) for name in _FLAGS}
        pattern = given.pop("whitespace_pattern", None)
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise BadRequest(f"{where}.{name} is {json.dumps(value)}", "give true or false", param=where)
        if given:
            known = f"the keys are backend, whitespace_pattern, {', '.join(flags)}"
            raise BadRequest(f"{where} has `{next(iter(given))}`", known, param=where)
        pattern = whitespace(pattern, flags["disable_any_whitespace"], f"{where}.whitespace_pattern")
        return cls(pattern, flags["disable_additional_properties"], flags["enable_in_reasoning"])


STRUCTURED_DEFAULTS = StructuredDefaults()  # where no config is given


def whitespace(
    pattern: object, disabled: bool | None, where: str = "structured_outputs.whitespace_pattern"
) -> str | None:
    """The regex for white space between the elements of JSON, checked; empty: there is none, None: as usual."""
    if pattern is None or disabled:
        return "" if disabled else None
    if not isinstance(pattern, str) or len(pattern) > MAX_WHITESPACE_PATTERN:
        raise BadRequest(f"{where} is not a regex of at most {MAX_WHITESPACE_PATTERN} characters", param=where)
    if not _WHITESPACE_PATTERN.fullmatch(pattern):
        hint = r"write spaces, \n, \r, \t and \s, sets of them, groups, | and repeats: [ \n]{0,8}"
        raise BadRequest(f"{where} is `{pattern}`, which has more than white space in it", hint, param=where)
    return pattern
