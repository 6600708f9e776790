"""Reads lines from the user and joins them into messages."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from quire.cli.parser import UsageError

ReadLine = Callable[[str], str]  # takes a prompt; raises EOFError at the end

FENCE = '"""'


def read_messages(read_line: ReadLine) -> Iterator[str]:
    """Messages until the input ends. A line that ends in a backslash goes on; \"\"\" opens and closes several lines.

    An input that ends inside a message ends the message too. Ctrl-C passes through, and forgets what was begun."""
    while True:
        try:
            line = read_line(">>> ")
        except EOFError:
            return
        if line.lstrip().startswith(FENCE):
            yield _fenced(line.lstrip().removeprefix(FENCE), read_line)
        else:
            yield _continued(line, read_line)


def line_reader() -> ReadLine:
    """From a terminal with editing and a history; from anything else silently."""
    if sys.stdin.isatty():
        return input

    def read(prompt: str) -> str:
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as failure:
            raise UsageError(f"the input is not UTF-8: {failure}", "convert it, with iconv say") from failure
        if not line:
            raise EOFError
        return line.rstrip("\n")

    return read


def keep_history(path: Path, limit: int = 1000) -> None:
    """Arrow keys bring back what was typed, also in earlier chats. Without readline there is just no history."""
    try:
        import readline
    except ImportError:
        return
    import atexit

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # what people type is theirs
        readline.read_history_file(path)
    except OSError:  # an unreadable history is no reason not to talk
        return
    readline.set_history_length(limit)
    atexit.register(readline.write_history_file, path)


def _fenced(line: str, read_line: ReadLine) -> str:
    lines = []
    while FENCE not in line:
        lines.append(line)
        try:
            line = read_line("... ")
        except EOFError:
            return "\n".join(lines).strip("\n")
    return "\n".join([*lines, line.partition(FENCE)[0]]).strip("\n")


def _continued(line: str, read_line: ReadLine) -> str:
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        try:
            lines.append(read_line("... "))
        except EOFError:
            break
    return "\n".join(lines)
