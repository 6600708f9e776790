"""API keys, from the command line and from a file that is reloaded on SIGHUP."""

import hashlib
import hmac
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct

from quire.core.errors import BadRequest, QuireError
from quire.server.access.quota import Quota, QuotaLimits
from quire.server.errors import ModelNotAllowed, Unauthorized

if TYPE_CHECKING:
    from starlette.datastructures import Headers

log = logging.getLogger("quire.server")

Count = Annotated[int, Meta(ge=1, le=2**53)]


class KeyEntry(Struct, kw_only=True, forbid_unknown_fields=True):
    """One entry of the file."""

    name: Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,64}\Z")]  # the tenant
    key: str | None = None  # give this or sha256
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")] | None = None  # what `printf %s KEY | sha256sum` prints
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    tokens_per_day: Count | None = None
    max_concurrency: Count | None = None
    priority: int = 0  # under the policies priority and fair: lower runs earlier
    weight: Annotated[float, Meta(gt=0)] = 1.0  # of its share, under the policy fair
    models: list[str] | None = None  # null: all
    live: bool = False  # may use /live, which shows the load of all tenants

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256) if self.sha256 else key_digest((self.key or "").encode())

    @property
    def limits(self) -> QuotaLimits:
        return QuotaLimits.of(self)


class KeysFile(Struct, forbid_unknown_fields=True):
    keys: list[KeyEntry]


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    digest: bytes  # SHA-256
    quota: Quota
    priority: int | None = None  # None: what the request says
    models: frozenset[str] | None = None  # None: all
    live: bool = True
    weight: float = 1.0

    def allows(self, model: str) -> bool:
        return self.models is None or model in self.models

    def check(self, model: str) -> None:
        if not self.allows(model):
            allowed = ", ".join(f"`{name}`" for name in sorted(self.models or ())) or "none"
            raise ModelNotAllowed(f"key `{self.name}` may not use `{model}`", f"it may use {allowed}", param="model")


class KeyRing:
    """All keys. Without any, the server is open."""

    def __init__(self, given: Iterable[str] = (), file: str | None = None) -> None:
        self._given = [
            Key(f"key-{index}", key_digest(key.encode()), Quota(f"key-{index}", QuotaLimits()))
            for index, key in enumerate(given)
        ]
        self._file = Path(file) if file else None
        self._keys = self._given + self._read()

    def reload(self) -> None:
        """Read the file again. If it is wrong, the old keys stay. A key whose limits are the same keeps its quota."""
        try:
            self._keys = self._given + self._read()
        except QuireError as error:
            log.error("keys were not reloaded: %s", error)
        else:
            log.info("%d keys reloaded from %s", len(self._keys) - len(self._given), self._file)

    def find(self, headers: "Headers") -> Key | None:
        """The key of a request; None where no keys are needed. Raises Unauthorized."""
        if not self._keys:
            return None
        given = given_key(headers.get("authorization", ""), headers.get("x-api-key", ""))
        digest = key_digest(given)
        matches = [hmac.compare_digest(digest, key.digest) for key in self._keys]  # every key, in equal time
        if not any(matches):
            raise Unauthorized(
                "no valid API key" if given else "no API key was given", "send `Authorization: Bearer <key>`"
            )
        return self._keys[matches.index(True)]

    def _read(self) -> list[Key]:
        if self._file is None:
            return []
        old = {key.name: key.quota for key in getattr(self, "_keys", ())}
        entries = _entries(self._file)
        keys = []
        for entry in entries:
            quota = old.get(entry.name)
            if quota is None or quota.limits != entry.limits:
                quota = Quota(entry.name, entry.limits)
            models = None if entry.models is None else frozenset(entry.models)
            keys.append(Key(entry.name, entry.digest, quota, entry.priority, models, entry.live, entry.weight))
        return keys


def _entries(path: Path) -> list[KeyEntry]:
    decode = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
    try:
        entries = decode(path.read_bytes(), type=KeysFile).keys
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror}", param="keys_file") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path}: {error}", "docs/operating.md has an example", param="keys_file") from None
    for problem in key_problems(entries):
        raise BadRequest(f"{path}: {problem}", param="keys_file")
    return entries


def key_problems(entries: Iterable[KeyEntry]) -> Iterator[str]:
    """What is wrong with a list of keys. No problem quotes a key."""
    names, digests = set[str](), set[bytes]()
    for entry in entries:
        if bool(entry.key) == bool(entry.sha256):
            yield f"`{entry.name}` has to have one of key and sha256"
        elif entry.digest in digests:
            yield f"`{entry.name}` and an entry before it have the same key"
        if entry.name in names:
            yield f"two entries have the same name `{entry.name}`"
        names.add(entry.name)
        digests.add(entry.digest)


def given_key(authorization: str, x_api_key: str) -> bytes:
    """The key in one of these headers, as it was sent: headers are decoded as latin-1."""
    kind, _, key = authorization.partition(" ")
    if kind.lower() != "bearer":
        key = x_api_key  # Anthropic's
    return key.strip().encode("latin-1")


def key_digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
