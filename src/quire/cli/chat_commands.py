"""Commands of the chat: lines that begin with a slash."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.cli.conversation import Conversation
from quire.cli.parser import UsageError, nearest


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The outcome of a command: `note` is shown, `ask` is asked again, `leave` ends the chat."""

    note: str = ""
    ask: str | None = None
    leave: bool = False


def run_command(line: str, chat: Conversation) -> CommandResult:
    """Run one command. If it raises, nothing has changed."""
    name, _, rest = line.partition(" ")
    command = COMMANDS.get(SYNONYMS.get(name, name))
    if command is None:
        raise UsageError(f"there is no command `{name}`", nearest(name, COMMANDS) or "/help lists them")
    return command.act(chat, rest.strip())


def _help(chat: Conversation, rest: str) -> CommandResult:
    rows = [f"  {f'{name} {command.takes}':<22} {command.does}" for name, command in COMMANDS.items()]
    rows += [
        '  """                    opens and closes a message of several lines; so does a backslash at a line\'s end'
    ]
    rows += ["  Ctrl-C                 stops an answer; Ctrl-D leaves"]
    return CommandResult("\n".join(rows))


def _clear(chat: Conversation, rest: str) -> CommandResult:
    chat.turns.clear()
    return CommandResult("forgotten")


def _system(chat: Conversation, rest: str) -> CommandResult:
    if not rest:
        return CommandResult(f"system: {chat.system if chat.system is not None else 'none'}")
    chat.system = None if rest == "none" else rest
    return CommandResult("system message removed" if rest == "none" else "system message set")


def _set(chat: Conversation, rest: str) -> CommandResult:
    name, _, value = rest.partition(" ")
    if not name or not value:
        raise UsageError("/set takes a name and a value", "for example `/set temperature 0.2`; /params shows all")
    chat.set(name, value.strip())
    return CommandResult(f"{name} = {chat.shown_params()[name]}")


def _params(chat: Conversation, rest: str) -> CommandResult:
    return CommandResult("\n".join(f"  {name:<20} {value}" for name, value in chat.shown_params().items()))


def _retry(chat: Conversation, rest: str) -> CommandResult:
    question = chat.take_back()
    if question is None:
        raise UsageError("nothing was asked yet", "type a message first")
    return CommandResult(ask=question)


def _save(chat: Conversation, rest: str) -> CommandResult:
    path = _path(rest, "/save")
    try:
        chat.save(path)
    except OSError as failure:
        raise UsageError(f"{path} cannot be written: {failure.strerror}", "choose another name") from failure
    return CommandResult(f"saved {len(chat.turns)} messages to {path}")


def _load(chat: Conversation, rest: str) -> CommandResult:
    path = _path(rest, "/load")
    try:
        chat.load(path)
    except OSError as failure:
        raise UsageError(f"{path} cannot be read: {failure.strerror}", "`/save FILE` writes one") from failure
    return CommandResult(f"loaded {len(chat.turns)} messages from {path}")


def _quit(chat: Conversation, rest: str) -> CommandResult:
    return CommandResult(leave=True)


def _path(rest: str, command: str) -> Path:
    if not rest:
        raise UsageError(f"{command} takes a file", f"for example `{command} talk.json`")
    return Path(rest).expanduser()


@dataclass(frozen=True, slots=True)
class Command:
    takes: str
    does: str
    act: Callable[[Conversation, str], CommandResult]


COMMANDS = {
    "/help": Command("", "show this", _help),
    "/clear": Command("", "forget what was said; the system message stays", _clear),
    "/system": Command("[TEXT|none]", "show, set or remove the system message", _system),
    "/set": Command("NAME VALUE", "change a sampling parameter", _set),
    "/params": Command("", "show the sampling parameters", _params),
    "/retry": Command("", "answer the last question again", _retry),
    "/save": Command("FILE", "keep the conversation in a file", _save),
    "/load": Command("FILE", "go on from a file", _load),
    "/quit": Command("", "leave", _quit),
}

SYNONYMS = {"/?": "/help", "/bye": "/quit", "/exit": "/quit"}  # as in Ollama and llama-cli
