"""A stream that its worker broke off: when, where and how often another worker is asked to go on with it."""

import asyncio
from collections.abc import Callable

from quire.core.errors import QuireError
from quire.gateway.exchange_record import ExchangeRecord
from quire.gateway.gateway import Gateway
from quire.gateway.worker import Worker

SECONDS_APART = 0.5  # until a worker that broke a stream off may be asked to go on with it
SECONDS_BETWEEN_TRIES = 0.05
MAX_FRUITLESS = 4  # workers, one after the other: the stream itself may be what ends them


class BrokenStream:
    """`start` gives the stream to a worker, `break_off` ends it with an error."""

    def __init__(
        self,
        record: ExchangeRecord,
        gateway: Gateway,
        start: Callable[[str | None, Worker], None],
        break_off: Callable[[QuireError], None],
    ) -> None:
        self._record, self._gateway, self._start, self._break_off = record, gateway, start, break_off
        self._broken_at: float | None = None  # since then the stream has gained nothing
        self._num_fruitless = 0  # workers that were to go on with it and have added nothing
        self._worker: Worker | None = None  # the worker that is to go on with the stream, until it has added something
        self._timer: asyncio.TimerHandle | None = None

    def gained(self) -> None:
        """More of the stream is with the client."""
        self._broken_at, self._num_fruitless = None, 0
        self._has_caught_up()

    def go_on(self, lost: Worker, error: QuireError) -> None:
        """Give the stream to another worker, as soon as there is one; end it with the error where there is none."""
        record, gateway, now = self._record, self._gateway, self._gateway.loop.time()
        if record.has_ended:
            return
        self._has_caught_up()
        if self._broken_at is None:
            self._broken_at = now
        record.last_heard = self._broken_at
        tried = {lost} if now < self._broken_at + SECONDS_APART else set()
        worker = gateway.router.pick_to_go_on(record.model, tried)
        if self._num_fruitless >= MAX_FRUITLESS:
            self._break_off(error)
        elif worker is not None:
            self._num_fruitless += 1
            self._worker = worker
            worker.num_catching_up += 1
            gateway.metrics.resumed(record)
            gateway.audit.write("resumed", request=record.id, worker=worker.name, lost=lost.name)
            self._start(record.model, worker)
        elif now < self._broken_at + gateway.config.faults.resume_seconds:
            self._timer = gateway.loop.call_later(SECONDS_BETWEEN_TRIES, self.go_on, lost, error)
        else:
            self._break_off(error)

    def end(self) -> None:
        """The request has ended."""
        self._has_caught_up()
        if self._timer is not None:
            self._timer.cancel()

    def _has_caught_up(self) -> None:
        """Or will not, at that worker."""
        if self._worker is not None:
            self._worker.num_catching_up -= 1
            self._worker = None
