"""The gateway's configuration: its tables, and what is wrong between them. All of it is checked before any is used."""

import os
import ssl
from collections.abc import Iterator
from datetime import datetime
from importlib.util import find_spec
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct, field

from quire.core.errors import BadRequest
from quire.core.nearest import nearest
from quire.gateway.budget_periods import BudgetPeriod
from quire.gateway.redis_client import redis_problem
from quire.server.access.keys import Count, KeyEntry, key_problems
from quire.server.access.quota import QuotaLimits

Seconds = Annotated[float, Meta(gt=0)]
Weight = Annotated[float, Meta(gt=0)]
Price = Annotated[float, Meta(ge=0, le=1e6)]
PolicyName = Literal["round_robin", "power_of_two", "least_tokens", "session", "cache_aware"]
EXAMPLE = "docs/gateway.md has an example"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Table(Struct, kw_only=True, forbid_unknown_fields=True):
    """A table of the file. A key that is not a field is an error."""


class WorkerEntry(Table):
    """One engine: a Quire server, or any server with OpenAI's API."""

    url: str
    name: str = ""  # in metrics and logs; without it, host:port
    models: list[str] | None = None  # the models of the worker; without them, the worker is asked
    api_key: str | None = None  # the key that the gateway sends to the worker
    api_key_env: str | None = None  # the same, from an environment variable
    ca_file: str | None = None  # of https: certificates (PEM) to verify it with, instead of the system's
    client_cert_file: str | None = None  # of https: certificate and key (PEM) that the gateway shows
    tls_name: str = ""  # of https: the name in its certificate, where that is not the host of `url`
    weight: Weight = 1.0  # of its share of the load
    max_in_flight: Count = 256  # requests; more wait at the gateway
    kv_events: str | None = None  # where it publishes KV events, such as tcp://gpu-1:5557
    kv_replay: str | None = None  # where it replays them, such as tcp://gpu-1:5558
    kv_topic: str = ""
    tenant: str = ""  # the name that it has for the gateway's key, where it has keys

    @property
    def label(self) -> str:
        return self.name or urlsplit(self.url).netloc

    @property
    def secret(self) -> str:
        return self.api_key or os.environ.get(self.api_key_env or "", "")


class RouteRule(Table):
    """A request that meets all conditions goes to `model`. The first rule that fits decides."""

    model: str
    min_prompt_tokens: int | None = None  # estimated, from the bytes of the prompt
    max_prompt_tokens: int | None = None
    tools: bool | None = None
    schema: bool | None = None
    header: dict[str, str] | None = None


class RouteTarget(Table):
    model: str
    weight: Weight = 1.0


class TokenPrices(Table):
    """For a million tokens, in the currency of the budgets."""

    prompt: Price = 0.0
    cached: Price | None = None  # without it, as `prompt`
    output: Price = 0.0


class ModelRoute(Table):
    """A name that clients ask for. Without rules and targets it is a model that workers serve under this name."""

    rules: list[RouteRule] = field(default_factory=list)
    targets: list[RouteTarget] = field(default_factory=list)  # one is an alias; several share by weight (canary)
    fallbacks: list[str] = field(default_factory=list)  # asked when no worker of the target can take the request
    policy: PolicyName | None = None
    price: TokenPrices | None = None
    tokenizer: str | None = None  # of the model, for KV events: a directory, a .gguf file, a repository or an alias

    @property
    def leads_to(self) -> list[str]:
        return [rule.model for rule in self.rules] + [target.model for target in self.targets] + self.fallbacks


class GatewayKey(KeyEntry):
    """A key of the server's kind, and what the gateway adds."""

    routes: list[str] | None = None  # paths that it may call; without it, all
    budget: Price | None = None  # in the currency of the prices
    budget_period: BudgetPeriod = "month"  # in which it may be spent
    monthly_budget: Price | None = None  # `budget` for a month
    expires: Annotated[datetime, Meta(tz=True)] | None = None  # the key is refused from then on
    blocked: bool = False  # the key is refused for now
    group: str = ""  # whose limits and budget count, too

    @property
    def spending_limit(self) -> float | None:
        return self.budget if self.monthly_budget is None else self.monthly_budget


