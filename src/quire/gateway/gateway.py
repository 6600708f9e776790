"""The gateway: every request is authenticated, understood, admitted and routed here."""

import asyncio
import logging
import os
import re
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from quire import __version__
from quire.core.errors import BadRequest, QuireError
from quire.gateway.admission import AdmissionQueue
from quire.gateway.audit import AuditLog
from quire.gateway.charges import Charges
from quire.gateway.client_connection import ClientConnection
from quire.gateway.config import GatewayConfig, WorkerEntry
from quire.gateway.discovery import WorkerDiscovery
from quire.gateway.exchange import Exchange
from quire.gateway.fleet import CONFIGURATION, WorkerFleet
from quire.gateway.hedging import HedgeCredit
from quire.gateway.kv_fleet import KVFleet
from quire.gateway.loops import check_loop
from quire.gateway.metrics import GatewayMetrics
from quire.gateway.outgoing import salt_at
from quire.gateway.policies import CacheAwarePolicy
from quire.gateway.prompt_tokenizers import LONG_BODY, PromptTokenizers
from quire.gateway.request_facts import RequestFacts, read_facts
from quire.gateway.router import Router
from quire.gateway.routes import RouteKind, route_kind
from quire.gateway.stored_responses import StoredResponses
from quire.gateway.tenants import Tenant, Tenants
from quire.gateway.tracing import gateway_tracer
from quire.gateway.usage import TokenUsage
from quire.gateway.wire import ClientRequest, Headers, error_body, json_bytes, whole_response
from quire.gateway.worker import Worker
from quire.server.errors import UnknownPath

if TYPE_CHECKING:
    from quire.gateway.shared_limits import SharedLimits

log = logging.getLogger("quire.gateway")

JSON = b"application/json"
NAMELESS = (RouteKind.ANY, RouteKind.STORED)  # they name no model
# Fields of the configuration that are read at the start only.
START_ONLY = (
    *("host", "port", "ssl_certfile", "ssl_keyfile", "admin_host", "admin_port", "redis", "otlp_traces_endpoint"),
    *("max_body_bytes", "max_connections", "receive_timeout", "send_timeout", "keep_alive"),
)

_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")
ADMIN_PATHS = frozenset({"workers", "metrics", "fleet", "scaling"})  # as they begin
READY_PATHS = frozenset({"/ready", "/health/readiness"})  # the second is LiteLLM's
OPEN_PATHS = READY_PATHS | {"/health", "/health/liveliness", "/health/liveness", "/v1/health", "/ping"}  # need no key


