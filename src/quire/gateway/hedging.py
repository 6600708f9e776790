"""Hedging: a request that its worker has not begun to answer after a while is sent to a second worker, too; the first
answer wins."""

import asyncio
from collections.abc import Callable

import msgspec

from quire.gateway.attempt import Attempt
from quire.gateway.exchange_record import ExchangeRecord
from quire.gateway.gateway import Gateway
from quire.gateway.policies import PickContext
from quire.gateway.routes import RouteKind
from quire.gateway.worker import Worker

HEDGED = (RouteKind.GENERATE, RouteKind.ENCODE)
STORING_PATH = "/v1/responses"

Ask = Callable[[str | None, Worker], Attempt]  # makes one more attempt, which has to be connected


class Hedge:
    """The second attempt at one request, of which there is one at most. `attempt` is None until its time has come."""

    def __init__(self, record: ExchangeRecord, gateway: Gateway, seconds: float, ask: Ask) -> None:
        self._record, self._gateway, self._ask = record, gateway, ask
        self.attempt: Attempt | None = None
        self.context: PickContext = record.context
        gateway.hedge_credit.earn(gateway.config.faults.hedge_ratio)
        self._timer: asyncio.TimerHandle | None = gateway.loop.call_later(seconds, self._begin)

    @property
    def is_open(self) -> bool:
        """Whether the second request may still be sent, or was."""
        return self._timer is not None or self.attempt is not None

    def _begin(self) -> None:
        self._timer = None
        record, gateway = self._record, self._gateway
        first = record.worker
        if first is None or record.num_attempts >= gateway.config.faults.max_attempts or len(gateway.queue):
            return  # requests that wait for a worker come first
        self.context = msgspec.structs.replace(record.context)
        worker = gateway.router.pick(record.model, self.context, record.tried)
        if worker is None or not gateway.hedge_credit.spend():
            return
        gateway.audit.write("hedged", request=record.id, worker=worker.name, slow=first.name)
        self.attempt = self._ask(record.model, worker)
        self.attempt.holds_head = True
        self.attempt.connect()

    def cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def give_up(self) -> None:
        """The request has ended."""
        self.cancel_timer()
        if self.attempt is not None:
            self.attempt.give_up()
            self.end(won=False)

    def end(self, won: bool) -> None:
        """One of the two attempts is left."""
        self.attempt = None
        self._gateway.metrics.hedged(self._record, won)


def hedge_for(record: ExchangeRecord, gateway: Gateway, ask: Ask) -> Hedge | None:
    """None unless the configuration asks for it, the request may go to any worker, and leaves nothing behind there."""
    seconds = gateway.config.faults.hedge_seconds
    if seconds is None or record.pinned is not None or record.request.path == STORING_PATH:
        return None
    return Hedge(record, gateway, seconds, ask) if record.kind in HEDGED else None
