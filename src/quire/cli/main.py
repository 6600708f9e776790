"""`quire COMMAND ...`: find the command, run it, and turn errors into a message and an exit status.

A command is a module with `run(argv) -> exit status`. Only the requested one is imported."""

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper

from quire import __version__
from quire.core.errors import QuireError

COMMANDS = {  # name: (module, what it does)
    "serve": ("quire.cli.serve", "serve a model over HTTP, with the OpenAI API"),
    "gateway": ("quire.cli.gateway", "put one address in front of many engines"),
    "stage": ("quire.cli.stage", "compute some layers of a model for an engine on another machine"),
    "run": ("quire.cli.run", "answer one prompt"),
    "chat": ("quire.cli.chat", "talk to a model in the terminal"),
    "embed": ("quire.cli.embed", "embed texts, or score them against a query"),
    "run-batch": ("quire.cli.run_batch", "answer a file of requests, in the OpenAI batch format"),
    "detect-watermark": ("quire.cli.detect_watermark", "detect whether a text has a watermark"),
    "pull": ("quire.cli.pull", "download a model"),
    "models": ("quire.cli.models", "list the downloaded models"),
    "quantize": ("quire.cli.quantize", "quantize or convert a checkpoint, and measure what it lost"),
    "train-head": ("quire.cli.train_head", "teach a draft head (EAGLE-3, Medusa) to a model with its own answers"),
    "cache": ("quire.cli.cache", "show, check or clear the prefixes that engines keep on disk"),
    "bench": ("quire.cli.bench.command", "measure how fast a model runs here"),
    "plan": ("quire.cli.plan", "show what a model needs, can reach and costs, before it is started"),
    "simulate": ("quire.cli.simulate", "show how engines would serve a workload, on a virtual clock"),
    "doctor": ("quire.cli.doctor", "show what this machine has and what fits on it"),
}

EXAMPLES = """\
examples:
  quire run "What is photosynthesis?"      the default model, downloaded once (93 MB)
  quire chat -m ./model.gguf
  quire serve Qwen/Qwen2.5-0.5B-Instruct --port 8080
  quire COMMAND --help"""

USAGE_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count
BROKEN_PIPE = 141  # 128 + SIGPIPE
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads spin while they wait, and are not used
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()  # a closed pipe raises here, and not at exit
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt as error:
        print(*error.args, file=sys.stderr)  # what is kept, where a command says so
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        _drop_output()
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return status


def _drop_output() -> None:
    """So that Python's own flush at the end has somewhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _dispatch(arguments: list[str]) -> int:
    match arguments:
        case [] | ["-h" | "--help" | "help"]:
            print(_help())
            return 0
        case ["-V" | "--version" | "version"]:
            print(f"quire {__version__}")
            return 0
        case ["help", command, *_]:
            return _dispatch([command, "--help"])
        case [command, *rest] if command in COMMANDS:
            return int(import_module(COMMANDS[command][0]).run(rest))
        case [command, *_]:
            raise _no_such_command(command)
    raise AssertionError(arguments)


def _help() -> str:
    rows = "\n".join(f"  {name:<17} {what}" for name, (_, what) in COMMANDS.items())
    return f"usage: quire COMMAND [...]\n\nAn inference engine and server for language models.\n\n{rows}\n\n{EXAMPLES}"


def _no_such_command(command: str) -> QuireError:
    from quire.cli.parser import UsageError, nearest
    from quire.cli.peer_commands import HINTS

    near = HINTS.get(command) or nearest(command, COMMANDS)
    return UsageError(f"there is no command `{command}`", near or f"the commands are {', '.join(COMMANDS)}")


if __name__ == "__main__":
    sys.exit(main())
