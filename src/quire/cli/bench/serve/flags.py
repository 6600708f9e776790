"""The flags of `quire bench serve`: vLLM's names, and its defaults unless the help text says otherwise."""

import math
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from quire.cli.bench.serve.refused_flags import DATASETS as REFUSED_DATASETS
from quire.cli.bench.setup import check_bounds
from quire.cli.parser import UsageError, nearest
from quire.engine.option import option

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
ENDPOINTS |= dict.fromkeys(("sglang", "llama.cpp", "lmdeploy"), "/v1/completions")
DATASETS = ("random", "prefix_repetition", "sharegpt", "custom", "burstgpt", "trace", "simulated")
SYNONYMS = {"shared-prefix": "prefix_repetition", "shared_prefix": "prefix_repetition"}
SYNONYMS |= {"prefix-repetition": "prefix_repetition", "timed_trace": "trace"}
FROM_FILES = ("sharegpt", "custom", "burstgpt", "trace")
METRICS = ("ttft", "tpot", "itl", "e2el")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
RAMPS = ("linear", "exponential")
LORA_ASSIGNMENTS = ("random", "round-robin")


def several(help: str, metavar: str) -> dict[str, Any]:
    """The metadata of a field that takes several values."""
    return {"help": help, "metavar": metavar, "several": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    """Which server, and how it is asked."""

    backend: str = option("openai", f"what the server talks: {', '.join(ENDPOINTS)}", metavar="NAME")
    base_url: str | None = option(None, "its address, instead of --host and --port", metavar="URL")
    host: str = option("127.0.0.1", "where it listens", metavar="HOST")
    port: int = option(8000, "where it listens", minimum=1, maximum=65535)
    endpoint: str | None = option(None, "path of the requests (default: the backend's own)", metavar="PATH")
    model: str | None = option(None, "model to ask for (default: the first of /v1/models)", metavar="NAME")
    served_model_name: str | None = option(None, "its name at the server, if --model is a path", metavar="NAME")
    tokenizer: str | None = option(
        None, "makes random prompts and counts tokens (default: that of --model if it is on this machine)"
    )
    lora_modules: list[str] = field(
        default_factory=list, metadata=several("adapters of the server: each request asks for one of them", "NAME")
    )
    lora_assignment: str = option(
        "random", "which one it asks for", metavar="{" + ",".join(LORA_ASSIGNMENTS) + "}", choices=LORA_ASSIGNMENTS
    )
    api_key: str | None = option(None, "sent as a bearer token (default: $OPENAI_API_KEY)", metavar="KEY")
    header: list[str] = field(default_factory=list, metadata=several("more headers", "NAME=VALUE"))
    insecure: bool = option(False, "do not verify the certificate of an https server")
    request_id_prefix: str | None = option(
        None, "begins the X-Request-Id that each request is sent with; its number follows", metavar="TEXT"
    )
    extra_body: str | None = option(None, "more fields of every request, as a JSON object", metavar="JSON")
    ready_check_timeout_sec: int = option(0, "wait this long for the server to answer", minimum=0)

    @property
    def url(self) -> str:
        """Without a `/v1` that the endpoint has too."""
        url = self.base_url or f"http://{self.host}:{self.port}"
        return url.rstrip("/").removesuffix("/v1") if self.path.startswith("/v1/") else url.rstrip("/")

    @property
    def path(self) -> str:
        return self.endpoint or ENDPOINTS[self.backend]

    @property
    def is_chat(self) -> bool:
        return self.backend == "openai-chat"

    def __post_init__(self) -> None:
        check_bounds(self)
        check_known("--backend", self.backend, ENDPOINTS)
        if self.base_url and not _is_address(self.base_url):
            raise UsageError(f"--base-url is `{self.base_url}`", "it looks like http://127.0.0.1:8000")
        if not self.path.startswith("/") or any(character <= " " for character in self.path):
            raise UsageError(f"--endpoint is `{self.path}`", "it begins with / and has no spaces")
        if not all("!" <= character <= "~" for character in self.request_id_prefix or ""):
            raise UsageError(
                f"--request-id-prefix is `{self.request_id_prefix}`",
                "a header has printable characters of ASCII, and here no spaces",
            )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that does not exist, half an IPv6 address
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFlags:
    """The flags that say what is asked of the server."""

    dataset_name: str = option(
        "random", f"what is asked: {', '.join(DATASETS)} (shared-prefix is prefix_repetition)", metavar="NAME"
    )
    dataset_path: str | None = option(None, f"the file of {', '.join(FROM_FILES)}", metavar="FILE")
    num_prompts: int = option(1000, "requests; of a trace, its first ones", minimum=1)
    seed: int = option(0, "of prompts and arrivals")
    input_len: int | None = option(None, "--random-input-len", minimum=1)
    output_len: int | None = option(None, "the output length of the dataset", minimum=1)
    random_input_len: int = option(1024, "random: tokens of a prompt", minimum=1)
    random_output_len: int = option(128, "random: tokens of an output", minimum=1)
    random_range_ratio: float = option(0.0, "random: lengths vary by this share of them, up or down")
    random_prefix_len: int = option(0, "random: tokens that all prompts begin with, besides their own", minimum=0)
    prefix_repetition_prefix_len: int = option(256, "tokens of a shared prefix", minimum=1)
    prefix_repetition_suffix_len: int = option(256, "tokens of each prompt's own", minimum=1)
    prefix_repetition_num_prefixes: int = option(10, "different prefixes", minimum=1)
    prefix_repetition_output_len: int = option(128, "tokens of an output", minimum=1)
    sharegpt_output_len: int | None = option(
        None, "ShareGPT: tokens of an output (default: those of the answer in the file)", minimum=1
    )
    custom_output_len: int = option(
        256, "custom: tokens of an output, where a line has no `output_tokens`; -1: every line has them"
    )
    simulated_burst: int = option(1, "simulated: requests that come together", minimum=1)
    simulated_num_prefixes: int = option(1, "simulated: different prefixes of --random-prefix-len", minimum=1)
    disable_shuffle: bool = option(False, "take the prompts of a file in its order")
    no_oversample: bool = option(False, "do not repeat the prompts of a file that has too few")

    @property
    def dataset(self) -> str:
        return SYNONYMS.get(self.dataset_name, self.dataset_name)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.dataset_name in REFUSED_DATASETS:
            hint = REFUSED_DATASETS[self.dataset_name]
            raise UsageError(f"--dataset-name {self.dataset_name} is one of `vllm bench serve` that is not here", hint)
        check_known("--dataset-name", self.dataset_name, (*DATASETS, *SYNONYMS))
        if not 0 <= self.random_range_ratio < 1:
            raise UsageError(f"--random-range-ratio is {self.random_range_ratio:g}", "it is at least 0 and below 1")
        if self.custom_output_len != -1 and self.custom_output_len < 1:
            raise UsageError(f"--custom-output-len is {self.custom_output_len}", "give at least 1, or -1")
        if (self.dataset in FROM_FILES) != (self.dataset_path is not None):
            need = "needs a file: give --dataset-path" if self.dataset in FROM_FILES else "has no --dataset-path"
            raise UsageError(f"--dataset-name {self.dataset_name} {need}", f"files are for {', '.join(FROM_FILES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFlags:
    """When it is asked, and how answers are sampled."""

    request_rate: float = option(math.inf, "requests a second, Poisson; inf: all at once")
    burstiness: float = option(1.0, "shape of the gamma distribution of the pauses: below 1 in bursts, above 1 evenly")
    max_concurrency: int | None = option(None, "requests in flight at most; others wait here", minimum=1)
    ramp_up_strategy: str | None = option(None, "let the rate grow", metavar="{" + ",".join(RAMPS) + "}", choices=RAMPS)
    ramp_up_start_rps: float | None = option(None, "rate of the first requests")
    ramp_up_end_rps: float | None = option(None, "rate of the last requests")
    num_warmups: int = option(0, "requests before measuring begins: copies of the first one", minimum=0)
    ignore_eos: bool | None = option(
        None, "let nothing end an output early (default: on for random, burstgpt, simulated and trace)"
    )
    temperature: float | None = option(None, "sampling; what is not given is left to the server")
    top_p: float | None = option(None, "sampling")
    top_k: int | None = option(None, "sampling")
    min_p: float | None = option(None, "sampling")
    frequency_penalty: float | None = option(None, "sampling")
    presence_penalty: float | None = option(None, "sampling")
    repetition_penalty: float | None = option(None, "sampling")
    logprobs: int | None = option(None, "ask for so many logprobs of a token", minimum=0)

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{flag_of(name)} is {getattr(self, name):g}", "it must be above 0")
        ramp = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None:
            if ramp != (None, None):
                raise UsageError("a ramp-up has rates and no strategy", "give --ramp-up-strategy linear or exponential")
        elif any(rate is None or not 0 < rate < math.inf for rate in ramp):
            raise UsageError(
                "a ramp-up goes from one rate to another", "give --ramp-up-start-rps 1 --ramp-up-end-rps 10, above 0"
            )
        elif math.isfinite(self.request_rate):
            raise UsageError("--request-rate and --ramp-up-strategy both say when requests come", "leave one out")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFlags:
    """The flags that say what is reported afterwards, and where."""

    percentile_metrics: str = option(",".join(METRICS), "which latencies are told, with commas", metavar="NAMES")
    metric_percentiles: str = option("50,90,99", "which percentiles of them, with commas", metavar="SHARES")
    goodput: list[str] = field(
        default_factory=list,
        metadata=several("requests a second that keep these bounds, in ms: ttft:500 tpot:40 e2el:5000", "M:MS"),
    )
    save_result: bool = option(False, "write the figures to a file")
    append_result: bool = option(False, "add the figures to the end of that file, one line a run")
    save_detailed: bool = option(False, "with the times, lengths, texts and errors of each request")
    result_dir: str | None = option(None, "folder of that file (default: this one)", metavar="FOLDER")
    result_filename: str | None = option(None, "its name (default: from label, rate, model and date)", metavar="FILE")
    label: str | None = option(None, "begins that name (default: the backend)")
    metadata: list[str] = field(default_factory=list, metadata=several("more keys of the file", "KEY=VALUE"))
    disable_tqdm: bool = option(False, "no progress bar")
    json: bool = option(False, "print the figures as one JSON object instead of a table")

    def __post_init__(self) -> None:
        self.metrics, self.percentiles, self.goals, self.more  # noqa: B018 - each raises where it cannot be read

    @property
    def metrics(self) -> list[str]:
        names = [name.strip() for name in self.percentile_metrics.split(",") if name.strip()]
        for name in names:
            check_known("--percentile-metrics", name, METRICS)
        return names

    @property
    def percentiles(self) -> list[float]:
        try:
            shares = [float(share) for share in self.metric_percentiles.split(",")]
        except ValueError:
            shares = [-1.0]
        if not all(0 <= share <= 100 for share in shares):
            raise UsageError(
                f"--metric-percentiles is `{self.metric_percentiles}`", "write numbers from 0 to 100: 50,99"
            )
        return shares

    @property
    def goals(self) -> dict[str, float]:
        """Metric -> milliseconds that it may take."""
        goals = {}
        for name, value in pairs("--goodput", self.goodput, ":").items():
            check_known("--goodput", name, ("ttft", "tpot", "e2el"))
            try:
                goals[name] = float(value)
            except ValueError:
                goals[name] = -1.0
            if not goals[name] >= 0:
                raise UsageError(f"--goodput {name}:{value} is no time", "write milliseconds: ttft:500")
        return goals

    @property
    def more(self) -> dict[str, str]:
        return pairs("--metadata", self.metadata, "=")


def check_known(flag: str, name: str, known: Any) -> None:
    if name not in known:
        raise UsageError(f"{flag} is `{name}`", nearest(name, known) or f"choose from {', '.join(known)}")


def pairs(flag: str, items: list[str], separator: str) -> dict[str, str]:
    values = {}
    for item in items:
        name, found, value = item.partition(separator)
        if not found or not name.strip():
            raise UsageError(f"{flag} has `{item}`", f"write NAME{separator}VALUE")
        values[name.strip()] = value.strip()
    return values


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def given(flags: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """The fields that have a value."""
    return {
        f.name: getattr(flags, f.name) for f in fields(flags) if f.name in names and getattr(flags, f.name) is not None
    }
