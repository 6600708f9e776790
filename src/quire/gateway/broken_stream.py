"""A stream that its worker broke off: when, where and how often another worker is asked to go on with it."""

import asyncio
from typing import TYPE_CHECKING

from quire.core.errors import QuireError
from quire.gateway.worker import Worker

if TYPE_CHECKING:
    from quire.gateway.exchange import Exchange
    from quire.gateway.gateway import Gateway

SECONDS_APART = 0.5  # that a worker which broke a stream off is not asked to go on with it
SECONDS_BETWEEN_TRIES = 0.05
MAX_FRUITLESS = 4  # workers, one after the other: the stream itself may be what ends them


class BrokenStream:
    def __init__(self, exchange: "Exchange", gateway: "Gateway") -> None:
        self._exchange, self._gateway = exchange, gateway
        self._broken_at: float | None = None  # since then the stream has gained nothing
        self._num_fruitless = 0  # workers that were to go on with it and have added nothing
        self._timer: asyncio.TimerHandle | None = None

    def gained(self) -> None:
        """More of the stream is with the client."""
        self._broken_at, self._num_fruitless = None, 0

    def go_on(self, lost: Worker, error: QuireError) -> None:
        """Give the stream to another worker, as soon as there is one; end it with the error where there is none."""
        exchange, gateway, now = self._exchange, self._gateway, self._exchange.loop.time()
        if exchange.has_ended:
            return
        if self._broken_at is None:
            self._broken_at = now
        exchange.last_heard = self._broken_at
        tried = {lost} if now < self._broken_at + SECONDS_APART else set()
        worker = gateway.router.pick(exchange.model, exchange.context, tried)
        if self._num_fruitless >= MAX_FRUITLESS:
            exchange.break_off(error)
        elif worker is not None and worker.resumes:
            self._num_fruitless += 1
            gateway.metrics.resumed(exchange)
            gateway.audit.write("resumed", request=exchange.id, worker=worker.name, lost=lost.name)
            exchange.start(exchange.model, worker)
        elif now < self._broken_at + gateway.config.faults.resume_seconds:
            self._timer = exchange.loop.call_later(SECONDS_BETWEEN_TRIES, self.go_on, lost, error)
        else:
            exchange.break_off(error)

    def end(self) -> None:
        """The exchange has ended."""
        if self._timer is not None:
            self._timer.cancel()
