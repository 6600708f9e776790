"""What all requests share: the configuration, workers, keys, the queue and counters; and what a request leaves behind
when it has ended."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Protocol

from quire.core.errors import BadRequest, QuireError
from quire.gateway.admission import AdmissionQueue
from quire.gateway.audit import AuditLog
from quire.gateway.charges import Charges
from quire.gateway.config import GatewayConfig, GatewayKey, WorkerEntry, gateway_key_problems
from quire.gateway.discovery import WorkerDiscovery
from quire.gateway.exchange_record import ExchangeRecord
from quire.gateway.fleet import CONFIGURATION, WorkerFleet
from quire.gateway.hedge_credit import HedgeCredit
from quire.gateway.kv_fleet import KVFleet
from quire.gateway.metrics import GatewayMetrics
from quire.gateway.prompt_tokenizers import PromptTokenizers
from quire.gateway.router import Router
from quire.gateway.state_folder import StateFolder
from quire.gateway.stored_responses import StoredResponses
from quire.gateway.tenants import Tenants
from quire.gateway.tracing import gateway_tracer
from quire.gateway.usage import TokenUsage
from quire.gateway.wire import Headers
from quire.gateway.worker import Worker

if TYPE_CHECKING:
    from quire.gateway.shared_limits import SharedLimits

log = logging.getLogger("quire.gateway")

# Fields of the configuration that are read at the start only.
START_ONLY = (
    *("host", "port", "ssl_certfile", "ssl_keyfile", "admin_host", "admin_port", "redis", "otlp_traces_endpoint"),
    *("state_dir", "max_body_bytes", "max_connections", "receive_timeout", "send_timeout", "keep_alive"),
)

STATE_SECONDS = 1.0  # between two looks at what has to be kept for the next start


class LiveExchange(Protocol):
    """A request that has not ended."""

    def worker_is_away(self, worker: Worker) -> None:
        """Health checks of the worker fail."""


class Gateway:
    def __init__(self, config: GatewayConfig) -> None:
        self.loop = asyncio.get_running_loop()
        self.config, self.session_header = config, config.session_header.lower().encode()
        self.draining = False
        self.metrics = GatewayMetrics()
        self.audit = AuditLog(config.audit_log)
        self.state = _state(config)
        self.tenants = Tenants(self._keys(config), needs_keys=self.state is not None, groups=config.groups)
        self.kv_fleet = KVFleet(config.cache_aware.max_blocks)
        self.prompt_tokenizers = PromptTokenizers()
        self.prompt_tokenizers.configure(config)
        self.fleet = WorkerFleet(config.faults, self._workers_changed, self._worker_reset, self.kv_fleet)
        self.router = Router(config, self.fleet.workers, index=self.kv_fleet.index)
        self.queue = AdmissionQueue(config.queue, self.router, self.loop.time)
        self.stored_responses = StoredResponses(self.fleet.workers)
        self.hedge_credit = HedgeCredit()
        self.in_flight: set[LiveExchange] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.tracer = gateway_tracer(config.otlp_traces_endpoint)
        self.shared_limits = _shared_limits(config)
        self.charges = Charges(self.router, self.shared_limits)
        self._removals = self.fleet.configure(CONFIGURATION, config.workers, config.drain_timeout)
        self._discovery: WorkerDiscovery | None = None
        self._discover(GatewayConfig())
        if self.state is not None:
            self.tenants.restore(self.state.read_spent())
            self.start(self._keep_state(self.state))

    def reconfigure(self, config: GatewayConfig) -> None:
        """Take over another configuration, all but START_ONLY. Raises before anything changes."""
        keys = self._keys(config)
        self.fleet.check(CONFIGURATION, config.workers)
        self.audit.reopen(config.audit_log)
        old, self.config, self.queue.settings = self.config, config, config.queue
        self.session_header = config.session_header.lower().encode()
        if late := [name for name in START_ONLY if getattr(old, name) != getattr(config, name)]:
            log.warning("changes of %s take effect at the next start", ", ".join(late))
        self.tenants.update(keys, config.groups)
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

    # -- keys that are made while it runs

    def change_keys(self, edit: Callable[[list[GatewayKey]], list[GatewayKey]]) -> None:
        """`edit`: gets those that were made, and returns them as they shall be."""
        if self.state is None:
            raise BadRequest(
                "keys that are made while the gateway runs need a folder that they are kept in",
                'write `state_dir = "DIRECTORY"` into the configuration and start the gateway again',
            )
        self.state.change(edit)
        self.tenants.update(self._keys(self.config), self.config.groups)

    def _keys(self, config: GatewayConfig) -> list[GatewayKey]:
        """The API keys of the configuration, and those that were made at run time."""
        keys = [*config.keys, *(self.state.keys if self.state is not None else ())]
        for problem in gateway_key_problems(keys, config.groups):
            raise BadRequest(f"keys of the configuration and of state_dir: {problem}", "delete or rename one of them")
        return keys

    async def _keep_state(self, state: StateFolder) -> None:
        """Write down what is spent, and take over what other gateways have changed."""
        while True:
            await asyncio.sleep(STATE_SECONDS)
            try:
                if state.read_changed():
                    self.tenants.update(self._keys(self.config), self.config.groups)
                await asyncio.to_thread(state.write_spent, self.tenants.spent())
            except QuireError as error:
                log.error("%s", error)

    def _discover(self, old: GatewayConfig) -> None:
        """Look for workers where the configuration says now."""
        settings = self.config.discovery
        if settings == old.discovery:
            return
        if self._discovery is not None:
            self.start(self._discovery.close())
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
            for exchange in list(self.in_flight):
                exchange.worker_is_away(worker)

    # -- requests

    def start(self, work: Coroutine[None, None, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def settle(self, record: ExchangeRecord, worker: Worker | None, usage: TokenUsage) -> None:
        """The request has ended: charge what it took."""
        tenant = record.tenant
        spent = self.charges.settle(record, usage)
        if record.num_attempts:
            difference = self.weighted(usage.prompt, usage.cached, usage.output) - record.expected_tokens
            self.queue.counters.correct(tenant.name, difference, tenant.weight)
        name, now = worker.name if worker else "", self.loop.time()
        self.metrics.ended(record, name, usage, spent, now)
        if record.span is not None and self.tracer is not None:
            self.tracer.end(record, name, usage, now)
        if self.audit.is_open:
            self._note(record, worker, usage, spent)
        if record.num_attempts:
            self.queue.ended()

    def _note(self, record: ExchangeRecord, worker: Worker | None, usage: TokenUsage, spent: int) -> None:
        self.audit.write(
            "served" if record.num_attempts else "refused",
            request=record.id,
            tenant=record.tenant.name or None,
            path=record.request.path,
            asked=record.facts.model,
            model=record.model,
            worker=worker.name if worker else None,
            status=record.status,
            code=record.error or None,
            attempts=record.num_attempts,
            prompt_tokens=usage.prompt,
            output_tokens=usage.output,
            cost=spent / 1e9 if spent else None,
            queue_seconds=round(record.queue_seconds, 6),
        )

    def weighted(self, prompt: int, cached: int, output: int) -> float:
        """Tokens as tenants' shares count them."""
        settings = self.config.queue
        return prompt - cached + settings.cached_weight * cached + settings.output_weight * output

    def response_headers(self, record: ExchangeRecord) -> Headers:
        shown = [(b"x-request-id", record.id.encode())]
        if record.num_counted and (quota := record.tenant.quota.headers()):
            shown += [(name.encode(), value.encode()) for name, value in quota.items()]
        return shown

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
        if self.state is not None:
            self.state.write_spent(self.tenants.spent())
            self.state.close()


def _state(config: GatewayConfig) -> StateFolder | None:
    return None if config.state_dir is None else StateFolder(config.state_dir, is_shared=config.redis is not None)


def _shared_limits(config: GatewayConfig) -> "SharedLimits | None":
    if config.redis is None:
        return None
    from quire.gateway.shared_limits import SharedLimits

    return SharedLimits(config.redis)
