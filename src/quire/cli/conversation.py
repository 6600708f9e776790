"""A conversation: its messages, its sampling parameters, and its file."""

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from quire.cli.parser import UsageError, nearest
from quire.cli.values import bare, reader
from quire.core.errors import BadRequest
from quire.core.params import SamplingParams

Message = dict[str, str]

# The SamplingParams that /set can change, in the order in which they are shown.
SETTABLE = (
    *(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ),
    *("no_repeat_ngram_size", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("dry_sequence_breakers", "top_n_sigma", "dynatemp_range", "dynatemp_exponent", "xtc_probability"),
    *("xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta", "samplers"),
    *("max_tokens", "min_tokens", "seed", "stop"),
)
_ROLES = ("system", "user", "assistant")


@dataclass(slots=True)
class Conversation:
    params: SamplingParams
    system: str | None = None
    adapter: str = ""
    turns: list[Message] = field(default_factory=list)  # user and assistant, alternating

    def messages(self) -> list[Message]:
        head = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*head, *self.turns]

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self) -> str | None:
        """Remove the last question and its answer -> the question"""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] == "user":
                return turn["content"]
        return None

    def set(self, name: str, text: str) -> None:
        """Change one parameter. If SamplingParams refuses it, nothing changes."""
        if name not in SETTABLE:
            raise UsageError(
                f"there is no parameter `{name}`", nearest(name, SETTABLE) or f"there are {', '.join(SETTABLE)}"
            )
        kind = get_type_hints(SamplingParams)[name]
        try:
            value = _read(kind, text)
        except ValueError as failure:
            raise UsageError(
                f"{name}: {failure}", f"for example `/set {name} {_written(getattr(self.params, name))}`"
            ) from None
        self.params = replace(self.params, **{name: value})

    def shown_params(self) -> dict[str, str]:
        return {name: _written(getattr(self.params, name)) for name in SETTABLE}

    def save(self, path: Path) -> None:
        """Write it as JSON. A file that is something else is not overwritten."""
        if path.exists():
            try:
                _read_file(path)
            except BadRequest:
                raise UsageError(f"{path} exists and is not a saved conversation", "choose another name") from None
        plain = SamplingParams()
        changed = {
            f.name: value for f in fields(plain) if (value := getattr(self.params, f.name)) != getattr(plain, f.name)
        }
        text = json.dumps({"messages": self.messages(), "params": changed}, ensure_ascii=False, indent=2)
        draft = path.with_name(path.name + ".part")
        draft.write_text(text + "\n", encoding="utf-8")
        draft.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a saved conversation. If it raises, nothing has changed."""
        messages, params = _read_file(path)
        self.params = params
        self.system = next((message["content"] for message in messages if message["role"] == "system"), None)
        self.turns = [message for message in messages if message["role"] != "system"]


def _read(kind: Any, text: str) -> Any:
    if kind == list[str]:
        return [] if text == "none" else [text]
    if bare(kind) == list[str]:
        return None if text == "none" else text.split(";")
    if text == "none" and bare(kind) is not kind:
        return None
    return reader(kind)(text)


def _written(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(repr, value)) or "none"
    return "none" if value is None else str(value)


def _read_file(path: Path) -> tuple[list[Message], SamplingParams]:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        messages = [{"role": message["role"], "content": message["content"]} for message in saved["messages"]]
        params = SamplingParams(**saved["params"])
    except (ValueError, KeyError, TypeError) as failure:
        raise BadRequest(f"{path} is not a saved conversation: {failure}", "`/save FILE` writes one") from failure
    for message in messages:
        if message["role"] not in _ROLES or not isinstance(message["content"], str):
            raise BadRequest(f"{path} has a message of {message['role']!r} that is not text", "`/save FILE` writes one")
    return messages, params