class Gateway:
    def __init__(self, config: GatewayConfig) -> None:
        self.loop = asyncio.get_running_loop()
        self.config, self.session_header = config, config.session_header.lower().encode()
        self.draining = False
        self.metrics = GatewayMetrics()
        self.audit = AuditLog(config.audit_log)
        self.tenants = Tenants(config.keys)
        self.kv_fleet = KVFleet(config.cache_aware.max_blocks)
        self.prompt_tokenizers = PromptTokenizers()
        self.prompt_tokenizers.configure(config)
        self.fleet = WorkerFleet(config.faults, self._workers_changed, self._worker_reset, self.kv_fleet)
        self.router = Router(config, self.fleet.workers, index=self.kv_fleet.index)
        self.queue = AdmissionQueue(config.queue, self.router, self.loop.time)
        self.stored_responses = StoredResponses(self.fleet.workers)
        self.hedge_credit = HedgeCredit()
        self.in_flight: set[Exchange] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.tracer = gateway_tracer(config.otlp_traces_endpoint)
        self.shared_limits = _shared_limits(config)
        self.charges = Charges(self, self.shared_limits)
        self._removals = self.fleet.configure(CONFIGURATION, config.workers, config.drain_timeout)
        self._discovery: WorkerDiscovery | None = None
        self._discover(GatewayConfig())

    def reconfigure(self, config: GatewayConfig) -> None:
        """Take over another configuration, all but START_ONLY. Raises before anything changes."""
        self.fleet.check(CONFIGURATION, config.workers)
        self.audit.reopen(config.audit_log)
        old, self.config, self.queue.settings = self.config, config, config.queue
        self.session_header = config.session_header.lower().encode()
        if late := [name for name in START_ONLY if getattr(old, name) != getattr(config, name)]:
            log.warning("changes of %s take effect at the next start", ", ".join(late))
        self.tenants.update(config.keys)
        self.router.reconfigure(config)
        self.prompt_tokenizers.configure(config)
        self.fleet.set_faults(config.faults)
        self._removals += self.fleet.configure(CONFIGURATION, config.workers, config.drain_timeout)
        self._discover(old)
        self.queue.pump()

    def reopen_audit(self) -> None:
        try:
            self.audit.reopen(self.config.audit_log)
        except QuireError as error:
            log.error("%s", error)

    def _discover(self, old: GatewayConfig) -> None:
        """Look for workers where the configuration says now."""
        settings = self.config.discovery
        if settings == old.discovery:
            return
        if self._discovery is not None:
            self._start(self._discovery.close())
        self._discovery = WorkerDiscovery(settings, self._found) if settings.is_given else None
        if self._discovery is None:
            self._found([])

    def _found(self, workers: list[WorkerEntry]) -> None:
        self._removals = [task for task in self._removals if not task.done()]
        self._removals += self.fleet.configure("discovery", workers, self.config.drain_timeout)

    def _workers_changed(self) -> None:
        self.queue.pump()

    def _worker_reset(self, worker: Worker) -> None:
        self.router.forget(worker)
        if not worker.healthy:
            for exchange in [each for each in self.in_flight if each.is_at(worker)]:
                exchange.worker_is_away(worker)

    # -- requests

    def handle(self, connection: ClientConnection, request: ClientRequest) -> Exchange | None:
        asked = request.header(b"x-request-id")
        request_id = asked if asked and _GOOD_ID.fullmatch(asked) else os.urandom(16).hex()
        try:
            return self._begin(connection, request, request_id)
        except QuireError as error:
            self.metrics.refused(error.code)
            self.audit.write("refused", request=request_id, path=request.path, code=error.code)
            extra = [(b"x-request-id", request_id.encode())]
            if (seconds := getattr(error, "retry_after", None)) is not None:
                extra.append((b"retry-after", str(seconds).encode()))
            self._reply(connection, request, error.status, error_body(request.path, error), extra)
            return None

    def _begin(self, connection: ClientConnection, request: ClientRequest, request_id: str) -> Exchange | None:
        check_loop(request)
        if request.path in OPEN_PATHS and request.method in ("GET", "HEAD"):
            self._probe(connection, request)
            return None
        preflight = request.method == "OPTIONS"  # a browser asks before it sends a key
        tenant = self.tenants.anonymous if preflight else self.tenants.find(request)
        if request.method in ("GET", "HEAD") and (body := self._own_answer(request.path, tenant)) is not None:
            self._reply(connection, request, 200, body)
            return None
        kind = route_kind(request.method, request.path)
        if kind is None:
            is_admins = request.path.split("/")[1] in ADMIN_PATHS
            hint = "the admin listener has it: --admin-port" if is_admins else "docs/gateway.md lists paths"
            raise UnknownPath(f"the gateway does not pass on {request.method} {request.path}", hint)
        facts = read_facts(request.path, request.body) if request.method == "POST" and request.body else RequestFacts()
        if not preflight:
            tenant.check_route(request.path)
            if kind not in NAMELESS:
                tenant.check_model(facts.model or self.config.default_model)
        exchange = Exchange(
            self, connection, request, request_id, tenant, kind, facts, self._targets(kind, facts, request)
        )
        exchange.max_wait = _timeout(request)
        self.stored_responses.pin(exchange)
        if self.tracer is not None:
            self.tracer.begin(exchange)
        if self.charges.is_asked_of_redis(exchange):
            self.in_flight.add(exchange)
            self._start(self._enter_shared(exchange))
            return exchange
        try:
            self.charges.enter(exchange)
        except QuireError as error:
            if self.tracer is not None:
                exchange.status, exchange.error = error.status, error.code
                self.tracer.end(exchange, "", TokenUsage(), self.loop.time())
            raise
        self.in_flight.add(exchange)
        self._submit(exchange)
        return exchange if exchange in self.in_flight else None

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _submit(self, exchange: Exchange) -> None:
        """Find out what the router may know of its prompt, and let it wait for a worker."""
        model, request = exchange.targets[0], exchange.request
        if exchange.kind is not RouteKind.GENERATE or not self._routes_by_tokens(model):
            self.queue.submit(exchange)
        elif len(request.body) <= LONG_BODY:
            self._submit_tokens(exchange, self.prompt_tokenizers.read(model, request.path, request.body))
        else:
            self._start(self._submit_off_loop(exchange))

    def _routes_by_tokens(self, model: str | None) -> bool:
        return self.prompt_tokenizers.has(model) and isinstance(self.router.policy(model), CacheAwarePolicy)

    async def _submit_off_loop(self, exchange: Exchange) -> None:
        """Tokenize a long prompt while other requests go on."""
        model, request = exchange.targets[0], exchange.request
        ids = await asyncio.to_thread(self.prompt_tokenizers.read, model, request.path, request.body)
        self._submit_tokens(exchange, ids)

    def _submit_tokens(self, exchange: Exchange, ids: list[int]) -> None:
        if exchange not in self.in_flight:
            return  # its client left meanwhile
        model = exchange.targets[0] or ""
        workers = self.router.serving(model)
        is_adapter = any(
            worker.cards[model].get("parent") for worker in workers
        )  # its blocks are apart from the model's
        if ids and workers and not is_adapter:
            salt = salt_at(workers[0], exchange.tenant, exchange.request, exchange.facts)
            exchange.context.blocks = self.kv_fleet.blocks(ids, workers, salt)
        self.queue.submit(exchange)

    def _targets(self, kind: RouteKind, facts: RequestFacts, request: ClientRequest) -> list[str | None]:
        return [None] if kind in NAMELESS else self.router.targets(facts, request)

    async def _enter_shared(self, exchange: Exchange) -> None:
        try:
            is_wanted = await self.charges.enter_shared(exchange)
        except QuireError as error:
            if exchange in self.in_flight:
                exchange.refuse(error)
            return
        if is_wanted:
            self._submit(exchange)

    def settle(self, exchange: Exchange, worker: Worker | None) -> None:
        """The exchange has ended: charge what it took."""
        self.in_flight.discard(exchange)
        tenant, usage = exchange.tenant, exchange.spent
        spent = self.charges.settle(exchange, usage)
        if exchange.num_attempts:
            difference = self.weighted(usage.prompt, usage.cached, usage.output) - exchange.expected_tokens
            self.queue.counters.correct(tenant.name, difference, tenant.weight)
        name, now = worker.name if worker else "", self.loop.time()
        self.metrics.ended(exchange, name, usage, spent, now)
        if exchange.span is not None and self.tracer is not None:
            self.tracer.end(exchange, name, usage, now)
        if self.audit.is_open:
            self._note(exchange, worker, usage, spent)
        if exchange.num_attempts:
            self.queue.ended()

    def _note(self, exchange: Exchange, worker: Worker | None, usage: TokenUsage, spent: int) -> None:
        self.audit.write(
            "served" if exchange.num_attempts else "refused",
            request=exchange.id,
            tenant=exchange.tenant.name or None,
            path=exchange.request.path,
            asked=exchange.facts.model,
            model=exchange.model,
            worker=worker.name if worker else None,
            status=exchange.status,
            code=exchange.error or None,
            attempts=exchange.num_attempts,
            prompt_tokens=usage.prompt,
            output_tokens=usage.output,
            cost=spent / 1e9 if spent else None,
            queue_seconds=round(exchange.queue_seconds, 6),
        )

    def weighted(self, prompt: int, cached: int, output: int) -> float:
        """Tokens as tenants' shares count them."""
        settings = self.config.queue
        return prompt - cached + settings.cached_weight * cached + settings.output_weight * output

    def response_headers(self, exchange: Exchange) -> Headers:
        shown = [(b"x-request-id", exchange.id.encode())]
        if exchange.num_counted and (quota := exchange.tenant.quota.headers()):
            shown += [(name.encode(), value.encode()) for name, value in quota.items()]
        return shown

    # -- what the gateway answers itself

    def _probe(self, connection: ClientConnection, request: ClientRequest) -> None:
        """/health: the gateway lives. /ready: some worker takes requests."""
        status, answer = 200, json_bytes({"status": "ok"})
        if request.path in READY_PATHS:
            ready = sum(worker.takes_requests for worker in self.fleet.workers)
            status = 200 if ready and not self.draining else 503
            answer = json_bytes({"ready_workers": ready})
        self._reply(connection, request, status, answer)

    def _own_answer(self, path: str, tenant: Tenant) -> bytes | None:
        if path == "/version":
            return json_bytes({"version": __version__})
        if path in ("/v1/models", "/models"):
            return json_bytes({"object": "list", "data": self._cards(tenant)})
        if path.startswith("/v1/models/"):
            name = unquote(path.removeprefix("/v1/models/"))
            if card := next((card for card in self._cards(tenant) if card["id"] == name), None):
                return json_bytes(card)
            raise UnknownPath(f"there is no model `{name}`")
        if path == "/api/tags":
            names = [str(card["id"]) for card in self._cards(tenant)]
            return json_bytes({"models": [{"name": name, "model": name} for name in names]})
        return None

    def _cards(self, tenant: Tenant) -> list[dict[str, Any]]:
        """Every name that the tenant may ask for, with what workers say of it."""
        cards: dict[str, dict[str, Any]] = {
            name: {"id": name, "object": "model", "owned_by": "quire-gateway"} for name in self.config.models
        }
        for worker in self.fleet.workers:
            for name, card in worker.cards.items():
                cards[name] = {"object": "model", **card}
        return [card for name, card in sorted(cards.items()) if tenant.allows(name)]

    def _reply(
        self,
        connection: ClientConnection,
        request: ClientRequest,
        status: int,
        body: bytes,
        extra: Headers | None = None,
    ) -> None:
        keep_alive = request.keep_alive and not self.draining
        response = whole_response(status, body, extra or [], keep_alive, JSON)
        connection.write(response[: -len(body)] if request.method == "HEAD" and body else response)
        connection.end(keep_alive)

    async def close(self) -> None:
        for task in (*self._removals, *self._tasks):
            task.cancel()
        if self._discovery is not None:
            await self._discovery.close()
        await self.fleet.close()
        self.prompt_tokenizers.close()
        await self.kv_fleet.close()
        if self.shared_limits is not None:
            await self.shared_limits.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
        self.audit.close()


def _shared_limits(config: GatewayConfig) -> "SharedLimits | None":
    if config.redis is None:
        return None
    from quire.gateway.shared_limits import SharedLimits

    return SharedLimits(config.redis)


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