class KeyGroup(Table):
    """Keys that share limits and a budget, beside those that each has: a team."""

    name: Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,64}\Z")]
    models: list[str] | None = None  # that its keys may ask for; without it, what each may
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    tokens_per_day: Count | None = None
    max_concurrency: Count | None = None
    budget: Price | None = None
    budget_period: BudgetPeriod = "month"

    @property
    def limits(self) -> QuotaLimits:
        return QuotaLimits.of(self)


class Queue(Table):
    max_requests: Count = 1024  # requests that may wait for a worker
    max_seconds: Seconds = 60.0  # seconds that a request may wait
    cached_weight: float = 0.1  # what a cached prompt token counts in a tenant's share; a prompt token is 1
    output_weight: float = 2.0


class Faults(Table):
    connect_timeout: Seconds = 3.0
    response_timeout: Seconds = 600.0  # silence of a worker with a request
    max_attempts: Count = 3  # workers that one request is sent to, while nothing of a response is with the client
    health_interval: Seconds = 2.0
    breaker_failures: Count = 5  # in a row: the breaker opens
    breaker_seconds: Seconds = 5.0  # seconds that it stays open at first; doubled each time, up to 60
    resume_seconds: Annotated[float, Meta(ge=0)] = 30.0  # that a broken stream waits for a worker that goes on with it
    hedge_seconds: Seconds | None = None  # without a first byte, after which a second worker is asked, too; None: never
    hedge_ratio: Annotated[float, Meta(gt=0, le=1)] = 0.1  # of all requests, that may be hedged
    outlier_ratio: Annotated[float, Meta(gt=1)] = 5.0  # a worker so many times slower than the median is ejected


class Discovery(Table):
    """Workers that are found while the gateway runs, beside those of the configuration."""

    file: str | None = None  # with `workers` as in this file, TOML or JSON; read again when it changes
    dns: list[WorkerEntry] = field(default_factory=list)  # every address of the host of `url` is a worker
    ray: str | None = None  # the address of a Ray cluster, or `auto`: servers with --ray-discovery are workers
    interval: Seconds = 5.0  # between two looks

    @property
    def is_given(self) -> bool:
        return bool(self.file or self.dns or self.ray)


class Redis(Table):
    """Where several gateways count what keys use."""

    url: str  # redis://HOST:6379/0, with USER:PASSWORD@ before the host if it asks for them; rediss:// for TLS
    timeout: Seconds = 0.25
    when_away: Literal["local", "refuse"] = "local"  # each gateway counts for itself, or requests are refused with 503
    prefix: str = "quire:"  # of its keys


class CacheAware(Table):
    """Thresholds of the policy `cache_aware`, as sgl-router has them."""

    cache_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5  # of the prompt that has to be known at a worker
    balance_abs_threshold: Count = 32  # requests by which it may lead the least busy one
    balance_rel_threshold: Annotated[float, Meta(ge=1)] = 1.5
    max_blocks: Count = 1 << 18  # blocks that the index remembers


