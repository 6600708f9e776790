"""`quire serve --config FILE`."""

from pathlib import Path

import pytest

from quire.cli.config_file import add_config_file
from quire.cli.flags import read_flags
from quire.cli.parser import UsageError
from quire.cli.serve import make_parser
from quire.engine.options import EngineOptions
from quire.server.options import ServerOptions


def read(path: Path, text: str, *given: str) -> tuple[EngineOptions, ServerOptions]:
    path.write_text(text)
    parser = make_parser()
    arguments = parser.parse(["--config", str(path), *given])
    add_config_file(parser, arguments)
    return read_flags(EngineOptions, arguments), read_flags(ServerOptions, arguments)


def test_a_file_for_vllm_is_read_as_it_is(tmp_path: Path) -> None:
    text = """
model: ./llama
host: "0.0.0.0"
port: 6379
uvicorn-log-level: "info"
max_model_len: 4k
enable-prefix-caching: false
tensor-parallel-size: 1
trust-remote-code: true
disable-log-requests: false
api-key: [one, two]
lora-modules: {sql: ./sql, chat: ./chat}
speculative-config: {method: ngram, num_speculative_tokens: 3}
chat-template:
"""
    engine, server = read(tmp_path / "serve.yaml", text)
    assert engine == EngineOptions(
        model="./llama",
        max_model_len=4000,
        enable_prefix_caching=False,
        lora_modules=("sql=./sql", "chat=./chat"),
        speculative_config='{"method": "ngram", "num_speculative_tokens": 3}',
    )
    assert server == ServerOptions(host="0.0.0.0", port=6379, api_key=["one", "two"])


def test_toml_is_read_too(tmp_path: Path) -> None:
    engine, server = read(tmp_path / "serve.toml", 'model = "./llama"\nport = 9000\nmodels-max = 3\n')
    assert engine == EngineOptions(model="./llama") and server == ServerOptions(port=9000, max_loaded_models=3)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_PORT", "1")
    monkeypatch.setenv("QUIRE_THREADS", "2")
    text = "port: 2\nmax-num-seqs: 3\napi-key: file\n"
    engine, server = read(tmp_path / "a.yaml", text, "--max-num-seqs", "4", "--api-key", "given")
    assert server == ServerOptions(port=2, api_key=["given"]) and engine == EngineOptions(max_num_seqs=4, threads=2)


def test_a_model_named_on_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: ./file\n")
    parser = make_parser()
    arguments = parser.parse(["./given", "--config", str(tmp_path / "a.yaml")])
    add_config_file(parser, arguments)
    assert arguments.named == "./given" and not hasattr(arguments, "model")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max-modl-len: 5\n", "a.yaml: there is no flag `--max-modl-len`\n.*did you mean `--max-model-len`"),
        ("port: many\n", "a.yaml: argument --port: `many` is not a whole number"),
        ("nnodes: 2\n", "a.yaml: --nnodes is 2"),
        ("port: [\n", "is not YAML"),
        ("- port\n", "has no keys"),
        ("config: b.yaml\n", "names another file"),
        ("kv-cache-dtype: [int8\n", "is not YAML"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_name(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read(tmp_path / "a.yaml", text)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    parser = make_parser()
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        add_config_file(parser, parser.parse(["--config", str(tmp_path / "none.yaml")]))
