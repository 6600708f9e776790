"""A configuration of LiteLLM's proxy as one of the gateway: what it has in common, and notes on what is left out."""

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from quire.core.errors import BadRequest
from quire.gateway.toml_text import toml_text

# Providers whose servers have OpenAI's API, and where they are if the file does not say.
OPENAI_LIKE = {
    "openai": "https://api.openai.com",
    "text-completion-openai": "https://api.openai.com",
    "ollama": "http://localhost:11434",
    "ollama_chat": "http://localhost:11434",
    "groq": "https://api.groq.com/openai",
    "deepseek": "https://api.deepseek.com",
    "mistral": "https://api.mistral.ai",
    "together_ai": "https://api.together.xyz",
    "openrouter": "https://openrouter.ai/api",
} | dict.fromkeys(
    ["hosted_vllm", "vllm", "custom_openai", "openai_like", "litellm_proxy", "lm_studio", "llamafile"], ""
)
POLICIES = {
    "simple-shuffle": "power_of_two",
    "least-busy": "power_of_two",
    "usage-based-routing": "least_tokens",
    "usage-based-routing-v2": "least_tokens",
}
MILLION = 10**6  # our prices are for so many tokens, LiteLLM's for one
VARIABLE = "os.environ/"  # begins the name of an environment variable
USED = {
    "model_list": {"model_name", "litellm_params", "model_info"},
    "litellm_params": {
        *("model", "api_base", "base_url", "api_key", "weight", "max_parallel_requests"),
        *("input_cost_per_token", "output_cost_per_token", "cache_read_input_token_cost"),
    },
    "router_settings": {
        *("routing_strategy", "fallbacks", "default_fallbacks", "model_group_alias", "num_retries", "timeout"),
        *("allowed_fails", "cooldown_time", "redis_host", "redis_port", "redis_password"),
    },
    "litellm_settings": {"fallbacks", "default_fallbacks", "num_retries", "request_timeout", "allowed_fails"},
    "general_settings": {"master_key", "database_url"},
}

INSTEAD = {
    "allowed_routes": "`routes` of [[keys]]",
    "cache": "answers are not cached, prefixes are, at the engines",
    "callbacks": "audit_log, otlp_traces_endpoint and /metrics",
    "context_window_fallbacks": "`rules` with max_prompt_tokens",
    "max_budget": "budget of [[keys]]",
    "rpm": "workers that are full answer 429, and others are asked",
    "store_model_in_db": "models are in the file, read again on SIGHUP",
    "success_callback": "audit_log, otlp_traces_endpoint and /metrics",
    "tpm": "workers that are full answer 429, and others are asked",
}


@dataclass
class Converted:
    config: dict[str, Any] = field(default_factory=dict)  # as the gateway's file has it
    notes: list[str] = field(default_factory=list)  # what a person has to look at

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def text(self) -> str:
        return "".join(f"# {note}\n" for note in self.notes) + toml_text(self.config)


def read_litellm(path: Path) -> Converted:
    """Raises BadRequest for a file that is no configuration of LiteLLM."""
    import yaml  # type: ignore[import-untyped]  # a dependency of huggingface-hub

    try:
        given = yaml.safe_load(path.read_text())
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror}", param="from_litellm") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} is not YAML: {str(error).splitlines()[0]}", param="from_litellm") from None
    if not isinstance(given, dict) or not isinstance(given.get("model_list"), list):
        hint = "it is the file of `litellm --config`"
        raise BadRequest(f"{path} has no `model_list`", hint, param="from_litellm")
    return convert(given)


def convert(given: dict[str, Any]) -> Converted:
    converted = Converted()
    names = _Names(converted)
    for number, entry in enumerate(given["model_list"]):
        names.add(_table(entry), number)
    names.finish()
    router, settings = _table(given.get("router_settings")), _table(given.get("litellm_settings"))
    _routing(converted, {**settings, **router})
    _faults(converted, {**settings, **router})
    _redis(converted, router)
    _keys(converted, _table(given.get("general_settings")))
    for section in given:
        if section not in USED:
            converted.note(f"left out: {section}")
        elif section != "model_list":
            _leave_out(converted, section, _table(given[section]))
    return converted


