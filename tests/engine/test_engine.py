"""The loop, on an executor that takes plans ahead and one that does not."""

import pytest

from fakes import FakeExecutor
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions


def make(ahead: int) -> Engine:
    options = EngineOptions(max_num_seqs=8, max_num_batched_tokens=64, block_size=16)
    return Engine(FakeExecutor(num_blocks=64, vocab_size=500, ahead=ahead), options)


def request(name: str, max_tokens: int) -> Request:
    return Request(
        id=name, prompt_ids=[ord(letter) for letter in name], params=SamplingParams(seed=1, max_tokens=max_tokens)
    )


def serve(engine: Engine) -> tuple[dict[str, list[int]], int, int]:
    """-> the tokens of every request, the tokens that records tell of, and how many steps there were."""
    tokens: dict[str, list[int]] = {}
    num_drawn = num_steps = 0
    while engine.has_work:
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.tokens)
        if engine.record is not None:
            num_steps += 1
            num_drawn += engine.record.num_drawn
            assert engine.record.run_seconds >= 0.0
    return tokens, num_drawn, num_steps


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_every_request_gets_its_tokens_and_every_step_a_record(ahead: int) -> None:
    engine = make(ahead)
    for name, max_tokens in (("some", 9), ("another", 3), ("third", 1)):
        engine.submit(request(name, max_tokens))
    tokens, num_drawn, num_steps = serve(engine)
    alone = make(0)
    alone.submit(request("some", 9))
    assert tokens["some"] == serve(alone)[0]["some"]
    assert [len(tokens[name]) for name in ("some", "another", "third")] == [9, 3, 1]
    assert num_drawn == 13
    assert num_steps >= 9


@pytest.mark.parametrize("ahead", [1, 2])
def test_it_comes_to_rest_when_everything_under_way_is_cancelled(ahead: int) -> None:
    engine = make(ahead)
    engine.submit(request("some", 20))
    for _ in range(4):
        engine.step()
    assert [event.finish_reason for event in engine.cancel("some")] == ["cancelled"]
    for _ in range(ahead + 2):
        engine.step()
    assert not engine.has_work
    engine.submit(request("some", 20))
    assert len(serve(engine)[0]["some"]) == 20