class GatewayConfig(Table):
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8080
    ssl_certfile: str | None = None  # certificate (PEM), for HTTPS; it may hold the key
    ssl_keyfile: str | None = None
    admin_host: str = "127.0.0.1"
    admin_port: Annotated[int, Meta(ge=0, le=65535)] = 8081
    admin_key: str | None = None
    admin_key_env: str | None = None  # the same, from an environment variable
    policy: PolicyName = "power_of_two"
    session_header: str = "x-session-id"  # of the policy `session`; without it, the body's `user`
    default_model: str | None = None  # of requests that name none
    workers: list[WorkerEntry] = field(default_factory=list)
    models: dict[str, ModelRoute] = field(default_factory=dict)
    keys: list[GatewayKey] = field(default_factory=list)
    groups: list[KeyGroup] = field(default_factory=list)
    queue: Queue = field(default_factory=Queue)
    faults: Faults = field(default_factory=Faults)
    cache_aware: CacheAware = field(default_factory=CacheAware)
    redis: Redis | None = None
    discovery: Discovery = field(default_factory=Discovery)
    otlp_traces_endpoint: str | None = None  # where spans are sent, such as http://collector:4318/v1/traces
    audit_log: str | None = None  # a file that decisions are appended to
    state_dir: str | None = None  # keys that are made while it runs, and what keys have spent, for the next start
    max_body_bytes: Count = 32 << 20
    max_connections: Count = 16384
    receive_timeout: Seconds = 60.0
    send_timeout: Seconds = 60.0
    keep_alive: Seconds = 60.0
    drain_timeout: Annotated[float, Meta(ge=0)] = 30.0

    @property
    def admin_secret(self) -> str:
        return self.admin_key or os.environ.get(self.admin_key_env or "", "")


def check_config(config: GatewayConfig, name: str) -> None:
    if problems := list(_problems(config)):
        count = f"{len(problems)} problems: " if len(problems) > 1 else ""
        raise BadRequest(f"{name}: {count}{'; '.join(problems)}", EXAMPLE, param="config")


def _problems(config: GatewayConfig) -> Iterator[str]:
    yield from worker_problems(config.workers)
    yield from (f"discovery: {problem}" for problem in worker_problems(config.discovery.dns))
    yield from (f"keys: {problem}" for problem in gateway_key_problems(config.keys, config.groups))
    yield from _model_problems(config)
    if config.redis is not None and (problem := redis_problem(config.redis.url)):
        yield problem
    tokenizers = any(route.tokenizer for route in config.models.values())
    if any(worker.kv_events for worker in (*config.workers, *config.discovery.dns)) and not tokenizers:
        yield "workers have kv_events, and no model has a `tokenizer`: events name blocks by their tokens"
    if config.discovery.ray is not None and find_spec("ray") is None:
        yield "discovery.ray needs Ray: pip install 'quire[ray]'"
    try:
        server_tls(config)
    except (OSError, ValueError) as error:
        yield f"cannot use {config.ssl_certfile} for TLS: {error}"
    if config.admin_key and config.admin_key_env:
        yield "there are admin_key and admin_key_env: give one"
    if config.admin_key_env and not os.environ.get(config.admin_key_env):
        yield f"there is no environment variable {config.admin_key_env}, which admin_key_env names"
    elif config.admin_host not in LOOPBACK and not config.admin_secret:
        yield f"admin_host is {config.admin_host}, and there is no admin_key: any client there could add workers"


def gateway_key_problems(keys: list[GatewayKey], groups: list[KeyGroup]) -> Iterator[str]:
    yield from key_problems(keys)
    names = [group.name for group in groups]
    yield from (f"two groups are called {name}" for name in sorted(set(names)) if names.count(name) > 1)
    for key in keys:
        if key.group and key.group not in names:
            near = nearest(key.group, names)
            hint = f" (did you mean `{near[0]}`?)" if near else ": write [[groups]]"
            yield f"`{key.name}` is of the group `{key.group}`, and there is none of that name{hint}"
        if key.monthly_budget is not None and (key.budget is not None or key.budget_period != "month"):
            yield f"`{key.name}` has monthly_budget beside budget or budget_period: write budget and budget_period"


