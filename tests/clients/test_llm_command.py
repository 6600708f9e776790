"""The `llm` command, told of the server as its documentation says: a model in extra-openai-models.yaml."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from llm.cli import cli

from clients.served import served


@pytest.fixture(scope="module")
def home(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("llm")
    model = {"model_id": "quire", "model_name": "smollm2", "api_base": f"{served()}/v1"}
    models = [{**model, "supports_schema": True, "supports_tools": True}]
    (home / "extra-openai-models.yaml").write_text(json.dumps(models))  # which is YAML too
    return home


def llm(home: Path, *arguments: str) -> str:
    environment = {"LLM_USER_PATH": str(home), "OPENAI_API_KEY": "none"}
    done = CliRunner().invoke(cli, arguments, env=environment)  # the command, without a process for each
    assert done.exit_code == 0, done.output
    return done.stdout


def test_prompt_and_conversation(home: Path) -> None:
    options = ["-m", "quire", "-o", "max_tokens", "12", "-o", "temperature", "0"]
    streamed = llm(home, *options, "Say hello.")
    assert streamed.strip() and llm(home, *options, "--no-stream", "Say hello.") == streamed
    assert llm(home, "-c", "-o", "max_tokens", "12", "And again.").strip()


def test_schema(home: Path) -> None:
    schema = {"properties": {"happy": {"type": "boolean"}}, "required": ["happy"], "additionalProperties": False}
    given = json.dumps({"type": "object", **schema})
    told = llm(home, "-m", "quire", "--no-stream", "--schema", given, "-o", "max_tokens", "40", "How are you?")
    assert isinstance(json.loads(told)["happy"], bool)
