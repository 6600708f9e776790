"""The page of the admin listener: its files, which need no key, and what it shows."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.gateway.ledger import UNIT
from quire.gateway.wire import Headers

if TYPE_CHECKING:
    from quire.gateway.gateway import Gateway

OWN = Path(__file__).parent / "page"
SHARED = Path(__file__).parents[1] / "server" / "page"  # of the server's page
FILES = {
    "/": (OWN / "index.html", b"text/html; charset=utf-8"),
    "/page/fleet.js": (OWN / "fleet.js", b"text/javascript"),
    "/page/fleet.css": (OWN / "fleet.css", b"text/css"),
    "/page/dom.js": (SHARED / "js" / "dom.js", b"text/javascript"),
    "/page/base.css": (SHARED / "style" / "base.css", b"text/css"),
    "/page/icon.svg": (SHARED / "icon.svg", b"image/svg+xml"),
}
HEADERS: Headers = [
    (b"cache-control", b"no-cache"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


def fleet_view(gateway: "Gateway", workers: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts since the start, and what is there now. `workers`: as /workers has them."""
    tokens = {"prompt": 0, "cached": 0, "output": 0}
    for (_, _, kind), count in gateway.metrics.tokens.items():
        tokens[kind] += count
    return {
        "now": gateway.loop.time(),
        "requests": sum(gateway.metrics.requests.values()),
        **{f"{kind}_tokens": count for kind, count in tokens.items()},
        "predicted_tokens": gateway.metrics.predicted_tokens,
        "waiting": len(gateway.queue),
        "in_flight": len(gateway.in_flight),
        "lanes": [
            {"priority": priority, "tenant": tenant, "model": model, "waiting": count}
            for (priority, tenant, model), count in gateway.queue.lanes().items()
        ],
        "tenants": [
            {
                "name": tenant.name,
                "in_flight": tenant.quota.running,
                "budget_limit": None if tenant.budget.limit is None else tenant.budget.limit / UNIT,
                "budget_left": None if tenant.budget.left is None else tenant.budget.left / UNIT,
            }
            for tenant in gateway.tenants.accounts()
        ],
        "workers": workers,
    }
