"""What the engine process tells of a step."""

from dataclasses import replace
from typing import Any

import pytest

from quire.core.request import IdLogprob, SequenceEvent
from quire.engine.messages import decode_from_engine, encode
from quire.engine.process import StepReport

PLAIN = SequenceEvent(request_id="a", index=0, tokens=[5])


@pytest.mark.parametrize(
    "more",
    [
        {"index": 1},
        {"finish_reason": "stop"},
        {"logprobs": [[IdLogprob(5, -1.0, 1)]]},
        {"prompt_logprobs": [[IdLogprob(5, -1.0, 1)]]},
        {"mu": 1.5},
        {"verified": [(3, 1)]},
        {"num_cached": 16},
    ],
    ids=lambda more: next(iter(more)),
)
def test_only_tokens_and_nothing_else_are_told_as_tokens(more: dict[str, Any]) -> None:
    other = replace(PLAIN, request_id="b", **more)
    message = StepReport().message([PLAIN, other], None)
    assert decode_from_engine(encode(message)) == message
    assert message.tokens == {"a": [5]} and message.events == [other]


def test_cached_tokens_are_told_once_for_each_request() -> None:
    report, event = StepReport(), replace(PLAIN, num_cached=16)
    assert report.message([event], None).events == [event]
    assert report.message([event], None).tokens == {"a": [5]}
    more = replace(PLAIN, num_cached=32)  # it was preempted, and found more when it came back
    assert report.message([more], None).events == [more]
    report.message([replace(more, finish_reason="length", final=True)], None)
    assert report.message([event], None).events == [event], "another request of that name"


def test_two_events_of_a_sample_keep_their_order() -> None:
    message = StepReport().message([PLAIN, replace(PLAIN, tokens=[6])], None)
    assert message.tokens == {"a": [5]} and [event.tokens for event in message.events] == [[6]]
