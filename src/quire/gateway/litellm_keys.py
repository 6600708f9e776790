"""The requests by which keys of LiteLLM's proxy are managed, answered in its words by the admin listener."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, unquote

from quire.core.errors import BadRequest
from quire.gateway.budget_periods import BudgetPeriod
from quire.gateway.made_keys import MadeKeys
from quire.gateway.tenants import Tenant
from quire.server.errors import MethodNotAllowed, UnknownPath

FIELDS = {
    "key_alias": "name",
    "key": "key",
    "models": "models",
    "max_budget": "budget",
    "rpm_limit": "requests_per_minute",
    "tpm_limit": "tokens_per_minute",
    "max_parallel_requests": "max_concurrency",
    "allowed_routes": "routes",
    "blocked": "blocked",
    "team_id": "group",
}
PERIODS: dict[str, BudgetPeriod] = {
    **dict.fromkeys(["1h", "60m", "3600s"], "hour"),
    **dict.fromkeys(["1d", "24h"], "day"),
    **dict.fromkeys(["7d", "1w"], "week"),
    **dict.fromkeys(["30d", "31d", "1mo"], "month"),
}
INSTEAD = {
    "team": "write `team_id`, the name of one of [[groups]]",
    "user_id": "make a key for each user",
    "soft_budget": "deploy/prometheus has an alert for budgets that are nearly spent",
    "aliases": "[models.NAME] in the configuration",
    "metadata": "the name of the key is in metrics and the audit log",
    "tags": "the name of the key is in metrics and the audit log",
}
VERBS = ("generate", "info", "list", "update", "regenerate", "block", "unblock", "delete")
PATHS = f"/key/ with {', '.join(VERBS)}, and /spend/keys"
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def litellm_answer(keys: MadeKeys, method: str, path: str, query: str, body: dict[str, Any]) -> object:
    """Raises for what is not here, with what is there instead."""
    asked = {name: values[0] for name, values in parse_qs(query).items()}
    match (method, *path.strip("/").split("/")):
        case ("POST", "key", "generate" | "service-account"):
            tenant, secret = keys.make({"budget_period": "total", **_ours(body)})
            return litellm_key(keys, tenant) | {"key": secret}
        case ("GET", "key", "info"):
            tenant = _named(keys, asked)
            return {"key": asked.get("key"), "info": litellm_key(keys, tenant)}
        case ("GET", "key", "list"):
            names = [each["name"] for each in keys.all()]
            return {"keys": names, "total_count": len(names), "current_page": 1, "total_pages": 1}
        case ("POST", "key", "update"):
            tenant = _named(keys, body)
            changes = {name: value for name, value in _ours(body).items() if name not in ("name", "key")}
            return litellm_key(keys, keys.change(tenant.name, changes))
        case ("POST", "key", "regenerate"):
            return _rotated(keys, _named(keys, body))
        case ("POST", "key", secret, "regenerate"):
            return _rotated(keys, keys.with_secret(unquote(secret)))
        case ("POST", "key", "block" | "unblock" as verb):
            name = _named(keys, body).name
            return litellm_key(keys, keys.change(name, {"blocked": verb == "block"}, f"key_{verb}ed"))
        case ("POST", "key", "delete"):
            tenants = [keys.with_secret(str(secret)) for secret in body.get("keys") or ()]
            tenants += [keys.find(str(name)) for name in body.get("key_aliases") or ()]
            for tenant in tenants:
                keys.remove(tenant.name)
            return {"deleted_keys": [tenant.name for tenant in tenants]}
        case ("GET", "spend", "keys"):
            return [litellm_key(keys, keys.find(each["name"])) for each in keys.all()]
        case (_, "key", verb) if verb in VERBS:
            raise MethodNotAllowed(f"{method} is not for {path}", "as in LiteLLM: GET info and list, POST the others")
    raise UnknownPath(f"there is no {path}", f"of LiteLLM's paths there are {PATHS}")


def _ours(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a LiteLLM key by our names. A field that would be without effect is refused, unless it is empty."""
    if foreign := [name for name, value in body.items() if value and name not in _KNOWN]:
        hint = next((f"{name}: {INSTEAD[name]}" for name in foreign if name in INSTEAD), "")
        known = f"a key has {', '.join(sorted(_KNOWN))}"
        raise BadRequest(f"keys have no {', '.join(foreign)} here", hint or known, param=foreign[0])
    ours = {FIELDS[name]: value for name, value in body.items() if name in FIELDS and value is not None}
    if ours.get("models") == []:
        del ours["models"]  # all, to LiteLLM
    if (duration := body.get("budget_duration")) is not None:
        ours["budget_period"] = _period(str(duration))
    if (duration := body.get("duration")) is not None:
        ours["expires"] = (datetime.now(UTC) + _seconds(str(duration))).isoformat()
    return ours


_KNOWN = frozenset({*FIELDS, "budget_duration", "duration"})


def _named(keys: MadeKeys, asked: dict[str, Any]) -> Tenant:
    if asked.get("key"):
        return keys.with_secret(str(asked["key"]))
    if asked.get("key_alias"):
        return keys.find(str(asked["key_alias"]))
    raise BadRequest("no key is named", "give `key`, which is the key or its SHA-256, or `key_alias`", param="key")


def _rotated(keys: MadeKeys, tenant: Tenant) -> dict[str, Any]:
    tenant, secret = keys.rotate(tenant.name)
    return litellm_key(keys, tenant) | {"key": secret}


def litellm_key(keys: MadeKeys, tenant: Tenant) -> dict[str, Any]:
    """With LiteLLM's names. `token`: the SHA-256 of the key, by which LiteLLM knows it."""
    shown = keys.describe(tenant)
    assert tenant.key is not None
    periods = {period: name for name, period in reversed(PERIODS.items())}
    return {
        **{theirs: shown[ours] for theirs, ours in FIELDS.items() if ours != "key"},
        "models": shown["models"] or [],
        "token": tenant.key.digest.hex(),
        "spend": shown["spent"],
        "budget_duration": periods.get(shown["budget_period"]) if shown["budget"] is not None else None,
        "expires": shown["expires"],
    }


def _period(duration: str) -> BudgetPeriod:
    if duration not in PERIODS:
        message = f"budget_duration is `{duration[:40]}`, and budgets begin anew with the hour, day, week or month"
        raise BadRequest(message, "write 1h, 1d, 7d or 30d, or leave it out: for all time", param="budget_duration")
    return PERIODS[duration]


def _seconds(duration: str) -> timedelta:
    match = re.fullmatch(r"(\d{1,6})(mo|[smhdw])", duration)
    if match is None:
        raise BadRequest(f"duration is `{duration[:40]}`", "write 30s, 30m, 30h, 30d, 2w or 1mo", param="duration")
    count, unit = int(match[1]), match[2]
    return timedelta(days=30 * count) if unit == "mo" else timedelta(**{UNITS[unit]: count})