class _Names:
    """Deployments by the name that clients ask for, and workers by address and key."""

    def __init__(self, converted: Converted) -> None:
        self._converted = converted
        self._workers: dict[tuple[str, str], dict[str, Any]] = {}
        self._targets: dict[str, dict[str, float]] = {}  # weights, by name and model
        self._prices: dict[str, dict[str, float]] = {}

    def add(self, entry: dict[str, Any], number: int) -> None:
        params, info = _table(entry.get("litellm_params")), _table(entry.get("model_info"))
        name, full = str(entry.get("model_name") or ""), str(params.get("model") or "")
        if not name or not full:
            raise BadRequest(
                f"model_list[{number}] has no model_name, or no litellm_params.model", param="from_litellm"
            )
        provider, _, model = full.partition("/")
        if provider not in OPENAI_LIKE:
            provider, model = ("openai", full) if not model else (provider, model)
        base = str(params.get("api_base") or params.get("base_url") or OPENAI_LIKE.get(provider, ""))
        if provider not in OPENAI_LIKE or not base:
            why = "its api_base is missing" if provider in OPENAI_LIKE else f"`{provider}` has no OpenAI-compatible API"
            self._converted.note(f"left out: `{name}` ({full}): {why}; a LiteLLM that stays can be a worker")
            return
        _leave_out(self._converted, "litellm_params", params)
        worker = self._worker(base.removesuffix("/").removesuffix("/v1"), str(params.get("api_key") or ""))
        if model not in worker["models"]:
            worker["models"].append(model)
        if limit := params.get("max_parallel_requests"):
            worker["max_in_flight"] = worker.get("max_in_flight", 0) + int(limit)
        if params.get("weight"):
            worker["weight"] = float(params["weight"])  # among workers of the same model
        weights = self._targets.setdefault(name, {})
        weights[model] = weights.get(model, 0.0) + float(params.get("weight") or 1)
        if price := _price({**info, **params}):
            self._prices[model] = price

    def _worker(self, url: str, key: str) -> dict[str, Any]:
        worker = self._workers.setdefault((url, key), {"url": url, "models": []})
        if key.startswith(VARIABLE):
            worker["api_key_env"] = key.removeprefix(VARIABLE)
        elif key:
            worker["api_key"] = key
        return worker

    def finish(self) -> None:
        config, workers = self._converted.config, list(self._workers.values())
        urls = [worker["url"] for worker in workers]
        for number, worker in enumerate(workers):
            if urls.count(worker["url"]) > 1:
                worker["name"] = f"worker-{number}"  # one server with several keys
        models = config.setdefault("models", {})
        for name, weights in self._targets.items():
            if len(weights) > 1:
                models[name] = {"targets": [{"model": model, "weight": weight} for model, weight in weights.items()]}
            elif name not in weights:
                models[name] = {"targets": [{"model": model} for model in weights]}
        for model, price in self._prices.items():
            models.setdefault(model, {})["price"] = price
        config["workers"] = workers
        if not workers:
            self._converted.note("no worker is left: nothing of model_list has OpenAI's API")


def _routing(converted: Converted, settings: dict[str, Any]) -> None:
    models = converted.config["models"]
    if strategy := settings.get("routing_strategy"):
        converted.config["policy"] = POLICIES.get(strategy, "power_of_two")
        if strategy not in POLICIES:
            converted.note(f"routing_strategy {strategy} became power_of_two; for engines, cache_aware is better")
    for alias, target in _table(settings.get("model_group_alias")).items():
        name = target.get("model") if isinstance(target, dict) else target
        models[alias] = {"targets": [{"model": str(name)}]}
    for entry in settings.get("fallbacks") or []:
        for name, others in _table(entry).items():
            models.setdefault(name, {})["fallbacks"] = [str(other) for other in others]
    if default := settings.get("default_fallbacks"):
        for name in [name for name in models if name not in default]:
            models[name].setdefault("fallbacks", [str(other) for other in default])


def _faults(converted: Converted, settings: dict[str, Any]) -> None:
    faults: dict[str, Any] = {}
    if (retries := settings.get("num_retries")) is not None:
        faults["max_attempts"] = int(retries) + 1
    if fails := settings.get("allowed_fails"):
        faults["breaker_failures"] = int(fails)
    if seconds := settings.get("cooldown_time"):
        faults["breaker_seconds"] = float(seconds)
    if timeout := settings.get("timeout") or settings.get("request_timeout"):
        faults["response_timeout"] = float(timeout)
    if faults:
        converted.config["faults"] = faults


def _redis(converted: Converted, router: dict[str, Any]) -> None:
    if not (host := router.get("redis_host")):
        return
    found = [_value(converted, str(router.get(name) or "")) for name in ("redis_host", "redis_port", "redis_password")]
    password = f":{quote(found[2], safe='')}@" if found[2] else ""
    converted.config["redis"] = {"url": f"redis://{password}{found[0] or host}:{found[1] or 6379}/0"}


def _keys(converted: Converted, general: dict[str, Any]) -> None:
    if general.get("database_url"):
        converted.config["state_dir"] = "gateway-state"
        converted.note("database_url became state_dir: a directory with keys that are made while it runs")
    master = str(general.get("master_key") or "")
    if not master:
        return
    if master.startswith(VARIABLE):
        converted.config["admin_key_env"] = master.removeprefix(VARIABLE)
    else:
        converted.config["admin_key"] = master
    if value := _value(converted, master):
        digest = hashlib.sha256(value.encode()).hexdigest()
        converted.config["keys"] = [{"name": "master", "sha256": digest}]
    converted.note(
        "keys of LiteLLM's database are not in its file: POST /keys takes their SHA-256, --new-key NAME makes others"
    )


def _value(converted: Converted, text: str) -> str:
    """The text itself, or that of the environment variable which it names."""
    if not text.startswith(VARIABLE):
        return text
    name = text.removeprefix(VARIABLE)
    if name not in os.environ:
        converted.note(f"there is no environment variable {name} here: what it holds is left out")
    return os.environ.get(name, "")


def _price(params: dict[str, Any]) -> dict[str, float]:
    names = {
        "prompt": "input_cost_per_token",
        "cached": "cache_read_input_token_cost",
        "output": "output_cost_per_token",
    }
    given = {ours: params[theirs] for ours, theirs in names.items() if params.get(theirs) is not None}
    return {ours: round(float(value) * MILLION, 9) for ours, value in given.items()}


def _leave_out(converted: Converted, section: str, given: dict[str, Any]) -> None:
    for name in given:
        if name not in USED[section]:
            advice = f" ({INSTEAD[name]})" if name in INSTEAD else ""
            converted.note(f"left out: {section}.{name}{advice}")


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
