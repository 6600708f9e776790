"""One request on its way through the gateway: admitted, sent to a worker, its response passed on to the client."""

import asyncio

from quire.core.errors import DeadlinePassed, QuireError
from quire.gateway.attempt import Attempt
from quire.gateway.broken_stream import BrokenStream
from quire.gateway.client_connection import ClientConnection
from quire.gateway.errors import BadUpstream, LostPlace, UpstreamTimeout
from quire.gateway.exchange_record import ExchangeRecord
from quire.gateway.gateway import Gateway
from quire.gateway.hedging import STORING_PATH, Hedge, hedge_for
from quire.gateway.loops import LoopDetected
from quire.gateway.outgoing import outgoing_body
from quire.gateway.policies import PickContext
from quire.gateway.relay import ResponseRelay, scanner_for
from quire.gateway.request_facts import RequestFacts
from quire.gateway.resuming import RESUME_HEADER, DeliveredStream, ResumableScanner, delivered_stream
from quire.gateway.routes import OPENAI_STREAMS, RouteKind
from quire.gateway.tenants import Tenant, Tenants
from quire.gateway.usage import TokenUsage
from quire.gateway.wire import ClientRequest, Headers
from quire.gateway.worker import Worker

BUSY = 429  # a worker that is full is not broken
LOOP = LoopDetected.status  # a worker that is a gateway, and leads this request back
RETRIED_STATUSES = frozenset({BUSY, 502, 503, LOOP})  # another worker may do better; 500 may be the request's own fault
FAILED_STATUSES = frozenset({500, 502, 503, 504})  # count against the worker
SECONDS_PAST_DEADLINE = 0.25  # a worker that knows deadlines says it itself
MAX_DEATHS = 2  # of workers that had the request: a third does not get it
CLIENT_CLOSED = 499  # never sent: the status of a request whose client left


