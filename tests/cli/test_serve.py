"""From the command line to the two options; what they are for is tested where they are used."""

import json
import shlex
from dataclasses import fields
from typing import Any

import pytest

from quire.cli import main as cli
from quire.cli.serve import announcement, make_parser
from quire.client.engine_process import EngineProcess
from quire.engine.options import EngineOptions
from quire.server.options import ServerOptions


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineOptions, ServerOptions]]:
    """What `launch` is called with; it says at once that it is ready."""
    calls: list[tuple[EngineOptions, ServerOptions]] = []

    def launch(engine: EngineOptions, server: ServerOptions, *, on_ready: Any, spawned: EngineProcess | None) -> None:
        on_demand = server.loads_on_demand or engine.enable_sleep_mode
        assert (spawned is None) == on_demand  # an engine has been started for a model that is needed
        calls.append((engine, server))
        on_ready("http://127.0.0.1:8000")

    monkeypatch.setattr("quire.server.launch.launch", launch)
    return calls


def test_defaults(served: list[tuple[EngineOptions, ServerOptions]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve"]) == 0
    assert served == [(EngineOptions(), ServerOptions())]
    out, err = capsys.readouterr()
    assert out == "" and "serving smollm2 on http://127.0.0.1:8000\n  curl " in err


def test_flags(served: list[tuple[EngineOptions, ServerOptions]]) -> None:
    argv = "serve qwen2.5-0.5b --port 0 --max-model-len 4K --max-body-bytes 1MiB --api-key a --api-key b --threads 1"
    assert cli.main([*argv.split(), "--enable-sleep-mode"]) == 0
    engine, server = served[0]
    assert engine == EngineOptions(model="qwen2.5-0.5b", max_model_len=4096, threads=1, enable_sleep_mode=True)
    assert server == ServerOptions(port=0, max_body_bytes=1 << 20, api_key=["a", "b"])


def test_speculative_decoding_is_configured_as_in_vllm_or_in_short(
    served: list[tuple[EngineOptions, ServerOptions]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 3}'
    assert cli.main(["serve", "--speculative-config", config]) == 0
    assert cli.main(["serve", "--spec-method", "ngram", "--spec-tokens", "3"]) == 0
    monkeypatch.setenv("QUIRE_SPECULATIVE_CONFIG", config)
    assert cli.main(["serve"]) == 0
    first, second, third = (engine.speculation for engine, _ in served)
    assert first == second == third and first is not None and first.num_tokens == 3
    assert cli.main(["serve", "--speculative-config", '{"method": "lookahead"}']) == 2
    told = capsys.readouterr().err
    assert "error: the speculative method is `lookahead`\nhint: choose from ngram, suffix, draft_model" in told


def test_a_model_is_named_once(served: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--model", "a"]) == 0
    assert served[0][0].model == "a"
    assert cli.main(["serve", "a", "--model", "b"]) == 2
    assert "two models are named, a and b" in capsys.readouterr().err


def test_every_server_option_is_explained() -> None:
    text = make_parser().format_help()
    for options in (EngineOptions, ServerOptions):
        assert all(field.metadata["help"] for field in fields(options))
        assert all(f"--{field.name.replace('_', '-')}" in text for field in fields(options))


def pasted(text: str) -> list[str]:
    return shlex.split(text.splitlines()[1])


def test_the_line_to_paste_calls_the_server() -> None:
    words = pasted(announcement("http://0.0.0.0:8000", ["it's"], ServerOptions(api_key=["secret"])))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert "secret" not in " ".join(words) and "Authorization: Bearer $QUIRE_API_KEY" in words
    assert json.loads(words[-1])["model"] == "it's"


def test_the_line_to_paste_for_a_unix_socket() -> None:
    words = pasted(announcement("unix:/run/q.sock", ["m"], ServerOptions(uds="/run/q.sock", root_path="/llm")))
    assert words[:4] == ["curl", "--unix-socket", "/run/q.sock", "http://localhost/llm/v1/chat/completions"]
