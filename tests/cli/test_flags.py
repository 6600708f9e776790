from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from quire.cli.flags import add_flags, read_flags
from quire.cli.parser import Parser, UsageError
from quire.core.errors import BadRequest, QuireError
from quire.engine.options import EngineOptions


def option(default: Any, help: str = "some help", **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    model: str = option("smollm2", "a model")
    max_model_len: int | None = option(None, "longest, 100% of it")
    max_num_seqs: int = option(256)
    enable_prefix_caching: bool = option(True)
    access_log: bool = option(False)
    kv_cache_memory_bytes: int = option(4 << 30, unit="bytes")
    swap_space: float = option(0.5)
    policy: str = option("fcfs", choices=("fcfs", "priority"))
    level: Literal["low", "high"] = option("low")
    api_key: list[str] = field(default_factory=list, metadata={"help": "keys"})
    origins: tuple[str, ...] = option(("*",))

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise QuireError(f"max_num_seqs is {self.max_num_seqs}")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "MAX_NUM_SEQS", "ACCESS_LOG", "API_KEY", "POLICY"):
        monkeypatch.delenv(f"QUIRE_{name}", raising=False)


def parser() -> Parser:
    made = Parser("test", "A test.", "  quire test")
    add_flags(made, Options, "options")
    return made


def read(*argv: str, **given: Any) -> Options:
    return read_flags(Options, parser().parse(argv), given=given)


def test_without_flags_the_dataclass_decides() -> None:
    assert read() == Options()


def test_every_kind_of_flag() -> None:
    assert read(
        *("--model", "m", "--max-model-len", "32k", "--max-num-seqs=8", "--no-enable-prefix-caching", "--access-log"),
        *("--kv-cache-memory-bytes", "512MB", "--swap-space", "1.5", "--policy", "priority", "--level", "high"),
        *("--api-key", "a", "--api-key", "b", "--origins", "x"),
    ) == Options(
        model="m",
        max_model_len=32_000,
        max_num_seqs=8,
        enable_prefix_caching=False,
        access_log=True,
        kv_cache_memory_bytes=512_000_000,
        swap_space=1.5,
        policy="priority",
        level="high",
        api_key=["a", "b"],
        origins=("x",),
    )


def test_underscores_are_dashes_in_names_and_not_in_values() -> None:
    assert read("--max_num_seqs", "3", "--model=a_b") == Options(max_num_seqs=3, model="a_b")


def test_flags_go_before_variables_before_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(max_num_seqs=1).max_num_seqs == 1
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "2")
    assert read(max_num_seqs=1).max_num_seqs == 2
    assert read("--max-num-seqs", "3", max_num_seqs=1).max_num_seqs == 3


def test_variables_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ACCESS_LOG", "yes")
    monkeypatch.setenv("QUIRE_API_KEY", "a,b")
    monkeypatch.setenv("QUIRE_POLICY", "priority")
    assert read() == Options(access_log=True, api_key=["a", "b"], policy="priority")


@pytest.mark.parametrize(("name", "value"), [("MAX_NUM_SEQS", "many"), ("ACCESS_LOG", "perhaps"), ("POLICY", "lifo")])
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"QUIRE_{name}", value)
    with pytest.raises(UsageError, match=f"QUIRE_{name}.*{value}"):
        read()


def test_a_variable_that_kubernetes_set_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "tcp://10.0.0.1:8000")
    with pytest.raises(UsageError) as caught:
        read()
    assert "enableServiceLinks" in caught.value.hint
    assert read("--max-num-seqs", "4").max_num_seqs == 4, "a flag makes the variable not matter"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policy", "lifo"], "`lifo` is not one of fcfs, priority"),
        (["--level", "middle"], "`middle` is not one of low, high"),
        (["--max-num-seqs", "ten"], "`ten` is not a whole number"),
        (["--swap-space", "big"], "`big` is not a number"),
        (["--model"], "expected one argument"),
    ],
)
def test_a_wrong_value_is_a_usage_error(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(*argv)


def test_the_dataclass_checks_too() -> None:
    with pytest.raises(QuireError, match="max_num_seqs is 0"):
        read("--max-num-seqs", "0")


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--max-modl-len", "did you mean `--max-model-len`?"),
        ("--max-num-seq=4", "did you mean `--max-num-seqs`?"),
        ("--enable-prefix-cache", "did you mean `--enable-prefix-caching`?"),
        ("--zzz", "see `quire test --help`"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_nearest(flag: str, hint: str) -> None:
    with pytest.raises(UsageError, match="there is no flag") as caught:
        read(flag, "4")
    assert caught.value.hint == hint


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(UsageError, match="there is no flag `--max-num`"):
        read("--max-num", "4")


def test_help_tells_defaults_as_one_writes_them() -> None:
    text = " ".join(parser().format_help().split())
    for told in (
        "longest, 100% of it",
        "(default: 4096MiB)",
        "(default: on)",
        "(default: 0.5)",
        "{fcfs,priority}",
        "SIZE",
    ):
        assert told in text
    assert text.endswith("examples: quire test")


def test_a_command_may_tell_what_the_dataclass_does_not() -> None:
    made = Parser("test", "A test.", "  quire test")
    about = {"max_num_seqs": {"help": "told by the command", "unit": "bytes"}}
    add_flags(made, Options, "options", about=about, skip=("model",))
    assert "told by the command" in made.format_help() and "--model" not in made.format_help()
    assert read_flags(Options, made.parse(["--max-num-seqs", "1KiB"]), about=about).max_num_seqs == 1024


def test_a_share_of_the_memory_is_at_most_all_of_it() -> None:
    with pytest.raises(BadRequest, match="gpu_memory_utilization is 90"):
        EngineOptions(gpu_memory_utilization=90)