class Exchange(ExchangeRecord):
    """Implements `Answering` for the client and `Admissible` for the queue; attempts tell it what workers answer."""

    _num_deaths = 0
    _delivered: DeliveredStream | None = None
    _broken: BrokenStream | None = None
    _is_paused = False
    _attempt: Attempt | None = None
    _hedge: Hedge | None = None
    _timer: asyncio.TimerHandle | None = None
    _last_token = 0.0

    def __init__(
        self,
        gateway: Gateway,
        connection: ClientConnection,
        request: ClientRequest,
        request_id: str,
        tenant: Tenant,
        kind: RouteKind,
        facts: RequestFacts,
        targets: list[str | None],
    ) -> None:
        self._gateway, self._connection, self.request = gateway, connection, request
        self.id, self.tenant, self.kind, self.facts, self.targets = request_id, tenant, kind, facts, targets
        self.expected_output = facts.output_tokens if kind is RouteKind.GENERATE else 0
        self.prompt_tokens = facts.prompt_tokens
        self.expected_tokens = gateway.weighted(self.prompt_tokens, 0, self.expected_output)
        self.priority = tenant.priority + facts.priority  # a client may only lower that of its key
        self.loop = gateway.loop
        self.began = self.last_heard = self.loop.time()
        self.tried: set[Worker] = set()
        self.trace_headers: Headers = []
        self._tells_id = request.path == STORING_PATH
        session = request.header(gateway.session_header) or facts.user
        self.context = PickContext(f"{tenant.name}/{targets[0]}", facts.prompt, session)
        if facts.stream or b"last-event-id" in request.named:
            can_resume = facts.stream and facts.n == 1 and request.path in OPENAI_STREAMS
            self._delivered = delivered_stream(request, request_id, tenant.name, can_resume)
        self._relay = ResponseRelay(connection, request, self)

    # -- admission

    def choose(self) -> tuple[str | None, Worker | None] | None:
        router = self._gateway.router
        if self.pinned is not None:
            served = [model for model in self.targets if model in self.pinned.cards]
            return (served[0] if served else None, self.pinned) if self.pinned not in self.tried else None
        for model in self.targets:
            worker = router.pick(model, self.context, self.tried)
            if worker is not None or router.can_take(model, self.tried):
                return model, worker
        return None

    def start(self, model: str | None, worker: Worker) -> None:
        self.last_heard = self.loop.time()
        if not self.num_attempts:
            self.queue_seconds = self.last_heard - self.began
        self.model, self.worker = model, worker
        if not self._relay.is_passing and self.num_attempts:
            self._relay.clear()
        self._attempt = self.ask(model, worker)
        if self._hedge is None and not self._relay.is_passing:
            self._hedge = hedge_for(self, self._gateway, self.ask)
        if self._hedge is not None:
            self._attempt.holds_head = self._hedge.is_open
        self._attempt.connect()
        if self._timer is None and not self.has_ended:  # behind what the worker waits for
            self._watch()

    def ask(self, model: str | None, worker: Worker) -> Attempt:
        """One more attempt, which has to be connected."""
        self.num_attempts += 1
        self.tried.add(worker)
        outgoing = outgoing_body(self.request, self.facts, model, worker, self.tenant, self._delivered)
        attempt = Attempt(self, model, worker, outgoing)
        if self._is_paused:
            attempt.pause()
        return attempt

    def told_to_workers(self) -> tuple[str, bytes, float, Tenants, Headers]:
        """What the gateway adds to the heads of requests: id, client, time left, tenants, trace headers."""
        left = self.max_wait - (self.loop.time() - self.began)
        return self.id, self._connection.peer, left, self._gateway.tenants, self.trace_headers

    # -- the response

    def is_retried(self, status: int) -> bool:
        """Whether another worker is asked, or is being asked, after this status."""
        if status == 200:
            return False
        is_elsewhere = status == 404 and bool(self.stored)
        return (status in RETRIED_STATUSES or is_elsewhere) and (self._is_racing or self._may_ask_another())

    def response_began(self, attempt: Attempt, status: int, headers: Headers) -> None:
        self.last_heard = self.loop.time()
        named = dict(reversed(headers))
        resumes = RESUME_HEADER in named
        if self._relay.is_passing:  # a stream goes on
            if status != 200 or not resumes:
                attempt.cancel()
                self.attempt_failed(attempt, f"answered {status} to a stream that was to go on", died=True)
            return
        if self.is_retried(status):
            attempt.cancel()
            self.attempt_failed(attempt, f"answered {status}", died=False, is_failure=status in FAILED_STATUSES)
            return
        if (
            status == 200
            and self._delivered is not None
            and self._delivered.num_skipped
            and not (resumes and attempt.outgoing.is_wrapped)
        ):
            attempt.cancel()
            self.attempt_failed(attempt, "cannot go on with a stream", died=False, is_failure=False)
            return
        goes_on = self._delivered if resumes and attempt.outgoing.is_wrapped else None
        media_type = named.get(b"content-type", b"")
        self._relay.begin(status, headers, scanner_for(media_type, goes_on, attempt.outgoing.drop_usage))

    def response_data(self, attempt: Attempt, data: bytes) -> None:
        self.last_heard = self.loop.time()
        if self._tells_id:
            self._tells_id = not self._gateway.stored_responses.remember(self, data)
        if num_tokens := self._relay.push(data):
            if self._broken is not None:
                self._broken.gained()
            self._count_tokens(num_tokens)
        scanner = self._relay.scanner
        if isinstance(scanner, ResumableScanner) and scanner.has_lost_place:
            attempt.cancel()
            self.break_off(LostPlace("the answer comes in other pieces than before", "ask from the beginning"))

    def response_ended(self, attempt: Attempt) -> None:
        scanner = self._relay.scanner
        if isinstance(scanner, ResumableScanner) and scanner.was_sent_away:
            self.attempt_failed(attempt, "shuts down", died=True)
            return
        if isinstance(scanner, ResumableScanner) and scanner.is_short:
            self.break_off(LostPlace("the answer is shorter than what Last-Event-ID says", "ask from the beginning"))
            return
        attempt.worker.ended(self._relay.status in FAILED_STATUSES)
        body = self._relay.finish()
        if scanner is None:
            self._count_tokens(1)
        self.usage = self._relay.usage(body)
        self._end(self._relay.status)

    def worker_is_away(self, worker: Worker) -> None:
        """Health checks fail: behind a partition nothing says that the connection is dead. Go on elsewhere where that
        is possible and the worker is silent, too; a stream that cannot go on waits for it."""
        silent = self.loop.time() - self.last_heard > self._gateway.config.faults.connect_timeout / 2
        if silent and (isinstance(self._relay.scanner, ResumableScanner) or not self._relay.is_passing):
            for attempt in [attempt for attempt in self._attempts if attempt.worker is worker]:
                attempt.cancel()
                self.attempt_failed(attempt, "does not answer", died=True)

    def _count_tokens(self, count: int) -> None:
        now = self.last_heard
        if self.first_token is None:
            self.first_token = now
        else:
            self._gateway.metrics.token(self, now - self._last_token, count)
        self._last_token = now

    # -- told to the relay

    @property
    def keeps_alive(self) -> bool:
        return self.request.keep_alive and not self._gateway.draining

    @property
    def own_headers(self) -> Headers:
        return self._gateway.response_headers(self)

    # -- two attempts

    @property
    def _attempts(self) -> list[Attempt]:
        second = self._hedge.attempt if self._hedge is not None else None
        return [attempt for attempt in (self._attempt, second) if attempt is not None]

    @property
    def _is_racing(self) -> bool:
        return self._hedge is not None and self._hedge.attempt is not None

    def answered_first(self, attempt: Attempt) -> None:
        """The other attempt, if there is one, is cancelled at once."""
        if self._hedge is None:
            return
        self._hedge.cancel_timer()
        for other in self._attempts:
            if other is not attempt:
                other.was_slower()
                self._go_on_with(attempt)

    def _go_on_with(self, attempt: Attempt) -> None:
        """Of two attempts, go on with the one that answered first."""
        assert self._hedge is not None
        won = attempt is self._hedge.attempt
        if won:
            self._attempt, self.worker, self.context = attempt, attempt.worker, self._hedge.context
        self._hedge.end(won)
        self._gateway.queue.pump()  # the other worker has room again

    # -- failures

    def _may_ask_another(self) -> bool:
        is_last = self.num_attempts >= self._gateway.config.faults.max_attempts and not self.stored
        if is_last or self.pinned is not None:
            return False
        return any(self._gateway.router.can_take(model, self.tried) for model in self.targets)

    def attempt_failed(self, attempt: Attempt, reason: str, died: bool, is_failure: bool = True) -> None:
        """Ask another worker if nothing was sent to the client; else tell the client in its stream.

        `is_failure`: it counts against the worker."""
        worker = attempt.worker
        worker.ended(is_failure)
        self._num_deaths += died
        self._gateway.audit.write("attempt_failed", request=self.id, worker=worker.name, reason=reason)
        error = BadUpstream(f"worker {worker.name} {reason}", "try again")
        if self._is_racing:
            attempt.leave()
            self._go_on_with(next(other for other in self._attempts if other is not attempt))
            return
        if self._hedge is not None:
            self._hedge.cancel_timer()
        if isinstance(self._relay.scanner, ResumableScanner):
            self._leave_worker()
            self._relay.scanner.break_off()
            self._broken = self._broken or BrokenStream(self, self._gateway, self.start, self.break_off)
            self._broken.go_on(worker, error)
            return
        if self._relay.is_passing:
            self.break_off(error)
            return
        self._leave_worker()
        if self._num_deaths < MAX_DEATHS and self._may_ask_another():
            self._gateway.metrics.retried(self)
            self._gateway.queue.submit(self)
        else:
            self.refuse(error)

    def break_off(self, error: QuireError) -> None:
        """Some of the response is with the client: a stream of events ends with an error, all else is cut off."""
        self.error = error.code
        self.usage = self._relay.usage(b"")
        if self._relay.break_off(error):
            self._end(self._relay.status)
        else:
            self._finish(self._relay.status)
            self._connection.abort()

    def refuse(self, error: QuireError) -> None:
        """Answer with an error. Nothing was sent before."""
        if not self.has_ended:
            self.error = error.code
            self._relay.refuse(error)
            self._end(error.status)

    def _watch(self) -> None:
        """Give up a worker that is silent for too long, and a request whose deadline is over."""
        limit, now = self._gateway.config.faults.response_timeout, self.loop.time()
        deadline = self.began + self.max_wait + SECONDS_PAST_DEADLINE
        if now >= deadline:
            self._cancel()
            self._give_up(DeadlinePassed(f"the answer was not whole within {self.max_wait:g} s", "allow more time"))
            return
        left = min(self.last_heard + limit, deadline) - now
        if left > 0:
            self._timer = self.loop.call_later(left, self._watch)
            return
        if self.worker is None:  # the stream waits for one
            self._timer = self.loop.call_later(min(limit, deadline - now), self._watch)
            return
        self._cancel()
        self.worker.failed()
        error = UpstreamTimeout(f"worker {self.worker.name} was silent for {limit:g} s", "try again later")
        self._give_up(error)

    def _give_up(self, error: QuireError) -> None:
        if self._relay.is_passing:
            self.break_off(error)
        else:
            self.refuse(error)

    # -- the client

    def client_gone(self) -> None:
        self._gateway.queue.remove(self)
        self._cancel()
        if self.worker is not None:
            self.worker.breaker.gave_up()
        self.usage = self._relay.usage(b"")
        self._finish(CLIENT_CLOSED)

    def client_paused(self) -> None:
        self._is_paused = True
        for attempt in self._attempts:
            attempt.pause()

    def client_resumed(self) -> None:
        self._is_paused = False
        for attempt in self._attempts:
            attempt.resume()

    # -- the end

    def _cancel(self) -> None:
        for attempt in self._attempts:
            attempt.cancel()

    def _leave_worker(self) -> None:
        if self._attempt is not None:
            self._attempt.leave()
        self._attempt = self.worker = None

    def _end(self, status: int) -> None:
        connection = self._connection
        if self._finish(status):
            connection.end(self.keeps_alive)

    def _finish(self, status: int) -> bool:
        """Settle everything, once."""
        if self.has_ended:
            return False
        self.has_ended = True
        self.status = status
        if self._broken is not None:
            self._broken.end()
        if self._timer is not None:
            self._timer.cancel()
        worker = self.worker
        if self._hedge is not None:
            self._hedge.give_up()
        self._leave_worker()
        self._gateway.in_flight.discard(self)
        self._gateway.settle(self, worker, self._spent)
        self._relay.close()
        self._broken = self._hedge = None  # no cycle is left, so that it is freed without the garbage collector
        return True

    @property
    def _spent(self) -> TokenUsage:
        """The tokens of the exchange: as the worker says, else estimated from what came back."""
        if self.usage is not None:
            return self.usage
        if self.first_token is None or self.status not in (200, CLIENT_CLOSED):
            return TokenUsage()
        output = self._relay.scanner.num_events if self._relay.scanner is not None else 0
        return TokenUsage(self.prompt_tokens, 0, output if self.kind is RouteKind.GENERATE else 0)
