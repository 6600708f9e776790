"""Downloads that several callers share, from a hub that is a directory."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from hub.fake_hub import REPO, Hub, fake_hub
from quire.client.pulls import Pulls


@pytest.fixture
def hub(tiny_model: Path, tmp_path: Path) -> Iterator[Hub]:
    with fake_hub(tiny_model) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(tmp_path))
        patch.delenv("HF_HUB_CACHE", raising=False)
        yield hub


def test_a_pull_that_comes_while_another_is_being_cancelled_starts_anew(hub: Hub) -> None:
    added: list[str] = []

    async def add(name: str, path: str) -> None:
        added.append(name)

    async def main() -> None:
        pulls = Pulls(add)
        hub.hangs.set()
        async with aclosing(pulls.pull(REPO)) as leaving:
            await anext(leaving)
            while not hub.sent:
                await asyncio.sleep(0.01)
        hub.hangs.clear()
        assert not added
        async for _ in pulls.pull(REPO):  # the process of the first has not ended yet
            pass
        assert added == [REPO]
        await pulls.stop()

    asyncio.run(asyncio.wait_for(main(), 60))
