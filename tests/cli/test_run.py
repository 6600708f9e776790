import io
import json
from collections.abc import Iterator

import pytest

from quire.cli import main as cli
from quire.cli.parser import UsageError
from quire.cli.run import MAX_TOKENS, read_prompt
from quire.client.generate_request import GenerateRequest
from quire.client.generation_config import GenerationConfig
from quire.core.request import DraftUsage
from quire.text.event import TextEvent


class Fake:
    """An engine that says three words."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template
        self.generation = GenerationConfig({"top_p": 0.9})
        self.requests: list[GenerateRequest] = []
        self.drafts: DraftUsage | None = None

    @property
    def tokenizer(self) -> "Fake":
        return self

    def stream(self, request: GenerateRequest) -> Iterator[TextEvent]:
        self.requests.append(request)
        yield TextEvent(0, "a gathering", [1, 2], num_prompt_tokens=5)
        yield TextEvent(0, " of pages", [3, 4], num_prompt_tokens=5)
        yield TextEvent(0, "", [], finish_reason="stop", drafts=self.drafts, final=True)


@pytest.fixture(params=["{{ messages }}", None], ids=["template", "no template"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake(request.param)
    monkeypatch.setattr("quire.cli.run.load", lambda arguments: (fake, "fake", 0.25))
    return fake


def test_the_text_and_nothing_else_goes_to_stdout(engine: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "What is", "a quire?"]) == 0
    assert capsys.readouterr() == ("a gathering of pages\n", "")
    request = engine.requests[0]
    if engine.chat_template:
        assert request.messages == [{"role": "user", "content": "What is a quire?"}]
    else:
        assert request.prompt == "What is a quire?"
    assert request.params.max_tokens == MAX_TOKENS


def test_raw_leaves_the_template_out(engine: Fake) -> None:
    cli.main(["run", "--raw", "A quire is", "--temperature", "0", "--max-tokens", "8", "--seed", "3", "--stop", "\n"])
    request = engine.requests[0]
    assert (request.prompt, request.messages) == ("A quire is", None)
    assert (request.params.temperature, request.params.max_tokens, request.params.seed) == (0.0, 8, 3)
    assert request.params.top_p == 0.9, "as the model advises"
    assert request.params.stop == ["\n"]


def test_system(engine: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["run", "hello", "--system", "Be brief."])
    if engine.chat_template:
        assert (engine.requests[0].messages or [])[0] == {"role": "system", "content": "Be brief."}
    else:
        assert status == 2 and "this model has none" in capsys.readouterr().err
    assert cli.main(["run", "hello", "--system", "Be brief.", "--raw"]) == 2


def test_json(engine: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["run", "hello", "--json"])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    said = json.loads(out)
    assert said["text"] == "a gathering of pages" and said["finish_reason"] == "stop" and said["model"] == "fake"
    assert (said["prompt_tokens"], said["output_tokens"], said["load_s"]) == (5, 4, 0.25)
    assert 0 <= said["ttft_s"] <= said["total_s"]


def test_accepted_drafts_are_told_where_some_were_verified(engine: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["run", "hello", "--stats"])
    assert "draft" not in capsys.readouterr().err
    engine.drafts = DraftUsage(num_tokens=7, lengths=[1, 0, 2])
    cli.main(["run", "hello", "--stats"])
    assert "prompt 5 · 4 of 7 draft tokens accepted · stop" in capsys.readouterr().err
    cli.main(["run", "hello", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (said["draft_tokens"], said["accepted_draft_tokens"]) == (7, 4)


def test_stats_go_to_stderr(engine: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["run", "hello", "--stats"])
    out, err = capsys.readouterr()
    assert out == "a gathering of pages\n" and "4 tokens · first after" in err and "loaded in 0.25 s" in err


@pytest.mark.parametrize(
    ("words", "piped", "prompt"),
    [
        ([], "from a pipe\n", "from a pipe"),
        (["-"], "from a pipe\n", "from a pipe"),
        (["Summarize:", "-"], "line\nline\n", "Summarize: line\nline"),
        (["given"], "not read", "given"),
    ],
)
def test_prompts(monkeypatch: pytest.MonkeyPatch, words: list[str], piped: str, prompt: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(piped))
    assert read_prompt(words) == prompt


def test_an_empty_prompt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    with pytest.raises(UsageError, match="empty"):
        read_prompt([])


def test_a_terminal_without_a_prompt_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.StringIO("never read")
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", stdin)
    with pytest.raises(UsageError, match="no prompt"):
        read_prompt([])


def test_bytes_that_are_no_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    with pytest.raises(UsageError, match="not UTF-8"):
        read_prompt(["-"])
    with pytest.raises(UsageError, match="not UTF-8"):
        read_prompt(["caf\udce9"])  # how Python keeps such a byte of an argument


def test_a_wrong_value_is_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.run.load", lambda arguments: pytest.fail("loaded"))
    assert cli.main(["run", "hello", "--temperature", "-3"]) == 2
    assert cli.main(["run", "hello", "--top-p", "0"]) == 2


def test_samplers_have_the_flags_of_llama_cpp(engine: Fake) -> None:
    flags = "--dry-multiplier 0.8 --dry-base 2 --dry-allowed-length 3 --dry-penalty-last-n -1 --dry-sequence-breaker ##"
    flags += " --xtc-probability 0.5 --xtc-threshold 0.2 --mirostat 2 --mirostat-ent 4 --mirostat-lr 0.2"
    flags += " --top-nsigma 1.5 --dynatemp-range 0.5 --dynatemp-exp 1.2 --typical 0.9 --samplers dry;top_k;temp"
    assert cli.main(["run", *flags.split(), "--no-repeat-ngram-size", "3", "Hello"]) == 0
    params = engine.requests[0].params
    assert (params.dry_multiplier, params.dry_base, params.dry_allowed_length) == (0.8, 2.0, 3)
    assert (params.dry_penalty_last_n, params.dry_sequence_breakers) == (-1, ["##"])
    assert (params.xtc_probability, params.xtc_threshold, params.no_repeat_ngram_size) == (0.5, 0.2, 3)
    assert (params.mirostat, params.mirostat_tau, params.mirostat_eta, params.typical_p) == (2, 4.0, 0.2, 0.9)
    assert (params.top_n_sigma, params.dynatemp_range, params.dynatemp_exponent) == (1.5, 0.5, 1.2)
    assert params.samplers == ["dry", "top_k", "temperature"]
    cli.main(["run", "--dry-sequence-breaker", "none", "Hello"])
    assert engine.requests[1].params.dry_sequence_breakers == []
    cli.main(["run", "Hello"])
    assert engine.requests[2].params.dry_sequence_breakers == ["\n", ":", '"', "*"]
