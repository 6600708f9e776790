"""What a step tells the server process, in few bytes: nearly every event is some tokens of a request, and no more."""

from quire.core.records import StepRecord
from quire.core.request import SequenceEvent
from quire.engine.messages import StepDone


class StepReport:
    def __init__(self) -> None:
        self._num_cached: dict[str, int] = {}  # by request: prompt tokens from the prefix cache, as was told last

    def message(self, events: list[SequenceEvent], record: StepRecord | None) -> StepDone:
        tokens: dict[str, list[int]] = {}
        others = []
        for event in events:
            if self._is_plain(event) and event.request_id not in tokens:
                tokens[event.request_id] = event.tokens
                continue
            others.append(event)
            if event.final:
                self._num_cached.pop(event.request_id, None)
            elif event.num_cached:
                self._num_cached[event.request_id] = event.num_cached
        return StepDone(others, record, tokens)

    def _is_plain(self, event: SequenceEvent) -> bool:
        return (
            event.finish_reason is None
            and event.logprobs is None
            and event.index == 0
            and event.mu is None
            and not event.verified
            and event.prompt_logprobs is None
            and event.num_cached == self._num_cached.get(event.request_id, 0)
        )
