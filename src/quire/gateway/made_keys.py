"""Keys that are made, changed and removed while the gateway runs, by its admin listener."""

import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from quire.core.errors import BadRequest, QuireError
from quire.gateway.accounts import Account
from quire.gateway.config import GatewayKey, gateway_key_problems
from quire.gateway.config_file import explained
from quire.gateway.gateway import Gateway
from quire.gateway.ledger import UNIT
from quire.gateway.tenants import GROUP, Tenant
from quire.server.access.keys import key_digest

UNCHANGED = frozenset({"name", "key", "sha256"})
NOT_SHOWN = frozenset({"key", "sha256", "monthly_budget"})


class UnknownKey(QuireError):
    status, code = 404, "key_not_found"


class MadeKeys:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def make(self, fields: dict[str, Any]) -> tuple[Tenant, str]:
        """-> its tenant, and the key itself, which is told this once; empty if its digest was given"""
        fields = {"name": f"key-{secrets.token_hex(4)}", **fields}
        secret = "" if fields.get("sha256") else str(fields.get("key") or f"sk-{secrets.token_urlsafe(32)}")
        made = _entry({**fields, **_digest(secret)} if secret else fields)
        self._change("key_made", made.name, lambda keys: [*keys, made])
        return self.find(made.name), secret

    def change(self, name: str, fields: dict[str, Any], decision: str = "key_changed") -> Tenant:
        """Other limits. What was used stays used."""
        own = self._own(name)
        if fixed := sorted(fields.keys() & UNCHANGED):
            raise BadRequest(
                f"{' and '.join(fixed)} of a key cannot be changed", "POST /keys/NAME/rotate makes another"
            )
        changed = _entry({**_fields(own), **fields})
        self._change(decision, name, lambda keys: [changed if key.name == name else key for key in keys])
        return self.find(name)

    def rotate(self, name: str) -> tuple[Tenant, str]:
        """Another secret; the old one is refused from now on. What was used stays used."""
        secret = f"sk-{secrets.token_urlsafe(32)}"
        changed = _entry({**_fields(self._own(name)), **_digest(secret)})
        self._change("key_rotated", name, lambda keys: [changed if key.name == name else key for key in keys])
        return self.find(name), secret

    def remove(self, name: str) -> None:
        self._own(name)
        self._change("key_removed", name, lambda keys: [key for key in keys if key.name != name])

    def find(self, name: str) -> Tenant:
        tenant = self._gateway.tenants.named(name)
        if tenant is None:
            raise UnknownKey(f"there is no key `{name}`", "GET /keys lists them")
        return tenant

    def with_secret(self, secret: str) -> Tenant:
        """`secret`: the key itself, or its SHA-256."""
        digests = {key_digest(secret.encode("utf-8", "surrogateescape")).hex(), secret.lower()}
        for tenant in self._gateway.tenants.all():
            if tenant.key is not None and tenant.key.digest.hex() in digests:
                return tenant
        raise UnknownKey("no key is that one", "GET /keys lists them by name")

    def describe(self, tenant: Tenant) -> dict[str, Any]:
        """Never the key."""
        assert tenant.key is not None
        return {
            **{name: value for name, value in _fields(tenant.key).items() if name not in NOT_SHOWN},
            "budget": tenant.key.spending_limit,
            **_used(tenant),
            "made": self._is_made(tenant.name),
        }

    def groups(self) -> list[dict[str, Any]]:
        accounts = {account.name.removeprefix(GROUP): account for account in self._gateway.tenants.groups()}
        return [msgspec.to_builtins(entry) | _used(accounts[entry.name]) for entry in self._gateway.config.groups]

    def all(self) -> list[dict[str, Any]]:
        return [self.describe(tenant) for tenant in self._gateway.tenants.all() if tenant.key is not None]

    def _own(self, name: str) -> GatewayKey:
        tenant = self.find(name)
        if tenant.key is None or not self._is_made(name):
            hint = "change it there, and send SIGHUP to the gateway"
            raise BadRequest(f"key `{name}` is one of the configuration", hint, param="name")
        return tenant.key

    def _is_made(self, name: str) -> bool:
        state = self._gateway.state
        return state is not None and any(key.name == name for key in state.keys)

    def _change(self, decision: str, name: str, edit: Callable[[list[GatewayKey]], list[GatewayKey]]) -> None:
        config = self._gateway.config

        def checked(keys: list[GatewayKey]) -> list[GatewayKey]:
            edited = edit(keys)
            for problem in gateway_key_problems([*config.keys, *edited], config.groups):
                raise BadRequest(problem, "GET /keys lists them")
            return edited

        self._gateway.change_keys(checked)
        self._gateway.audit.write(decision, tenant=name)


def _used(account: Account) -> dict[str, Any]:
    left = account.budget.left  # begins a new period, if it is time
    return {
        "spent": account.budget.spent / UNIT,
        "budget_left": None if left is None else left / UNIT,
        "in_flight": account.quota.running,
    }


def _entry(fields: dict[str, Any]) -> GatewayKey:
    try:
        return msgspec.convert(fields, GatewayKey)
    except msgspec.ValidationError as error:
        raise BadRequest(*explained(error, root="keys")) from None


def _digest(secret: str) -> dict[str, Any]:
    return {"key": None, "sha256": key_digest(secret.encode()).hex()}


def _fields(key: GatewayKey) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(key)
    return fields
