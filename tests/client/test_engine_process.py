"""An engine process that is started before anybody knows what for."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from quire.client import engine_process
from quire.client.engine_client import EngineClient
from quire.client.engine_process import EngineProcess
from quire.core.errors import EngineFailed
from quire.engine.messages import Ready, Start
from quire.engine.options import EngineOptions


def test_nothing_is_left_of_one_that_was_not_needed() -> None:
    with EngineProcess() as spawned:
        assert spawned.process.poll() is None
    assert spawned.process.returncode is not None


def test_it_is_the_engine_of_whoever_takes_it(tiny_model: Path) -> None:
    async def first_word(spawned: EngineProcess) -> tuple[int, object]:
        await spawned.start(Start(str(tiny_model), EngineOptions(model=str(tiny_model))))
        try:
            [message] = await anext(spawned.messages())
            return spawned.pid, message
        finally:
            await spawned.stop()

    with EngineProcess() as spawned:
        pid, word = asyncio.run(first_word(spawned))
    assert pid == spawned.process.pid
    assert isinstance(word, Ready)


def test_one_that_died_before_it_was_taken_is_noticed(tiny_model: Path) -> None:
    """It never says a word: who waited for that alone would wait forever."""

    async def start(spawned: EngineProcess) -> None:
        async with EngineClient(EngineOptions(model=str(tiny_model)), process=spawned):
            pass

    with EngineProcess() as spawned:
        os.kill(spawned.process.pid, signal.SIGKILL)
        with pytest.raises(EngineFailed, match="killed by signal 9"):
            asyncio.run(asyncio.wait_for(start(spawned), 20))


def test_a_kill_when_memory_ran_out_is_not_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_process.num_oom_kills() >= 0
    with EngineProcess() as spawned:
        os.kill(spawned.process.pid, signal.SIGKILL)
    assert spawned.was_killed
    num_before = engine_process.num_oom_kills()
    monkeypatch.setattr(engine_process, "num_oom_kills", lambda: num_before + 1)
    assert not spawned.was_killed
