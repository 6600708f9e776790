"""`{"name": ..., "arguments": {...}}`, or `{name: {...}}`, parsed incrementally."""

import json

from quire.text.tools.parser import CallDelta

_SPACE = " \t\r\n"
_NAMES = frozenset({"name", "tool_name"})
_ARGUMENTS = frozenset({"arguments", "parameters"})


class JsonCallReader:
    """One call. `push` until `done` or `broken`; once the call is `named`, it is known to be one.

    A state machine over characters: `_state` says what comes next. Arguments pass through as they were written."""

    def __init__(self, index: int, keyed: bool = False) -> None:
        """`keyed`: the first key is the name, and its value the arguments."""
        self.index = index
        self._keyed = keyed
        self.done = False
        self.broken = False  # not a JSON object, or one without a name
        self.named = False
        self.raw = ""  # the text so far
        self._state = "open"
        self._key = ""
        self._value: list[str] = []
        self._is_string = False  # the value is a string
        self._depth = 0  # brackets open within the value
        self._in_string = self._escape = False
        self._held: str | None = None  # arguments that came before the name
        self._has_arguments = False

    def push(self, text: str) -> tuple[list[CallDelta], str]:
        """The new deltas, and the text after the end of the call."""
        deltas: list[CallDelta] = []
        for index, char in enumerate(text):
            if self.done or self.broken:
                self.raw += text[:index]
                return deltas, text[index:]
            self._step(char, deltas)
        self.raw += text
        if self._state == "value" and self._streams() and self._value:
            self._emit_arguments("".join(self._value), deltas)
            self._value.clear()
        return deltas, ""

    def _step(self, char: str, deltas: list[CallDelta]) -> None:
        state = self._state
        if state == "value":
            self._step_value(char, deltas)
        elif state == "key":
            self._value.append(char)
            if self._string_ends(char):
                self._key, self._state = str(_loads("".join(self._value))), "colon"
                if self._keyed:
                    self._take_name(self._key, deltas)
                    self._key = "arguments"
        elif char in _SPACE:
            pass
        elif state == "open" and char == "{":
            self._state = "first"
        elif state in ("first", "next") and char == '"':
            self._value, self._state, self._in_string = ['"'], "key", True
        elif state == "colon" and char == ":":
            self._value, self._state, self._depth, self._in_string = [], "value", 0, False
        elif state == "after" and char == ",":
            self._state = "next"
        elif state in ("first", "after") and char == "}":
            self._end(deltas)
        else:
            self.broken = True

    def _step_value(self, char: str, deltas: list[CallDelta]) -> None:
        if not self._value and not self._depth and char in _SPACE:
            return
        if not self._value and not self._depth:
            self._is_string = char == '"'
        if self._in_string:
            self._value.append(char)
            if self._string_ends(char) and not self._depth:
                self._end_value(deltas)
        elif not self._depth and char in ",}":  # the end of a number, or of true, false, null
            self._end_value(deltas)
            self._step(char, deltas)
        else:
            self._value.append(char)
            if char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self._end_value(deltas)

    def _string_ends(self, char: str) -> bool:
        if self._escape:
            self._escape = False
        elif char == "\\":
            self._escape = True
        elif char == '"':
            self._in_string = False
        return not self._in_string

    def _streams(self) -> bool:
        """Arguments are emitted as they come if they are an object; a string that holds JSON has to be complete."""
        return self._key in _ARGUMENTS and self._depth > 0

    def _end_value(self, deltas: list[CallDelta]) -> None:
        text, self._value, self._state = "".join(self._value), [], "after"
        if self._key in _NAMES:
            self._take_name(_loads(text), deltas)
        elif self._key in _ARGUMENTS:
            if self._is_string:
                text = str(_loads(text))
            self._emit_arguments("{}" if text.strip() == "null" else text, deltas)

    def _take_name(self, name: object, deltas: list[CallDelta]) -> None:
        if not isinstance(name, str) or not name or self.named:
            self.broken = True
            return
        self.named = True
        deltas.append(CallDelta(self.index, name, self._held or ""))

    def _emit_arguments(self, text: str, deltas: list[CallDelta]) -> None:
        self._has_arguments = True
        if self.named:
            deltas.append(CallDelta(self.index, "", text))
        else:
            self._held = (self._held or "") + text

    def _end(self, deltas: list[CallDelta]) -> None:
        self.done = self.named
        self.broken = not self.named
        if self.named and not self._has_arguments:
            deltas.append(CallDelta(self.index, "", "{}"))


def _loads(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return None