def worker_problems(workers: list[WorkerEntry]) -> Iterator[str]:
    labels = [worker.label for worker in workers]
    for worker in workers:
        if problem := url_problem(worker.url):
            yield problem
        if (worker.ca_file or worker.client_cert_file or worker.tls_name) and not worker.url.startswith("https:"):
            yield f"worker {worker.label} has settings of TLS, and its url is not https"
        elif problem := tls_problem(worker):
            yield problem
        yield from (f"worker {worker.label}: {problem}" for problem in kv_problems(worker))
        if worker.api_key and worker.api_key_env:
            yield f"worker {worker.label} has api_key and api_key_env: give one"
        if worker.api_key_env and worker.api_key_env not in os.environ:
            yield f"worker {worker.label}: there is no environment variable {worker.api_key_env}"
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        yield f"two workers are called {label}: give one another `name`"


def kv_problems(worker: WorkerEntry) -> Iterator[str]:
    for name in ("kv_events", "kv_replay"):
        endpoint = getattr(worker, name)
        if endpoint is not None and not endpoint.startswith(("tcp://", "ipc://")):
            yield f"{name} is `{endpoint}`: write tcp://HOST:PORT or ipc://PATH"
    if worker.kv_replay and not worker.kv_events:
        yield "kv_replay is of no use without kv_events"
    if worker.kv_events and find_spec("zmq") is None:
        yield "kv_events needs pyzmq: pip install 'quire[events]'"


def server_tls(config: GatewayConfig) -> ssl.SSLContext | None:
    """TLS of the main listener. Raises OSError or ValueError if a file cannot be used."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_no_password)
    return context


def tls_context(worker: WorkerEntry) -> ssl.SSLContext | None:
    """Raises OSError or ValueError if a file cannot be used."""
    if not worker.url.startswith("https:"):
        return None
    context = ssl.create_default_context(cafile=worker.ca_file)
    if worker.client_cert_file:
        context.load_cert_chain(worker.client_cert_file, password=_no_password)
    return context


def _no_password() -> str:
    raise ValueError("the private key is encrypted")  # OpenSSL would ask the terminal


def tls_problem(worker: WorkerEntry) -> str:
    try:
        tls_context(worker)
    except (OSError, ValueError) as error:
        files = " and ".join(file for file in (worker.ca_file, worker.client_cert_file) if file)
        return f"worker {worker.label}: cannot use {files} for TLS: {error}"
    return ""


def url_problem(url: str) -> str:
    if _is_address(url):
        base = url.rstrip("/").removesuffix("/v1")
        return f"`{url}` ends in /v1, with which paths begin: write {base}" if base != url.rstrip("/") else ""
    shown = url.rpartition("@")[2]
    near = f"http://{shown}" if "://" not in url and _is_address(f"http://{shown}") else "http://HOST:PORT"
    keys = ", and keys as `api_key`" if "@" in url else ""
    return f"`{shown}` is no address of a worker: write {near}{keys}"


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
    return bool(good) and not (parts.query or parts.fragment or "@" in parts.netloc or any(c.isspace() for c in url))


def _model_problems(config: GatewayConfig) -> Iterator[str]:
    served = {model for worker in config.workers for model in worker.models or ()}
    is_open = config.discovery.is_given or not config.workers
    asks_workers = is_open or any(worker.models is None for worker in config.workers)
    known = served | config.models.keys()
    for name, route in config.models.items():
        for target in route.leads_to:
            if not asks_workers and target not in known:
                near = nearest(target, known)
                yield f"model `{name}` leads to `{target}`, which no worker serves" + (
                    f" (did you mean `{near[0]}`?)" if near else ""
                )
        if _leads_back(config, name):
            yield f"model `{name}` leads back to itself"


def _leads_back(config: GatewayConfig, name: str) -> bool:
    """A target of its own name is a model of the workers, not the route."""
    seen, open_names = set[str](), [other for other in config.models[name].leads_to if other != name]
    while open_names:
        other = open_names.pop()
        if other == name:
            return True
        if other in config.models and other not in seen:
            seen.add(other)
            open_names += [next_name for next_name in config.models[other].leads_to if next_name != other]
    return False
