"""Every request comes in here: it is authenticated, understood, charged to its tenant and given to the queue, or
answered by the gateway itself."""

import asyncio
import os
import re

from quire.core.errors import BadRequest, QuireError
from quire.gateway.client_connection import ClientConnection
from quire.gateway.exchange import Exchange
from quire.gateway.gateway import Gateway
from quire.gateway.loops import check_loop
from quire.gateway.outgoing import salt_at
from quire.gateway.own_answers import OPEN_PATHS, own_answer, probe_answer, where_it_is
from quire.gateway.policies import CacheAwarePolicy
from quire.gateway.prompt_tokenizers import LONG_BODY
from quire.gateway.request_facts import RequestFacts, read_facts
from quire.gateway.routes import RouteKind, route_kind
from quire.gateway.usage import TokenUsage
from quire.gateway.wire import JSON, ClientRequest, Headers, error_body, whole_response
from quire.server.errors import UnknownPath

NAMELESS = (RouteKind.ANY, RouteKind.STORED)  # routes whose requests name no model

_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Intake:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def handle(self, connection: ClientConnection, request: ClientRequest) -> Exchange | None:
        asked = request.header(b"x-request-id")
        request_id = asked if asked and _GOOD_ID.fullmatch(asked) else os.urandom(16).hex()
        try:
            return self._begin(connection, request, request_id)
        except QuireError as error:
            self._gateway.metrics.refused(error.code)
            self._gateway.audit.write("refused", request=request_id, path=request.path, code=error.code)
            extra = [(b"x-request-id", request_id.encode())]
            if (seconds := getattr(error, "retry_after", None)) is not None:
                extra.append((b"retry-after", str(seconds).encode()))
            self._reply(connection, request, error.status, error_body(request.path, error), extra)
            return None

    def _begin(self, connection: ClientConnection, request: ClientRequest, request_id: str) -> Exchange | None:
        gateway = self._gateway
        check_loop(request)
        if request.path in OPEN_PATHS and request.method in ("GET", "HEAD"):
            self._reply(connection, request, *probe_answer(gateway, request.path))
            return None
        preflight = request.method == "OPTIONS"  # a browser asks before it sends a key
        tenant = gateway.tenants.anonymous if preflight else gateway.tenants.find(request)
        if request.method in ("GET", "HEAD") and (body := own_answer(gateway, request.path, tenant)) is not None:
            self._reply(connection, request, 200, body)
            return None
        kind = route_kind(request.method, request.path)
        if kind is None:
            message = f"the gateway does not pass on {request.method} {request.path}"
            raise UnknownPath(message, where_it_is(request.path))
        facts = read_facts(request.path, request.body) if request.method == "POST" and request.body else RequestFacts()
        if not preflight:
            tenant.check_route(request.path)
            if kind not in NAMELESS:
                tenant.check_model(facts.model or gateway.config.default_model)
        targets: list[str | None] = [None] if kind in NAMELESS else gateway.router.targets(facts, request)
        exchange = Exchange(gateway, connection, request, request_id, tenant, kind, facts, targets)
        exchange.max_wait = _timeout(request)
        gateway.stored_responses.pin(exchange)
        if gateway.tracer is not None:
            gateway.tracer.begin(exchange)
        if gateway.charges.is_asked_of_redis(exchange):
            gateway.in_flight.add(exchange)
            gateway.start(self._enter_shared(exchange))
            return exchange
        try:
            gateway.charges.enter(exchange)
        except QuireError as error:
            if gateway.tracer is not None:
                exchange.status, exchange.error = error.status, error.code
                gateway.tracer.end(exchange, "", TokenUsage(), gateway.loop.time())
            raise
        gateway.in_flight.add(exchange)
        self._submit(exchange)
        return None if exchange.has_ended else exchange

    def _submit(self, exchange: Exchange) -> None:
        """Find out what the router may know of its prompt, and let it wait for a worker."""
        model, request = exchange.targets[0], exchange.request
        if exchange.kind is not RouteKind.GENERATE or not self._routes_by_tokens(model):
            self._gateway.queue.submit(exchange)
        elif len(request.body) <= LONG_BODY:
            self._submit_tokens(exchange, self._gateway.prompt_tokenizers.read(model, request.path, request.body))
        else:
            self._gateway.start(self._submit_off_loop(exchange))

    def _routes_by_tokens(self, model: str | None) -> bool:
        gateway = self._gateway
        return gateway.prompt_tokenizers.has(model) and isinstance(gateway.router.policy(model), CacheAwarePolicy)

    async def _submit_off_loop(self, exchange: Exchange) -> None:
        """Tokenize a long prompt while other requests go on."""
        model, request = exchange.targets[0], exchange.request
        ids = await asyncio.to_thread(self._gateway.prompt_tokenizers.read, model, request.path, request.body)
        self._submit_tokens(exchange, ids)

    def _submit_tokens(self, exchange: Exchange, ids: list[int]) -> None:
        if exchange.has_ended:
            return  # the client left meanwhile
        model = exchange.targets[0] or ""
        workers = self._gateway.router.serving(model)
        # Blocks of an adapter are apart from the model's.
        is_adapter = any(worker.cards[model].get("parent") for worker in workers)
        if ids and workers and not is_adapter:
            salt = salt_at(workers[0], exchange.tenant, exchange.request, exchange.facts)
            exchange.context.blocks = self._gateway.kv_fleet.blocks(ids, workers, salt)
        self._gateway.queue.submit(exchange)

    async def _enter_shared(self, exchange: Exchange) -> None:
        try:
            is_wanted = await self._gateway.charges.enter_shared(exchange)
        except QuireError as error:
            exchange.refuse(error)
            return
        if is_wanted:
            self._submit(exchange)

    def _reply(
        self,
        connection: ClientConnection,
        request: ClientRequest,
        status: int,
        body: bytes,
        extra: Headers | None = None,
    ) -> None:
        keep_alive = request.keep_alive and not self._gateway.draining
        response = whole_response(status, body, extra or [], keep_alive, JSON)
        connection.write(response[: -len(body)] if request.method == "HEAD" and body else response)
        connection.end(keep_alive)


def _timeout(request: ClientRequest) -> float:
    asked = request.header(b"x-request-timeout")
    if not asked:
        return float("inf")
    try:
        seconds = float(asked)
    except ValueError:
        seconds = float("nan")
    if not seconds > 0:
        raise BadRequest(f"the header x-request-timeout is {asked!r}", "it is a number of seconds, above 0")
    return seconds
