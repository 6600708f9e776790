"""argparse that raises `UsageError`s, and names the nearest flag for an unknown one."""

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from quire.core.errors import QuireError

_NO_NAME = re.compile(r" (?=\[|--|[A-Z])")  # where a command's arguments begin


class UsageError(QuireError):
    """The command line cannot be understood."""

    status, code = 400, "usage"


class Parser(argparse.ArgumentParser):
    """`command`: such as "pull [MODEL]" or "bench latency". `examples` end the help text. `intermixed`: flags may stand
    between arguments that can be left out."""

    def __init__(self, command: str, description: str, examples: str, *, intermixed: bool = False) -> None:
        super().__init__(
            prog=f"quire {_NO_NAME.split(command, maxsplit=1)[0]}",
            usage=f"quire {command} [flags]",
            description=description,
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._intermixed = intermixed

    @property
    def flags(self) -> Mapping[str, argparse.Action]:
        """Every flag, as it is written -> what it does."""
        return self._option_string_actions

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        parse = self.parse_known_intermixed_args if self._intermixed else self.parse_known_args
        arguments, unknown = parse([_with_dashes(argument) for argument in argv])
        if unknown:
            raise self._unknown(unknown[0])
        return arguments

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see `{self.prog} --help`")

    def _unknown(self, argument: str) -> UsageError:
        if not argument.startswith("-"):
            return UsageError(f"`{argument}` is one argument too many", "put text with spaces in quotes")
        flag = argument.partition("=")[0]
        known = [name for name, action in self.flags.items() if action.help is not argparse.SUPPRESS]
        return UsageError(f"there is no flag `{flag}`", nearest(flag, known) or f"see `{self.prog} --help`")


def nearest(name: str, known: Iterable[str]) -> str:
    """A question naming the nearest match, or an empty string."""
    from difflib import get_close_matches

    bare = {other.strip("-/"): other for other in known}  # dashes do not count as similarity
    near = get_close_matches(name.strip("-/"), bare, n=1, cutoff=0.6)
    return f"did you mean `{bare[near[0]]}`?" if near else ""


def _with_dashes(argument: str) -> str:
    """--max_model_len=8 is --max-model-len=8."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value
