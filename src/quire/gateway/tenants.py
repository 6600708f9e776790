"""Who asks: the key of a request, what it may call, and what it has used."""

import hashlib
import hmac
import os
import time

from quire.core.errors import BadRequest
from quire.gateway.config import GatewayKey
from quire.gateway.ledger import UNIT, Budget, WallClock
from quire.gateway.routes import route_label
from quire.gateway.wire import ClientRequest
from quire.server.access.keys import given_key, key_digest
from quire.server.access.quota import Quota, QuotaLimits
from quire.server.errors import ModelNotAllowed, NotAllowed, Unauthorized


class Tenant:
    """`salt`: of cached prefixes at the workers; no other tenant can name it."""

    def __init__(self, key: GatewayKey | None, quota: Quota, budget: Budget) -> None:
        self.name = key.name if key else ""
        self.quota, self.budget = quota, budget
        self.weight = key.weight if key else 1.0
        self.priority = key.priority if key else 0
        self.salt = hashlib.sha256(b"quire cache salt" + key.digest).hexdigest()[:32] if key else ""
        self._models = None if key is None or key.models is None else frozenset(key.models)
        self._routes = None if key is None or key.routes is None else frozenset(key.routes)

    @property
    def is_limited(self) -> bool:
        return self.budget.limit is not None or self.quota.limits != QuotaLimits()

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


class Tenants:
    """All keys. Without any the gateway is open, and all clients are one tenant.

    Keys are looked up by a keyed hash of their SHA-256, so the time tells nothing about a key that is nearly right."""

    def __init__(self, keys: list[GatewayKey], clock: WallClock = time.time) -> None:
        self._secret = os.urandom(32)
        self._clock = clock
        self._by_hash: dict[bytes, tuple[bytes, Tenant]] = {}
        self._by_name: dict[str, Tenant] = {}
        self.anonymous = Tenant(None, Quota("", QuotaLimits()), Budget("", None, clock))
        self.update(keys)

    def update(self, keys: list[GatewayKey]) -> None:
        """What a name has used stays used."""
        by_hash, by_name = {}, {}
        for key in keys:
            old = self._by_name.get(key.name)
            quota = old.quota if old else Quota(key.name, key.limits)
            if quota.limits != key.limits:
                quota.change(key.limits)
            budget = old.budget if old else Budget(key.name, None, self._clock)
            budget.limit = None if key.monthly_budget is None else round(key.monthly_budget * UNIT)
            tenant = Tenant(key, quota, budget)
            by_name[key.name] = tenant
            by_hash[self._hash(key.digest)] = (key.digest, tenant)
        self._by_hash, self._by_name = by_hash, by_name

    def find(self, request: ClientRequest) -> Tenant:
        """Raises Unauthorized."""
        if not self._by_hash:
            return self.anonymous
        given = given_key(request.header(b"authorization"), request.header(b"x-api-key"))
        digest = key_digest(given)
        entry = self._by_hash.get(self._hash(digest))
        if entry is None or not hmac.compare_digest(entry[0], digest):
            message = "no valid API key" if given else "no API key was given"
            raise Unauthorized(message, "send `Authorization: Bearer <key>`")
        return entry[1]

    @property
    def is_open(self) -> bool:
        return not self._by_hash

    def all(self) -> list[Tenant]:
        return [self.anonymous] if self.is_open else list(self._by_name.values())

    def _hash(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")
