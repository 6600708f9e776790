"""The command line as a shell sees it."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire import __version__
from quire.cli import main as cli
from quire.cli.peer_commands import HINTS
from quire.core.errors import BadRequest


def quire(*argv: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "quire.cli.main", *argv]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Let `quire pull` do something else."""

    def install(run) -> None:  # type: ignore[no-untyped-def]
        monkeypatch.setattr("quire.cli.pull.run", run)

    importlib.import_module("quire.cli.pull")
    return install


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"quire {__version__}\n"
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS) and "examples:" in text


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(cli.COMMANDS[name][0])
    with pytest.raises(SystemExit) as ended:
        module.run(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: quire {name}" in text
    assert f"quire {name}" in text.partition("\nexamples:\n")[2]


def test_help_imports_nothing_but_the_table() -> None:
    code = """
import sys
from quire.cli.main import main
main(['--help'])
slow = {'numpy', 'argparse', 'asyncio', 'huggingface_hub', 'subprocess', 'quire.hub'} & set(sys.modules)
assert not slow, slow
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_command_is_exit_2_with_a_suggestion() -> None:
    done = quire("pul")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no command `pul`\nhint: did you mean `pull`?\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("list", "quire models"),
        ("launch_server", "quire serve"),
        ("collect-env", "quire doctor"),
        ("run smollm2", "quire chat -m smollm2`"),
        ("run smollm2 Why?", "quire run -m smollm2 PROMPT`"),
        ("run ./some.gguf Why?", "quire run -m ./some.gguf PROMPT`"),
        ("chat smollm2 -m smollm2", "leave --model out"),
    ],
)
def test_what_is_typed_for_other_tools_is_told_its_name_here(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.split()) == 2
    assert told in capsys.readouterr().err


def test_hints_name_commands_that_exist_and_hide_none() -> None:
    assert not HINTS.keys() & cli.COMMANDS.keys()
    named = {name for hint in HINTS.values() for name in re.findall(r"`quire ([a-z-]+)", hint)}
    assert named <= cli.COMMANDS.keys()


def test_python_m_quire_is_quire() -> None:
    done = subprocess.run([sys.executable, "-m", "quire", "--version"], capture_output=True, text=True)
    assert done.stdout == f"quire {__version__}\n"


def test_an_unknown_model_is_exit_2(tmp_path: Path) -> None:
    done = quire("pull", "smolm2", QUIRE_CACHE=str(tmp_path), HF_HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no model `smolm2`") and "hint: did you mean" in done.stderr


def test_an_unknown_flag_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", "--quite"]) == 2
    assert capsys.readouterr().err == "error: there is no flag `--quite`\nhint: did you mean `--quiet`?\n"


def test_one_argument_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", "a", "b"]) == 2
    assert "`b` is one argument too many" in capsys.readouterr().err


def test_an_error_without_a_hint_is_one_line(command, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    def run(argv: list[str]) -> int:
        raise BadRequest("it is wrong")

    command(run)
    assert cli.main(["pull"]) == 2
    assert capsys.readouterr().err == "error: it is wrong\n"


def test_ctrl_c_is_130_without_a_traceback(command, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    def run(argv: list[str]) -> int:
        raise KeyboardInterrupt

    command(run)
    assert cli.main(["pull"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_our_own_mistakes_are_not_hidden(command) -> None:  # type: ignore[no-untyped-def]
    def run(argv: list[str]) -> int:
        raise AssertionError("a bug")

    command(run)
    with pytest.raises(AssertionError, match="a bug"):
        cli.main(["pull"])


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "quire.cli.main", "models"]
    environment = {**os.environ, "QUIRE_CACHE": str(tmp_path), "HF_HOME": str(tmp_path)}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file that is always full")
def test_a_full_disk_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quire.cli.main", "models", "--json"]
    environment = {**os.environ, "QUIRE_CACHE": str(tmp_path), "HF_HOME": str(tmp_path)}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device\n")


def test_a_port_that_does_not_exist_is_refused_and_no_other_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--port", "99999"]) == 2
    assert capsys.readouterr().err == "error: port is 99999\nhint: port must be at most 65535\n"


@pytest.mark.parametrize("command", [["train-head"], ["cache", "--nope"], ["plan", "--price", "x"]])
def test_hints_name_the_help_of_a_command_without_its_arguments(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The hint was to see `quire train-head --method METHOD MODEL OUT --help`, which is no command line."""
    assert cli.main(command) == 2
    assert f"hint: see `quire {command[0]} --help`" in capsys.readouterr().err
