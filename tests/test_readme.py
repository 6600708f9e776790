"""Every command and every line of Python on the first page works."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^\$ (.*)$", README, re.MULTILINE)
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_is_something_to_check() -> None:
    assert len(COMMANDS) >= 5 and PYTHON


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_knows_the_target(command: str) -> None:
    words = ["make", "--dry-run", *command.split()[1:]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.parametrize("command", [c for c in COMMANDS if re.search(r"quire (run|doctor|pull|models)", c)])
def test_commands_run(command: str, default_model: Path) -> None:
    words = [sys.executable, "-m", "quire.cli.main", *shlex.split(command)[1:]]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.parametrize("command", [c for c in COMMANDS if "quire serve" in c])
def test_serve_takes_these_flags(command: str) -> None:
    from quire.cli.serve import make_parser

    words = shlex.split(command)[2:]
    taken = vars(make_parser().parse(words))
    assert {word[2:].replace("-", "_") for word in words if word.startswith("--")} <= taken.keys()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("curl")])
def test_curl_sends_a_good_body(command: str) -> None:
    import msgspec

    from quire.server.dialects.openai.chat import ChatBody

    words = shlex.split(command)
    assert "http://127.0.0.1:8000/v1/chat/completions" in words
    msgspec.json.decode(words[words.index("-d") + 1], type=ChatBody)


@pytest.mark.parametrize("source", PYTHON)
def test_python_runs(source: str, default_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(source, "README.md", "exec"), {})
    assert "The capital of France is  Paris" in capsys.readouterr().out
