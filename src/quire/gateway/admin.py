"""The admin listener: workers and keys are added, changed and removed while the gateway runs; metrics are read."""

import asyncio
import hmac
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from quire.core.errors import BadRequest, QuireError
from quire.gateway.client_connection import ClientConnection
from quire.gateway.config import WorkerEntry
from quire.gateway.fleet_page import FILES, HEADERS, fleet_view
from quire.gateway.gateway import Gateway
from quire.gateway.litellm_keys import litellm_answer
from quire.gateway.made_keys import MadeKeys
from quire.gateway.scaling import scaling_view
from quire.gateway.wire import JSON, ClientRequest, Headers, error_body, json_bytes, whole_response
from quire.gateway.worker import Worker
from quire.server.access.keys import given_key, key_digest
from quire.server.errors import MethodNotAllowed, NotAllowed, Unauthorized, UnknownPath

Reply = tuple[int, bytes, bytes]  # status, body, media type


class Admin:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._keys = gateway, MadeKeys(gateway)
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, connection: ClientConnection, request: ClientRequest) -> None:
        task = self._gateway.loop.create_task(self._answer(connection, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, connection: ClientConnection, request: ClientRequest) -> None:
        extra: Headers = []
        try:
            if request.method == "GET" and request.path in FILES:
                file, media_type = FILES[request.path]
                status, body, extra = 200, file.read_bytes(), HEADERS
            else:
                self._check_key(request)
                status, body, media_type = await self._reply(request)
        except QuireError as error:
            status, body, media_type = error.status, error_body(request.path, error), JSON
        if connection.is_open:
            connection.write(whole_response(status, body, extra, request.keep_alive, media_type))
            connection.end(request.keep_alive)

    def _check_key(self, request: ClientRequest) -> None:
        key = self._gateway.config.admin_secret
        given = key_digest(given_key(request.header(b"authorization"), request.header(b"x-api-key")))
        if key and not hmac.compare_digest(given, key_digest(key.encode())):
            raise Unauthorized("no valid admin key", "send `Authorization: Bearer <admin_key>`")
        origin, host = request.header(b"origin"), request.header(b"host")
        if origin and origin.partition("://")[2] != host:  # in a browser, only the gateway's own page may ask
            raise NotAllowed(f"pages of {origin} may not ask the admin listener")
        if not key and host and not _is_address_or_localhost(host):
            # a page can let its own name lead here (DNS rebinding): its origin is the host then
            raise NotAllowed(f"the Host header is `{host[:80]}`", "ask for 127.0.0.1 or localhost, or set an admin_key")

    async def _reply(self, request: ClientRequest) -> Reply:
        match (request.method, *request.path.strip("/").split("/")):
            case ("GET", "health"):
                return _json(200, {"status": "ok"})
            case ("GET", "metrics"):
                from quire.gateway.exposition import MEDIA_TYPE, prometheus_text

                return 200, prometheus_text(self._gateway), MEDIA_TYPE.encode()
            case ("GET", "scaling", *model):
                return _json(200, self._scaling(request, unquote("/".join(model))))
            case ("GET", "fleet"):
                return _json(200, fleet_view(self._gateway, self._workers()))
            case ("GET", "workers"):
                return _json(200, {"workers": self._workers()})
            case ("GET", "workers", name):
                return _json(200, self._describe(self._gateway.fleet.find(name)))
            case ("POST", "workers"):
                return self._add(request.body)
            case ("POST", "workers", name, "drain"):
                return self._changed("worker_drained", self._gateway.fleet.drain(name).describe())
            case ("POST", "workers", name, "resume"):
                return self._changed("worker_resumed", self._gateway.fleet.resume(name).describe())
            case ("DELETE", "workers", name):
                return await self._remove(name)
            case ("GET", "groups"):
                return _json(200, {"groups": self._keys.groups()})
            case (_, "keys", *_):
                return self._key(request)
            case (_, "key" | "spend", *_):
                query = request.target.decode("latin-1").partition("?")[2]
                return _json(200, litellm_answer(self._keys, request.method, request.path, query, _fields(request)))
            case (_, "workers" | "health" | "metrics" | "scaling" | "fleet", *_):
                raise MethodNotAllowed(f"{request.method} is not for {request.path}", "docs/gateway.md lists what is")
        raise UnknownPath(
            f"there is no {request.path}",
            "the admin listener has a page at /, and /workers, /keys, /groups, /fleet, /scaling, /metrics, /health",
        )

    def _key(self, request: ClientRequest) -> Reply:
        keys = self._keys
        match (request.method, *request.path.strip("/").split("/")[1:]):
            case ("GET",):
                return _json(200, {"keys": keys.all()})
            case ("GET", name):
                return _json(200, keys.describe(keys.find(unquote(name))))
            case ("POST",):
                tenant, secret = keys.make(_fields(request))
                return _json(201, keys.describe(tenant) | ({"key": secret} if secret else {}))
            case ("PATCH", name):
                return _json(200, keys.describe(keys.change(unquote(name), _fields(request))))
            case ("POST", name, "rotate"):
                tenant, secret = keys.rotate(unquote(name))
                return _json(200, keys.describe(tenant) | {"key": secret})
            case ("POST", name, "block"):
                return _json(200, keys.describe(keys.change(unquote(name), {"blocked": True}, "key_blocked")))
            case ("POST", name, "unblock"):
                return _json(200, keys.describe(keys.change(unquote(name), {"blocked": False}, "key_unblocked")))
            case ("DELETE", name):
                keys.remove(unquote(name))
                return _json(200, {"name": unquote(name), "state": "removed"})
        raise MethodNotAllowed(f"{request.method} is not for {request.path}", "docs/gateway.md lists what is")

    def _workers(self) -> list[dict[str, Any]]:
        return [self._describe(worker) for worker in self._gateway.fleet.workers]

    def _describe(self, worker: Worker) -> dict[str, Any]:
        kv_fleet = self._gateway.kv_fleet
        events = {"kv_blocks": kv_fleet.index.num_blocks(worker.bit), "kv_in_step": kv_fleet.in_step(worker)}
        return worker.describe() | (events if kv_fleet.follows(worker) else {})

    def _scaling(self, request: ClientRequest, model: str) -> dict[str, int]:
        """`model`: of the path, as KEDA drops queries where it asks several gateways."""
        query = parse_qs(request.target.decode("latin-1").partition("?")[2])
        return scaling_view(self._gateway, model or query.get("model", [None])[0])

    def _add(self, body: bytes) -> Reply:
        try:
            entry = msgspec.json.decode(body, type=WorkerEntry)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadRequest(f"the worker: {error}", 'send {"url": "http://HOST:PORT"}') from None
        return self._changed("worker_added", self._gateway.fleet.add(entry).describe(), 201)

    async def _remove(self, name: str) -> Reply:
        """Answers when the requests in flight at the worker have ended."""
        await self._gateway.fleet.remove(name, self._gateway.config.drain_timeout)
        return self._changed("worker_removed", {"name": name, "state": "removed"})

    def _changed(self, decision: str, shown: dict[str, Any], status: int = 200) -> Reply:
        self._gateway.audit.write(decision, worker=shown["name"])
        return _json(status, shown)


def _fields(request: ClientRequest) -> dict[str, Any]:
    """The fields of a body that is a JSON object; none where there is no body."""
    try:
        return msgspec.json.decode(request.body or b"{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not a JSON object: {error}", "send JSON") from None


def _is_address_or_localhost(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ip_address(name))
    except ValueError:
        return False


def _json(status: int, value: object) -> Reply:
    return status, json_bytes(value), JSON
