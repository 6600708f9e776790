"""Hedging: a request that its worker has not begun to answer after a while is sent to a second worker, too; the first
answer wins."""

import asyncio
from typing import TYPE_CHECKING

import msgspec

from quire.gateway.attempt import Attempt
from quire.gateway.policies import PickContext
from quire.gateway.routes import RouteKind

if TYPE_CHECKING:
    from quire.gateway.exchange import Exchange
    from quire.gateway.gateway import Gateway

MAX_CREDIT = 10.0  # hedges that may follow each other at once
HEDGED = (RouteKind.GENERATE, RouteKind.ENCODE)
STORING_PATH = "/v1/responses"


class HedgeCredit:
    """Of all requests at most a share is hedged: where everything is slow, second attempts make it slower."""

    def __init__(self) -> None:
        self._credit = 1.0

    def earn(self, ratio: float) -> None:
        """A request was sent."""
        self._credit = min(self._credit + ratio, MAX_CREDIT)

    def spend(self) -> bool:
        """-> whether one more may be hedged"""
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True


class Hedge:
    """The second attempt at one request, of which there is one at most. `attempt` is None until its time has come."""

    def __init__(self, exchange: "Exchange", gateway: "Gateway", seconds: float) -> None:
        self._exchange, self._gateway = exchange, gateway
        self.attempt: Attempt | None = None
        self.context: PickContext = exchange.context
        gateway.hedge_credit.earn(gateway.config.faults.hedge_ratio)
        self._timer: asyncio.TimerHandle | None = gateway.loop.call_later(seconds, self._begin)

    @property
    def is_open(self) -> bool:
        """It may still be sent, or was."""
        return self._timer is not None or self.attempt is not None

    def _begin(self) -> None:
        self._timer = None
        exchange, gateway = self._exchange, self._gateway
        first = exchange.worker
        if first is None or exchange.num_attempts >= gateway.config.faults.max_attempts or len(gateway.queue):
            return  # requests that wait for a worker come first
        self.context = msgspec.structs.replace(exchange.context)
        worker = gateway.router.pick(exchange.model, self.context, exchange.tried)
        if worker is None or not gateway.hedge_credit.spend():
            return
        gateway.audit.write("hedged", request=exchange.id, worker=worker.name, slow=first.name)
        self.attempt = exchange.ask(exchange.model, worker)
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
        self._gateway.metrics.hedged(self._exchange, won)


def hedge_for(exchange: "Exchange", gateway: "Gateway") -> Hedge | None:
    """None unless the configuration asks for it, the request may go to any worker, and leaves nothing behind there."""
    seconds = gateway.config.faults.hedge_seconds
    if seconds is None or exchange.pinned is not None or exchange.request.path == STORING_PATH:
        return None
    return Hedge(exchange, gateway, seconds) if exchange.kind in HEDGED else None
