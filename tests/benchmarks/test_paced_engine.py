"""The engine of `benchmarks.served` that only waits."""

import select
import socket
import threading
import time

from benchmarks.paced_engine import run_engine

from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.messages import Cancel, Ready, StepDone, Submit, decode_from_engine, encode
from quire.ipc.channel import Channel


def test_every_request_gains_a_token_a_step_until_it_ends_or_is_cancelled() -> None:
    ours, theirs = socket.socketpair()
    engine = threading.Thread(target=run_engine, args=(0.002, theirs.detach()))
    engine.start()
    channel, counts, finals, begin = Channel(ours), {"a": 0, "b": 0}, [], time.perf_counter()
    try:
        for name, num_tokens in (("a", 8), ("b", 1000)):
            params = SamplingParams(max_tokens=num_tokens)
            channel.send(encode(Submit(Request(id=name, prompt_ids=[1], params=params))))
        while not finals:
            assert select.select([channel], [], [], 10)[0]
            for message in map(decode_from_engine, channel.receive()):
                assert isinstance(message, Ready | StepDone)
                if isinstance(message, StepDone):
                    for name, tokens in message.tokens.items():
                        counts[name] += len(tokens)
                    finals += [event.request_id for event in message.events if event.final]
        assert finals == ["a"] and counts["a"] == 7 and counts["b"] >= 7
        assert time.perf_counter() - begin >= 7 * 0.002
        channel.send(encode(Cancel("b", None)))
    finally:
        channel.close()
        engine.join(10)
    assert not engine.is_alive()
