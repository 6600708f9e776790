"""What the gateway answers itself: whether it lives, its models, what is left of a key. And where those things are that
are asked for at other paths, mostly LiteLLM's."""

from typing import Any
from urllib.parse import unquote

from quire import __version__
from quire.gateway.gateway import Gateway
from quire.gateway.litellm_keys import litellm_key
from quire.gateway.made_keys import MadeKeys
from quire.gateway.tenants import Tenant
from quire.gateway.wire import json_bytes
from quire.server.errors import UnknownPath

READY_PATHS = frozenset({"/ready", "/health/readiness"})  # the second is LiteLLM's
OPEN_PATHS = READY_PATHS | {"/health", "/health/liveliness", "/health/liveness", "/v1/health", "/ping"}  # need no key
MILLION = 10**6  # our prices are for so many tokens, LiteLLM's for one

# By the first part of a path.
ADMIN = dict.fromkeys(
    ["workers", "metrics", "fleet", "scaling", "keys", "groups", "key", "spend"],
    "the admin listener has it: --admin-port",
)
LITELLM = {
    **dict.fromkeys(
        ["team", "user", "customer", "end_user", "organization", "budget"],
        "POST /keys of the admin listener makes a key; [[groups]] of the configuration are limits that keys share",
    ),
    **dict.fromkeys(["model", "config", "credentials"], "models are in the configuration: [models.NAME], and SIGHUP"),
    **dict.fromkeys(
        ["global", "audit"], "the admin listener has /keys and /metrics, and the file audit_log each request"
    ),
    **dict.fromkeys(["sso", "ui", "login"], "the admin listener has a page at /"),
    "health": "the admin listener has /workers, and what is wrong with each",
}
WORKERS = dict.fromkeys(
    ["sleep", "wake_up", "is_sleeping"], "ask the worker itself: others get its requests while it sleeps"
)
WHERE = {**LITELLM, **ADMIN, **WORKERS}


def where_it_is(path: str) -> str:
    """A hint, for a path that is not here."""
    return WHERE.get(path.split("/")[1], "docs/gateway.md lists paths")


def probe_answer(gateway: Gateway, path: str) -> tuple[int, bytes]:
    """/health: the gateway lives. /ready: some worker takes requests."""
    if path not in READY_PATHS:
        return 200, json_bytes({"status": "ok"})
    ready = sum(worker.takes_requests for worker in gateway.fleet.workers)
    return 200 if ready and not gateway.draining else 503, json_bytes({"ready_workers": ready})


def own_answer(gateway: Gateway, path: str, tenant: Tenant) -> bytes | None:
    """To a GET; None where the gateway has none."""
    if path == "/version":
        return json_bytes({"version": __version__})
    if path in ("/v1/models", "/models"):
        return json_bytes({"object": "list", "data": _cards(gateway, tenant)})
    if path.startswith("/v1/models/"):
        name = unquote(path.removeprefix("/v1/models/"))
        if card := next((card for card in _cards(gateway, tenant) if card["id"] == name), None):
            return json_bytes(card)
        raise UnknownPath(f"there is no model `{name}`")
    if path == "/api/tags":
        names = [str(card["id"]) for card in _cards(gateway, tenant)]
        return json_bytes({"models": [{"name": name, "model": name} for name in names]})
    if path in ("/model/info", "/v1/model/info"):
        return json_bytes({"data": [_litellm_model(gateway, card) for card in _cards(gateway, tenant)]})
    if path == "/key/info" and tenant.key is not None:
        return json_bytes({"info": litellm_key(MadeKeys(gateway), tenant)})
    return None


def _cards(gateway: Gateway, tenant: Tenant) -> list[dict[str, Any]]:
    """Every name that the tenant may ask for, with what workers say of it."""
    cards: dict[str, dict[str, Any]] = {
        name: {"id": name, "object": "model", "owned_by": "quire-gateway"} for name in gateway.config.models
    }
    for worker in gateway.fleet.workers:
        for name, card in worker.cards.items():
            cards[name] = {"object": "model", **card}
    return [card for name, card in sorted(cards.items()) if tenant.allows(name)]


def _litellm_model(gateway: Gateway, card: dict[str, Any]) -> dict[str, Any]:
    name = card["id"]
    route = gateway.config.models.get(name)
    price = route.price if route is not None else None
    costs = {} if price is None else {"input_cost_per_token": price.prompt, "output_cost_per_token": price.output}
    info = {
        "id": name,
        "max_tokens": card.get("max_model_len"),
        **{each: cost / MILLION for each, cost in costs.items()},
    }
    model = route.targets[0].model if route is not None and route.targets else name
    return {"model_name": name, "litellm_params": {"model": model}, "model_info": info}
