"""A LiteLLM user comes over: the file is converted, and what is converted answers; a key is made; probes answer."""

import hashlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.gateways import answers, gateway, upstreams
from quire.cli.main import main
from quire.core.errors import BadRequest
from quire.gateway.config_file import parse_config
from quire.gateway.litellm_config import convert, read_litellm
from quire.gateway.toml_text import toml_text

FILE = """
model_list:
  - model_name: gpt-4o
    litellm_params: {model: gpt-4o, api_key: os.environ/SOME_KEY, rpm: 480}
    model_info: {input_cost_per_token: 0.0000025, output_cost_per_token: 0.00001}
  - model_name: llama
    litellm_params: {model: hosted_vllm/meta/Llama, api_base: http://gpu-1:8000/v1, weight: 2, max_parallel_requests: 7}
  - model_name: llama
    litellm_params: {model: hosted_vllm/meta/Llama, api_base: "http://gpu-2:8000/v1/", api_key: worker-key}
  - model_name: mixed
    litellm_params: {model: openai/a, api_base: "http://gpu-2:8000/v1", api_key: other-key, weight: 9}
  - model_name: mixed
    litellm_params: {model: ollama_chat/b}
  - model_name: claude
    litellm_params: {model: bedrock/claude}
litellm_settings:
  num_retries: 2
  fallbacks: [{llama: [gpt-4o]}]
  success_callback: [langfuse]
router_settings:
  routing_strategy: usage-based-routing-v2
  model_group_alias: {"gpt-3.5-turbo": llama, hidden: {model: llama, hidden: true}}
  allowed_fails: 4
  cooldown_time: 30
  timeout: 90
  redis_host: redis
  redis_password: "p@ss"
general_settings:
  master_key: sk-1234
  database_url: postgres://x
environment_variables: {A: b}
"""


def test_what_both_have_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "x")
    config = parse_config(convert(yaml.safe_load(FILE)).text.encode(), "converted")
    workers = {(worker.url, worker.secret): worker for worker in config.workers}
    assert workers.keys() == {
        ("https://api.openai.com", "x"),
        ("http://gpu-1:8000", ""),
        ("http://gpu-2:8000", "worker-key"),
        ("http://gpu-2:8000", "other-key"),
        ("http://localhost:11434", ""),
    }
    first = workers["http://gpu-1:8000", ""]
    assert first.models == ["meta/Llama"] and first.weight == 2 and first.max_in_flight == 7
    models = config.models
    assert [target.model for target in models["llama"].targets] == ["meta/Llama"]
    assert models["llama"].fallbacks == ["gpt-4o"]
    assert [(target.model, target.weight) for target in models["mixed"].targets] == [("a", 9), ("b", 1)]
    assert models["hidden"].targets == models["gpt-3.5-turbo"].targets and models["hidden"].leads_to == ["llama"]
    price = models["gpt-4o"].price
    assert price is not None and (price.prompt, price.output) == (2.5, 10.0)
    assert not models["gpt-4o"].targets, "the worker's own name"
    assert config.policy == "least_tokens" and config.admin_secret == "sk-1234"
    assert config.redis is not None and config.redis.url == "redis://:p%40ss@redis:6379/0"
    faults = config.faults
    assert (faults.max_attempts, faults.breaker_failures, faults.breaker_seconds) == (3, 4, 30)
    assert faults.response_timeout == 90
    assert config.state_dir == "gateway-state"
    [key] = config.keys
    assert key.digest == hashlib.sha256(b"sk-1234").digest()


def test_what_is_left_out_is_named() -> None:
    notes = "\n".join(convert(yaml.safe_load(FILE)).notes)
    for part in (
        "`claude` (bedrock/claude): `bedrock` has no OpenAI-compatible API",
        "litellm_params.rpm",
        "litellm_settings.success_callback",
        "database_url became state_dir",
        "environment_variables",
        "--new-key NAME",
    ):
        assert part in notes, part
    assert "litellm_settings.num_retries" not in notes


@pytest.mark.parametrize(
    ("text", "problem"),
    [("[1, 2]", "model_list"), ("a: [", "not YAML"), ("model_list: [{model_name: x}]", r"model_list\[0\]")],
)
def test_another_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(BadRequest, match=problem):
        read_litellm(tmp_path / "config.yaml")
    with pytest.raises(BadRequest, match="cannot read"):
        read_litellm(tmp_path / "none.yaml")


def test_what_is_printed_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By LiteLLM's name, with the master key, and with a new one."""
    text = "model_list: [{model_name: gpt-4o, litellm_params: {model: hosted_vllm/m, api_base: URL/v1, api_key: w}}]\n"
    with upstreams(answers("hello")) as [only]:
        (tmp_path / "config.yaml").write_text(text.replace("URL", only.url) + "general_settings: {master_key: sk-1}\n")
        assert main(["gateway", "--from-litellm", str(tmp_path / "config.yaml")]) == 0
        printed = capsys.readouterr()
        assert main(["gateway", "--new-key", "alice"]) == 0
        made = capsys.readouterr()
        key = made.err.split()[-1]
        assert "note: " in printed.err and key.startswith("sk-") and key not in made.out
        with gateway(printed.out + made.out, folder=tmp_path) as running:
            for secret, status in (("sk-1", 200), (key, 200), ("sk-2", 401)):
                answer = running.chat("gpt-4o", headers={"authorization": f"Bearer {secret}"})
                assert answer.status_code == status
            assert only.asked[-1].json["model"] == "m"
            for path in ("/health/liveliness", "/health/readiness"):
                assert running.http.get(running.url + path).status_code == 200
    assert main(["gateway", "--new-key", "two words"]) == 2
    assert "no name of a key" in capsys.readouterr().err


TEXTS = st.text(max_size=10)
PLAIN = st.one_of(TEXTS, st.integers(-(2**53), 2**53), st.booleans(), st.floats(allow_nan=False, allow_infinity=False))
INNER = st.dictionaries(TEXTS, st.one_of(PLAIN, st.lists(PLAIN, max_size=3)), max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(TEXTS, st.one_of(PLAIN, INNER.filter(bool), st.lists(INNER, min_size=1, max_size=2)), max_size=4)
)
def test_toml_is_read_as_it_was_written(config: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text(config)) == config
    models = {"models": {"a.b": {"targets": [{"model": "x", "weight": 1.5}], "price": {"prompt": 2.5}}}}
    assert tomllib.loads(toml_text(models)) == models
