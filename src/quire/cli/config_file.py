"""`--config FILE`: the flags of a command, kept in a file."""

import argparse
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.cli.parser import Parser, UsageError
from quire.core.errors import QuireError


def add_config_file(parser: Parser, arguments: argparse.Namespace) -> None:
    """What the file says, where the command line does not. Its keys are checked as flags are."""
    path = Path(arguments.config)
    given = read_config_file(path)
    if hasattr(arguments, "named"):
        given.pop("model", None)  # the command line names another
    words = [word for key, value in given.items() for word in _words(parser, path, key, value)]
    try:
        read = parser.parse(words)
    except QuireError as error:
        raise UsageError(f"{path}: {error.message}", error.hint) from None
    for name, value in vars(read).items():
        if not hasattr(arguments, name):
            setattr(arguments, name, value)


def read_config_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        given = tomllib.loads(text) if path.suffix == ".toml" else _yaml(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "--config names a YAML or TOML file") from None
    except ValueError as error:
        raise UsageError(f"{path} is not {'TOML' if path.suffix == '.toml' else 'YAML'}: {error}") from None
    if not isinstance(given, dict):
        raise UsageError(f"{path} has no keys", "write a flag a line, such as `max-model-len: 4096`")
    return {str(key): value for key, value in given.items()}


def _yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]  # a dependency of huggingface-hub

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def _words(parser: Parser, path: Path, key: str, value: Any) -> Iterator[str]:
    """One setting of a file, as the words of a command line."""
    flag = "--" + key.replace("_", "-").lstrip("-")
    if flag == "--config":
        raise UsageError(f"{path} names another file", "put all flags into one")
    action = parser.flags.get(flag)
    if value is None:
        return
    if isinstance(value, bool) and (action is None or action.nargs == 0):
        if value:
            yield flag
        elif f"--no-{flag[2:]}" in parser.flags:
            yield f"--no-{flag[2:]}"
        return
    if isinstance(value, dict) and action is not None and str(action.metavar).startswith("NAME="):
        value = [f"{name}={one}" for name, one in value.items()]
    for one in value if isinstance(value, list) else [value]:
        yield f"{flag}={json.dumps(one) if isinstance(one, dict | bool) else one}"
