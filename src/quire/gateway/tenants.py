"""Who asks: the key of a request, what it may call, and what it has used."""

import hashlib
import hmac
import math
import os
import time
from collections.abc import Sequence

from quire.core.errors import BadRequest
from quire.gateway.accounts import Account
from quire.gateway.config import GatewayKey, KeyGroup
from quire.gateway.ledger import UNIT, Budget, WallClock
from quire.gateway.routes import route_label
from quire.gateway.state_folder import Spent
from quire.gateway.wire import ClientRequest
from quire.server.access.keys import given_key, key_digest
from quire.server.access.quota import Quota, QuotaLimits
from quire.server.errors import ModelNotAllowed, NotAllowed, Unauthorized

GROUP = "group "  # begins the name of its account: names of keys have no spaces


class Tenant(Account):
    """`salt`: of cached prefixes at the workers; no other tenant can name it. `accounts`: its requests are counted in
    each."""

    def __init__(self, key: GatewayKey | None, quota: Quota, budget: Budget, group: "Group | None" = None) -> None:
        super().__init__(key.name if key else "", quota, budget)
        self.key = key
        self.accounts: tuple[Account, ...] = (self,) if group is None else (self, group)
        self.has_limits = any(account.is_limited for account in self.accounts)
        self.has_budget = any(account.budget.limit is not None for account in self.accounts)
        self.is_blocked = key is not None and key.blocked
        self.expires_at = math.inf if key is None or key.expires is None else key.expires.timestamp()
        self.weight = key.weight if key else 1.0
        self.priority = key.priority if key else 0
        self.salt = hashlib.sha256(b"quire cache salt" + key.digest).hexdigest()[:32] if key else ""
        self._models = None if key is None or key.models is None else frozenset(key.models)
        if group is not None and group.models is not None:
            self._models = group.models if self._models is None else self._models & group.models
        self._routes = None if key is None or key.routes is None else frozenset(key.routes)

    def check_valid(self, now: float) -> None:
        if self.is_blocked:
            raise Unauthorized(f"key `{self.name}` is blocked", "ask who runs the gateway")
        if now >= self.expires_at:
            assert self.key is not None and self.key.expires is not None
            raise Unauthorized(f"key `{self.name}` has expired, at {self.key.expires.isoformat()}", "ask for a new one")

    def allows(self, model: str) -> bool:
        return self._models is None or model in self._models

    def check_route(self, path: str) -> None:
        if self._routes is not None and path not in self._routes and route_label(path) not in self._routes:
            hint = f"it may call {', '.join(sorted(self._routes))}"
            raise NotAllowed(f"key `{self.name}` may not call {path}", hint)

    def check_model(self, model: str | None) -> None:
        if self._models is None:
            return
        if model is None:
            raise BadRequest(f"the request names no model, and key `{self.name}` may use some only", param="model")
        if model not in self._models:
            allowed = ", ".join(f"`{name}`" for name in sorted(self._models)) or "none"
            raise ModelNotAllowed(f"key `{self.name}` may not use `{model}`", f"it may use {allowed}", param="model")


class Group(Account):
    """Keys that share limits and a budget, beside those of their own."""

    models: frozenset[str] | None = None


class Tenants:
    """All keys. Without any the gateway is open, and all clients are one tenant, unless keys are made while it runs:
    without the last of them it would be open.

    Keys are looked up by a keyed hash of their SHA-256, so the time tells nothing about a key that is nearly right."""

    def __init__(
        self,
        keys: list[GatewayKey],
        clock: WallClock = time.time,
        needs_keys: bool = False,
        groups: Sequence[KeyGroup] = (),
    ) -> None:
        self._secret = os.urandom(32)
        self._clock, self._needs_keys = clock, needs_keys
        self._by_hash: dict[bytes, tuple[bytes, Tenant]] = {}
        self._by_name: dict[str, Tenant] = {}
        self._groups: dict[str, Group] = {}
        self.anonymous = Tenant(None, Quota("", QuotaLimits()), Budget("", None, clock))
        self.update(keys, groups)

    def update(self, keys: list[GatewayKey], groups: Sequence[KeyGroup] = ()) -> None:
        """Replace the keys and groups. What a name has used stays used."""
        self._update_groups(groups)
        by_hash, by_name = {}, {}
        for key in keys:
            old = self._by_name.get(key.name)
            quota = old.quota if old else Quota(key.name, key.limits)
            if quota.limits != key.limits:
                quota.change(key.limits)
            budget = old.budget if old else Budget(key.name, None, self._clock)
            amount = key.spending_limit
            budget.change(None if amount is None else round(amount * UNIT), key.budget_period)
            tenant = Tenant(key, quota, budget, self._groups.get(key.group))
            by_name[key.name] = tenant
            by_hash[self._hash(key.digest)] = (key.digest, tenant)
        self._by_hash, self._by_name = by_hash, by_name
        self.is_open = not (by_hash or self._needs_keys)

    def _update_groups(self, groups: Sequence[KeyGroup]) -> None:
        old, self._groups = self._groups, {}
        for entry in groups:
            name = f"{GROUP}{entry.name}"
            group = old.get(entry.name) or Group(name, Quota(name, entry.limits), Budget(name, None, self._clock))
            group.quota.change(entry.limits)
            group.budget.change(None if entry.budget is None else round(entry.budget * UNIT), entry.budget_period)
            group.models = None if entry.models is None else frozenset(entry.models)
            self._groups[entry.name] = group

    def find(self, request: ClientRequest) -> Tenant:
        """Raises Unauthorized."""
        if self.is_open:
            return self.anonymous
        given = given_key(request.header(b"authorization"), request.header(b"x-api-key"))
        digest = key_digest(given)
        entry = self._by_hash.get(self._hash(digest))
        if entry is None or not hmac.compare_digest(entry[0], digest):
            message = "no valid API key" if given else "no API key was given"
            raise Unauthorized(message, "send `Authorization: Bearer <key>`")
        tenant = entry[1]
        if tenant.is_blocked or tenant.expires_at < math.inf:
            tenant.check_valid(self._clock())
        return tenant

    def named(self, name: str) -> Tenant | None:
        return self._by_name.get(name)

    def spent(self) -> Spent:
        """What was spent in the period that each budget is in."""
        budgets = [(account.name, account.budget) for account in self.accounts()]
        return {name: (budget.label, budget.spent) for name, budget in budgets if budget.spent}

    def restore(self, spent: Spent) -> None:
        """Take over what was spent before a restart."""
        for account in self.accounts():
            if account.name in spent:
                account.budget.restore(*spent[account.name])

    def all(self) -> list[Tenant]:
        return [self.anonymous] if self.is_open else list(self._by_name.values())

    def accounts(self) -> list[Account]:
        """Keys, and groups of keys."""
        return [*self.all(), *self.groups()]

    def groups(self) -> list[Group]:
        return list(self._groups.values())

    def _hash(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")
