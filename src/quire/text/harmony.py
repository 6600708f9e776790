"""gpt-oss's answers, harmony: messages with a header that names a channel, and a recipient if it is a tool call.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f json<|message|>{...}`"""

import re

from quire.text.answer_parser import AnswerDelta, AnswerParser
from quire.text.markers import partial_marker
from quire.text.tools.parser import CallDelta, ToolParserOutput

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_HEADER_STARTS = ("<|start|>", "<|channel|>", _MESSAGE, "<|constrain|>", "to=")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_MAX_HEADER = 512  # characters


class HarmonyParser(AnswerParser):
    """Parses one sample. The prompt ends with `<|start|>assistant`, so a header comes first."""

    def __init__(self, calls: bool, parallel: bool = True) -> None:
        """`calls`: there are tools to call; without them, what is written to one is content."""
        super().__init__(parallel=parallel)
        self._calls = calls
        self._text = ""  # not parsed yet
        self._kind: str | None = None  # of the open message: reasoning, content or call; None: a header comes
        self._num_calls = 0
        self._empty = True  # nothing of the open message was passed on
        self._said = {"reasoning": False, "content": False}  # a message of this kind had text

    def push(self, text: str, ended: bool = False) -> AnswerDelta:
        delta = AnswerDelta()
        self._text += text
        while self._text and (self._header(delta) if self._kind is None else self._body(delta)):
            pass
        if ended:
            self._end(delta)
        if not self._parallel:
            delta.calls = [call for call in delta.calls if call.index == 0]
        return delta

    def _header(self, delta: AnswerDelta) -> bool:
        start = self._text.lstrip()
        if not any(start.startswith(marker) or marker.startswith(start) for marker in _HEADER_STARTS + _ENDS):
            self._open("content")  # a model that does without headers
            return True
        header, found, rest = self._text.partition(_MESSAGE)
        if len(header) > _MAX_HEADER + (0 if found else len(_MESSAGE)):
            self._open("content")
            return True
        if not found:
            return False
        self._text = rest
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        if name not in ("", "assistant") and self._calls:
            self._open("call")
            delta.calls.append(CallDelta(self._num_calls, name))
        else:
            self._open("reasoning" if channel and channel[1] == "analysis" else "content")
        return True

    def _open(self, kind: str) -> None:
        self._kind, self._empty = kind, True

    def _body(self, delta: AnswerDelta) -> bool:
        begins = [(begin, marker) for marker in _ENDS if (begin := self._text.find(marker)) >= 0]
        if begins:
            begin, marker = min(begins)
            self._pass_on(self._text[:begin], delta)
            keep = 0 if marker in ("<|start|>", "<|channel|>") else len(marker)
            self._text = self._text[begin + keep :]
            self._close(delta)
            return True
        end = len(self._text) - partial_marker(self._text, *_ENDS)
        self._pass_on(self._text[:end], delta)
        self._text = self._text[end:]
        return False

    def _pass_on(self, text: str, delta: AnswerDelta) -> None:
        if not text:
            return
        if self._kind == "call":
            delta.calls.append(CallDelta(self._num_calls, "", text))
        else:
            assert self._kind is not None
            if self._empty and self._said[self._kind]:
                text = "\n" + text
            self._said[self._kind] = True
            setattr(delta, self._kind, getattr(delta, self._kind) + text)
        self._empty = False

    def _close(self, delta: AnswerDelta) -> None:
        if self._kind == "call":
            if self._empty:
                delta.calls.append(CallDelta(self._num_calls, "", "{}"))
            self._num_calls += 1
        self._kind = None

    def _end(self, delta: AnswerDelta) -> None:
        if self._kind is None and not self._text.lstrip().startswith(_HEADER_STARTS + _ENDS):
            self._open("content")
        if self._kind is not None:
            self._pass_on(self._text, delta)
            if self._kind != "call" or not self._empty:
                self._close(delta)
        self._text = ""


class HarmonyToolParser:
    """The tool calls and the content; reasoning is left out."""

    def __init__(self) -> None:
        self._parser = HarmonyParser(calls=True)

    def push(self, text: str) -> ToolParserOutput:
        delta = self._parser.push(text)
        return ToolParserOutput(delta.content, delta.calls)

    def flush(self) -> ToolParserOutput:
        delta = self._parser.push("", ended=True)
        return ToolParserOutput(delta.content, delta.calls)
