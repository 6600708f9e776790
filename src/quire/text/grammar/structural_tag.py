"""xgrammar's structural tags as Lark: free text in which tags open parts that follow a schema, a regex or a grammar.

vLLM takes them as `structural_tag`. The older form, `structures` and `triggers`, is read as `triggered_tags`."""

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.core.structured import Structured
from quire.text.grammar.json_schema import enforced_schema, options
from quire.text.grammar.lark import grammar_to_lark, regex_to_lark

MAX_DEPTH = 32


def structural_tag_to_lark(tag: Any, structured: Structured, special_ids: Mapping[str, int]) -> str:
    """Raises ValueError. A text that is the name of a special token means that token, too."""
    if not isinstance(tag, dict):
        raise ValueError("a structural tag is an object with a `format`")
    writer = _Writer(structured, special_ids)
    start = writer.rule(tag.get("format", {**tag, "type": "structural_tag"}), 0)
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.lines]) + "\n"


def _triggered_tags(tag: Mapping[str, Any]) -> dict[str, Any]:
    tags = [
        {**each, "content": {"type": "json_schema", "json_schema": each.get("schema", True)}}
        for each in _tags({**tag, "tags": tag.get("structures")})
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Writer:
    def __init__(self, structured: Structured, special_ids: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self._structured, self._special_ids = structured, special_ids
        self._special = re.compile("|".join(map(re.escape, sorted(special_ids, key=len, reverse=True))) or r"(?!)")

    def rule(self, node: Any, depth: int, until: str | None = None) -> str:
        """The name of a rule for the node. `until`: the text that ends free text."""
        if not isinstance(node, dict) or depth > MAX_DEPTH:
            raise ValueError(f"a format is an object with a `type`, nested at most {MAX_DEPTH} deep")
        return self._add(self._body(node, depth, until))

    def _body(self, node: dict[str, Any], depth: int, until: str | None) -> str:
        match node.get("type"):
            case "const_string":
                return self._text(_string(node, "value"))
            case "json_schema":
                schema = enforced_schema(node.get("json_schema"), self._structured)
                return f"%json {json.dumps({**schema, 'x-guidance': options(self._structured)})}"
            case "regex":
                return f"/{regex_to_lark(_string(node, 'pattern'))}/"
            case "grammar":
                return f"%lark {{\n{grammar_to_lark(_string(node, 'grammar'), self._special_ids)}\n}}"
            case "any_text":
                return r"/(?s:.*)/" if until is None else self._free_text(until)
            case "any_tokens":  # not xgrammar's: text and special tokens, but for those that end it
                special = ",".join(map(str, sorted(self._special_ids.values())))
                return rf"(/(?s:.+)/ | <[{special}]>)*" if special else r"/(?s:.*)/"
            case "sequence":
                return " ".join(self.rule(each, depth + 1) for each in _list(node, "elements"))
            case "or":
                return " | ".join(self.rule(each, depth + 1) for each in _list(node, "elements"))
            case "tag":
                return self._tag(node, depth)
            case "structural_tag":
                return self._triggered(_triggered_tags(node), depth)
            case "triggered_tags":
                return self._triggered(node, depth)
            case "tags_with_separator":
                tags = " | ".join(self.rule(each, depth + 1) for each in _tags(node))
                tail = "" if node.get("stop_after_first") else f" ({self._text(_string(node, 'separator'))} ({tags}))*"
                return f"({tags}){tail}" if node.get("at_least_one") else f"(({tags}){tail})?"
            case other:
                raise ValueError(f"a format of type `{other}` is not supported")

    def _tag(self, node: dict[str, Any], depth: int, trigger: str = "") -> str:
        begin, end = _string(node, "begin"), _string(node, "end")
        content = node.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text":
            if not end:
                raise ValueError("a tag of free text needs an `end`")
            return f"{self._text(begin[len(trigger) :])} {self.rule(content, depth + 1, end)}"
        return f"{self._text(begin[len(trigger) :])} {self.rule(content, depth + 1)} {self._text(end)}"

    def _triggered(self, node: dict[str, Any], depth: int) -> str:
        """Free text up to a trigger, then the rest of one of its tags; again and again."""
        triggers = [text for text in _list(node, "triggers") if isinstance(text, str) and text]
        tags = _tags(node)
        parts = []
        for trigger in triggers:
            opened = [
                self._add(self._tag(tag, depth, trigger)) for tag in tags if _string(tag, "begin").startswith(trigger)
            ]
            if opened:
                parts.append(f"{self._free_text(trigger)} ({' | '.join(opened)})")
        if not parts or any(not _string(tag, "begin").startswith(tuple(triggers)) for tag in tags):
            raise ValueError("every tag begins with one of the triggers")
        rest = self._add(r"/(?s:.*)/")
        if node.get("stop_after_first"):
            return f"({' | '.join(parts)})" + ("" if node.get("at_least_one") else f" | {rest}")
        return f"({' | '.join(parts)}){'+' if node.get('at_least_one') else '*'} {rest}"

    def _free_text(self, until: str) -> str:
        """Any text up to and with this one."""
        if until in self._special_ids:
            return f"{self._add(r'/(?s:.*)/')} <[{self._special_ids[until]}]>"
        name = f"p{len(self.lines)}"
        self.lines.append(f"{name}[lazy]: /(?s:.*)/ {json.dumps(until)}")
        return name

    def _text(self, text: str) -> str:
        """The text; where a special token's name stands in it, that token or its spelling."""
        parts, last = [], 0
        for match in self._special.finditer(text):
            parts += [
                json.dumps(text[last : match.start()]),
                f"(<[{self._special_ids[match[0]]}]> | {json.dumps(match[0])})",
            ]
            last = match.end()
        parts.append(json.dumps(text[last:]))
        return " ".join(part for part in parts if part != '""') or '""'

    def _add(self, body: str) -> str:
        name = f"p{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name


def _string(node: Mapping[str, Any], key: str) -> str:
    value = node.get(key, "")
    if isinstance(value, list) and len(value) == 1:  # xgrammar takes several ends
        value = value[0]
    if not isinstance(value, str):
        raise ValueError(f"`{key}` of a format of type `{node.get('type')}` is not a text")
    return value


def _list(node: Mapping[str, Any], key: str) -> list[Any]:
    value = node.get(key)
    if not isinstance(value, list) or not value:
        raise ValueError(f"`{key}` of a format of type `{node.get('type')}` is not a list")
    return value


def _tags(node: Mapping[str, Any]) -> list[dict[str, Any]]:
    tags = _list(node, "tags")
    if not all(isinstance(tag, dict) for tag in tags):
        raise ValueError("`tags` is not a list of tags")
    return [{**tag, "type": "tag"} for tag in tags]
