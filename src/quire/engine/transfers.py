"""KV transfers in the engine's loop: between two steps, news of other engines becomes work of the scheduler."""

import time
from typing import TYPE_CHECKING, cast

from quire.core.errors import QuireError
from quire.core.params import SamplingParams
from quire.core.request import Request, SequenceEvent
from quire.core.scheduler import Scheduler
from quire.executors.protocol import Executor

if TYPE_CHECKING:
    from quire.runtime.kv_transfer.consumer import KVConsumer
    from quire.runtime.kv_transfer.producer import KVProducer, PrefillAsked

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, seed=0)  # nothing is done with it


class PrefillsHere:
    """Prompts that this engine computes for others."""

    def __init__(self, scheduler: Scheduler, producer: "KVProducer", vocab_size: int) -> None:
        self._scheduler, self._producer, self._vocab_size = scheduler, producer, vocab_size
        self.adapters: dict[str, str] = {}  # LoRA adapter -> a digest of it
        self._requests: set[str] = set()  # prefills that the scheduler has

    @property
    def has_news(self) -> bool:
        assert self._scheduler.sends is not None
        return bool(self._producer.news) or self._scheduler.sends.has_failed

    def wait(self, seconds: float) -> None:
        """Until there is news, or `seconds` have passed."""
        self._producer.news.wait(seconds)

    @property
    def waits(self) -> bool:
        """Whether blocks wait until others have been sent."""
        assert self._scheduler.sends is not None
        return self._scheduler.sends.waits

    def update(self) -> None:
        from quire.runtime.kv_transfer.producer import (
            BlockSent,
            ConsumerLeft,
            PeerPinged,
            PrefillAsked,
            PrefillDropped,
            answer,
        )

        sends = self._scheduler.sends
        assert sends is not None
        for request_id in sends.take_failed():
            self._producer.end(request_id, "no state slot was free")
        for news in self._producer.news.take():
            match news:
                case BlockSent(host_block):
                    sends.sent(host_block)
                case PrefillAsked():
                    self._begin(news)
                case PrefillDropped(request_id):
                    if request_id in self._requests:
                        self._requests.remove(request_id)
                        self._scheduler.cancel(request_id)
                    sends.drop(request_id)
                    self._producer.end(request_id, "it was cancelled")
                case ConsumerLeft(consumer):
                    self._producer.close(consumer)
                case PeerPinged():
                    answer(news)

    def _begin(self, asked: "PrefillAsked") -> None:
        message, sends = asked.message, self._scheduler.sends
        assert sends is not None
        keys = {digest: key for key, digest in self.adapters.items()} | {"": ""}
        if message.adapter not in keys:
            self._producer.refuse(asked, "the prefill engine does not have this LoRA adapter")
            return
        if not all(0 <= token < self._vocab_size for token in message.tokens):
            self._producer.refuse(asked, f"a token is not one of {self._vocab_size}")
            return
        request = Request(
            id=asked.request_id,
            prompt_ids=message.tokens,
            params=ONE_TOKEN,
            tenant=message.tenant,
            salt=message.salt,
            adapter=keys[message.adapter],
        )
        try:
            self._scheduler.add(request, time.monotonic())
        except QuireError as error:
            self._producer.refuse(asked, error.message)
            return
        self._requests.add(request.id)
        self._producer.add(asked)
        sends.add(request.id, message.first)

    def without_own(self, events: list[SequenceEvent]) -> list[SequenceEvent]:
        """The events of requests that are not prefills for others. A prefill that failed is reported there."""
        others = []
        for event in events:
            if event.request_id not in self._requests:
                others.append(event)
            elif event.final:
                self._requests.remove(event.request_id)
                if event.finish_reason == "error":
                    assert self._scheduler.sends is not None
                    self._scheduler.sends.drop(event.request_id)
                    self._producer.end(event.request_id, event.reason)
        return others


class PrefillsElsewhere:
    """Prompts that other engines compute for this one."""

    def __init__(self, scheduler: Scheduler, consumer: "KVConsumer") -> None:
        self._scheduler, self._consumer = scheduler, consumer
        self.adapters = consumer.adapters

    @property
    def has_news(self) -> bool:
        return bool(self._consumer.news)

    def wait(self, seconds: float) -> None:
        """Until there is news, or `seconds` have passed."""
        self._consumer.news.wait(seconds)

    @property
    def waits(self) -> bool:
        """Whether sequences wait for other engines."""
        assert self._scheduler.remote is not None
        return self._scheduler.remote.has_waiting

    def update(self) -> None:
        from quire.runtime.kv_transfer.consumer import BlocksArrived, PrefillDone, PrefillGivenUp

        remote = self._scheduler.remote
        assert remote is not None
        for news in self._consumer.take():
            match news:
                case BlocksArrived(prefill_id, num_blocks):
                    remote.arrived(prefill_id, num_blocks)
                case PrefillDone(prefill_id):
                    remote.ended(prefill_id)
                case PrefillGivenUp(prefill_id):
                    remote.given_up(prefill_id)

    def without_own(self, events: list[SequenceEvent]) -> list[SequenceEvent]:
        return events


def transfers_of(scheduler: Scheduler, executor: Executor, vocab_size: int) -> PrefillsHere | PrefillsElsewhere | None:
    """The transfers of an engine that is a producer or a consumer; None: it is neither."""
    if scheduler.sends is not None:
        return PrefillsHere(scheduler, cast("KVProducer", executor.transfer), vocab_size)
    if scheduler.remote is not None:
        return PrefillsElsewhere(scheduler, cast("KVConsumer", executor.transfer))
    return None
